"""The bench's own counters, on bytes counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import xxhash

from megatron_tree.reshard import digest, image
from megatron_tree.reshard.plan import SliceCopy
from tests.unit.shapes import small_shape
from tools.bench_reshard_engine import CountingHashes, ImageReads
from tools.bench_reshard_ranks import CountedArray

SHAPE = small_shape(family="qwen2", tied=False)
NAME = "model.embed_tokens.weight"  # [10, 3] in fp32: 120 bytes


def test_reads_of_the_image_are_counted_once_and_views_not(tmp_path: Path) -> None:
    image.create(tmp_path / "image", SHAPE, torch.float32)
    with ImageReads(str(tmp_path / "image")) as reads, torch.inference_mode():
        tensor = image.readable(tmp_path / "image")[NAME]
        torch.empty(10, 3, device="meta").copy_(tensor)  # vLLM's loader counts elements this way
        half = tensor.narrow(0, 0, 5).detach().view(-1)
        assert reads.num_bytes == 0
        torch.empty(15).copy_(half)
        assert reads.num_bytes == 60
        tensor[:, :1].contiguous()
        assert reads.num_bytes == 60 + 40
        torch.ones(10, 3).clone()  # other memory
        assert reads.num_bytes == 100


def test_digested_bytes_are_counted_and_digests_the_same() -> None:
    hashes, block = CountingHashes(), np.arange(12, dtype=np.uint8)
    state = hashes.xxh3_64()
    state.update(block[:4])
    state.update(block[4:])
    assert state.hexdigest() == xxhash.xxh3_64_hexdigest(block.tobytes())
    assert hashes.num_bytes == 12


def test_stored_bytes_are_counted(tmp_path: Path, monkeypatch) -> None:
    image.create(tmp_path / "image", SHAPE, torch.float32)
    raw = digest._raw
    monkeypatch.setattr(digest, "_raw", lambda tensor: raw(tensor).view(CountedArray))
    monkeypatch.setattr(CountedArray, "num_bytes", 0)
    monkeypatch.setattr(digest, "BLOCK_BYTES", 24)  # two rows
    half = SliceCopy(NAME, (0, 0), "embedding", (0, 0), (5, 3))
    slot = image.writable(tmp_path / "image")
    digest.write_slices(slot, {"embedding": torch.full((5, 3), 2.0)}, [half])
    assert CountedArray.num_bytes == 60
    assert slot[NAME][:5].eq(2.0).all()
