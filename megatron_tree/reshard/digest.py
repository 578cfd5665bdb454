"""Digests of published slices: what an owner wrote is what an engine finds, of this version, whole.

Each owner copies a slice into the image and digests its own bytes in the same pass, block by block, so that
the second reading comes from the cache. An engine digests the same rectangles of the image before it loads
any of them. All engine workers of a host map the same pages, so one check serves them. xxh3-64: fast, not
cryptographic; it guards against lost, torn, stale and flipped bytes, not against an adversary.

Invariants (tests/unit/test_digest.py, under the same words):
1. A version passes only if every element of every tensor was written for it, exactly once.
2. A byte that differs from what its owner held is named by tensor and rank.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from megatron_tree.reshard.image import Maps
from megatron_tree.reshard.names import ModelShape
from megatron_tree.reshard.plan import Region, SliceCopy

BLOCK_BYTES = 1 << 19  # half of a small second-level cache


@dataclass(frozen=True, slots=True)
class SliceDigest(Region):
    value: str  # 16 hexadecimal digits
    rank: int = -1  # that wrote it


def write_slices(
    image: Mapping[str, Tensor], params: Mapping[str, Tensor], copies: Iterable[SliceCopy]
) -> list[SliceDigest]:
    """Copies a rank's slices into a mapped image, cast to its dtype, and digests what was copied. Exports are
    written by it too: the digests cost less than a second way to write."""
    found = []
    for copy in copies:
        source, target = params[copy.param][copy.param_index], image[copy.tensor][copy.tensor_index]
        same = source.device == target.device and source.dtype == target.dtype
        state, slot, held = xxhash.xxh3_64(), _raw(target), _raw(source) if same else None
        for rows in _blocks(slot):
            part = _raw(source[rows].to(target)) if held is None else held[rows]
            block = np.ascontiguousarray(part)
            slot[rows] = block
            state.update(block.data)
        found.append(SliceDigest(copy.tensor, copy.tensor_start, copy.extent, state.hexdigest()))
    return found


def save(image: Path, version: int, rank: int, digests: Iterable[SliceDigest]) -> None:
    """Writes a rank's digests beside the image: with them the rank says that it is done with this version."""
    slices = [[d.tensor, d.start, d.extent, d.value] for d in digests]
    path = _path(image, rank)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({"version": version, "slices": slices}), encoding="utf-8")
    aside.replace(path)


def forget(image: Path) -> None:
    """Removes all digests of a slot: nothing of it can be loaded until it is written again."""
    for path in image.parent.glob(f"{image.name}.*.digests"):
        path.unlink(missing_ok=True)


def verify(image: Path, version: int, shape: ModelShape, maps: Maps | None = None) -> int:
    """Checks a whole image; returns the bytes digested. ValueError names what is missing, stale or
    different. `maps` keeps the image mapped for the next check."""
    found = _load(image, version)
    written: Counter[str] = Counter()
    for digest in found:
        written[digest.tensor] += math.prod(digest.extent)
    for tensor, expected in shape.tensors().items():
        if written[tensor] != math.prod(expected):
            raise ValueError(
                f"image {image}: {written[tensor]} of {math.prod(expected)} elements of {tensor} "
                f"were written for version {version}"
            )
    mapped = (maps or Maps(writable=False)).tensors(image)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        return sum(threads.map(lambda digest: _check(image, mapped, digest), found))


def _check(image: Path, mapped: Mapping[str, Tensor], digest: SliceDigest) -> int:
    region, state = _raw(mapped[digest.tensor][digest.index]), xxhash.xxh3_64()
    for rows in _blocks(region):
        state.update(np.ascontiguousarray(region[rows]).data)
    if state.hexdigest() != digest.value:
        raise ValueError(
            f"image {image}: {digest.tensor} at {digest.start} is not what rank {digest.rank} wrote"
        )
    return region.nbytes


def _load(image: Path, version: int) -> list[SliceDigest]:
    found: list[SliceDigest] = []
    for path in sorted(image.parent.glob(f"{image.name}.*.digests")):
        saved = json.loads(path.read_text(encoding="utf-8"))
        rank = int(path.name.split(".")[-2])
        if saved["version"] != version:
            raise ValueError(
                f"image {image}: rank {rank} wrote version {saved['version']}, not version {version}"
            )
        for tensor, start, extent, value in saved["slices"]:
            found.append(SliceDigest(tensor, tuple(start), tuple(extent), value, rank))
    return found


def _path(image: Path, rank: int) -> Path:
    return image.with_name(f"{image.name}.{rank}.digests")


def _raw(tensor: Tensor) -> np.ndarray:
    """The tensor's own bytes, [rows, bytes of a row]. Not torch: its operators cost microseconds each, and
    more under the stand-ins of a CPU rank."""
    return tensor.detach().view(len(tensor), -1).view(torch.uint8).numpy()


def _blocks(raw: np.ndarray) -> Iterator[slice]:
    """Ranges of rows of about BLOCK_BYTES."""
    step = max(BLOCK_BYTES // raw.shape[1], 1)
    for start in range(0, len(raw), step):
        yield slice(start, start + step)
