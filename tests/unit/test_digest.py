"""Digests of published slices: values from xxhash over bytes cut out by numpy, faults made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import digest, image, plan
from tests.unit.shapes import small_shape

SHAPE = small_shape(heads=4, kv_heads=2, vocab=9, tied=False)
LAYOUT = ParallelLayout(tp=2, pp=1)


def _params(rank: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A rank's parameters, drawn with what all its slices need of room."""
    generator = torch.Generator().manual_seed(rank)
    sizes: dict[str, list[int]] = {}
    for copy in plan.held(SHAPE, LAYOUT, rank):
        ends = [s + n for s, n in zip(copy.param_start, copy.extent, strict=True)]
        sizes[copy.param] = [max(a, b) for a, b in zip(sizes.get(copy.param, ends), ends, strict=True)]
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}


def _publish(path: Path, version: int, dtype: torch.dtype = torch.float32) -> list[digest.SliceDigest]:
    image.create(path, SHAPE, dtype)
    digest.forget(path)
    found = []
    for rank in LAYOUT.ranks():
        owned = plan.owned(SHAPE, LAYOUT, rank)
        written = digest.write_slices(image.writable(path), _params(rank), owned)
        digest.save(path, version, rank, written)
        found += written
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digests_are_those_of_the_slices_bytes(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "BLOCK_BYTES", 64)  # several blocks per slice
    path = tmp_path / "image"
    written = _publish(path, 3, dtype)
    tensors = image.readable(path)
    for one in written:
        cut = np.ascontiguousarray(tensors[one.tensor].float()[one.index])
        raw = torch.from_numpy(cut).to(dtype).view(torch.uint8).numpy().tobytes()
        assert one.value == xxhash.xxh3_64_hexdigest(raw), one
    assert digest.verify(path, 3, SHAPE) == sum(t.numel() * t.element_size() for t in tensors.values())


def test_every_element_must_be_written(tmp_path: Path) -> None:
    """1. A version passes only if every element of every tensor was written for it, exactly once."""
    path = tmp_path / "image"
    _publish(path, 3)
    Path(f"{path}.1.digests").unlink()
    with pytest.raises(
        ValueError, match=r"elements of model\.embed_tokens\.weight were written for version 3"
    ):
        digest.verify(path, 3, SHAPE)


def test_twice_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "image"
    written = _publish(path, 3)
    digest.save(path, 3, 7, written[:1])
    with pytest.raises(ValueError, match=rf"elements of {written[0].tensor} were written"):
        digest.verify(path, 3, SHAPE)


def test_a_stale_rank_is_named(tmp_path: Path) -> None:
    path = tmp_path / "image"
    written = _publish(path, 3)
    digest.save(path, 1, 1, written)
    with pytest.raises(ValueError, match="rank 1 wrote version 1, not version 3"):
        digest.verify(path, 3, SHAPE)


@pytest.mark.parametrize(
    "tensor", ["lm_head.weight", "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"]
)
def test_a_flipped_byte_is_named(tmp_path: Path, tensor: str) -> None:
    """2. A byte that differs from what its owner held is named by tensor and rank."""
    path = tmp_path / "image"
    _publish(path, 3)
    mapped = image.writable(path)[tensor]
    last = mapped.view(-1)[-1:].view(torch.uint8)
    last[0] ^= 1
    # the last element: of a split tensor rank 1's, of a whole one rank 0's
    rank = 0 if tensor == "model.norm.weight" else 1
    with pytest.raises(ValueError, match=rf"{tensor} at .* is not what rank {rank} wrote"):
        digest.verify(path, 3, SHAPE)
