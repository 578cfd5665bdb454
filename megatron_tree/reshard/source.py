"""A published version as its owners keep it and send it: vLLM's `WeightSource` over the slice plan.

Each rank keeps a copy of the slices that it owns, in the engines' dtype, in host memory, until the next
version: however far training has gone, a version can be sent again. The sending rank of a stage (tp 0, dp 0,
cp 0) gathers one bucket of whole tensors at a time from the stage's tensor-parallel ranks. Where engines have
the ranks' own GPUs it passes each on to every rank (`relayed`).

Invariants (tests/dist/test_source.py, under the same words):
1. Metadata is the whole model in layer order, on every rank.
2. Every tensor is held by exactly one rank, and iteration yields what is held, in metadata order.
3. What is yielded is the Hugging Face tensor, bit for bit.
4. A sending rank has at most two buckets and one peer's part of a bucket at a time, any other its own part,
   and one bucket of those that are relayed.
5. Every rank gets what is relayed: each bucket of the whole model, in layer order.

`vllm` must not be imported here, so the contract is met by name: `metadata`, `held_names`, iteration. In it
a rank that only contributes holds nothing and yields nothing, but has to be iterated all the same. Not here:
the way to the engines (`wire`), what they do with it (`receive`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, repeat

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import plan
from megatron_tree.reshard.names import ModelShape
from megatron_tree.reshard.plan import SliceCopy
from megatron_tree.types import Segment

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """vLLM's class of the same name and fields."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def segments(shape: ModelShape, layout: ParallelLayout) -> tuple[Segment, ...]:
    """The whole model in layer order, cut where another pipeline stage holds what follows."""
    stages = {
        copy.tensor: layout.coordinates(rank).pp
        for rank in layout.ranks()
        for copy in plan.owned(shape, layout, rank)
    }
    found = []
    for stage, run in groupby(shape.tensors(), key=stages.__getitem__):
        names = tuple(run)
        found.append(Segment(stage, names, tuple(shape.tensor_shape(name) for name in names)))
    return tuple(found)


def buckets(tensors: Sequence[ParamMeta], bucket_bytes: int) -> Iterator[list[ParamMeta]]:
    """vLLM's own rule (`packed_tensor`), by which the receiver cuts too: a bucket is closed by the tensor
    that takes it over `bucket_bytes`."""
    bucket: list[ParamMeta] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(t.num_elements * t.dtype.itemsize for t in bucket) > bucket_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


class SliceSource:
    """`group` is the rank's tensor-parallel group, `device` what it and the engines' group transport."""

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        rank: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        device: str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.version: int | None = None
        self._shape, self._dtype, self._group = shape, dtype, group
        self._device, self._bucket_bytes = device, bucket_bytes
        at = layout.coordinates(rank)
        self._contributes, self.sends = layout.is_first_replica(rank), layout.speaks_for_stage(rank)
        self._peers = [layout.rank(replace(at, tp=tp, cp=0, dp=0)) for tp in range(layout.tp)]
        self._owned = [_by_tensor(plan.owned(shape, layout, peer)) for peer in self._peers]
        self._me, self.stage = at.tp, at.pp
        self._segments = [
            (segment.stage, [ParamMeta(*t) for t in zip(segment.names, repeat(dtype), segment.shapes)])
            for segment in segments(shape, layout)
        ]
        self._speakers = {layout.coordinates(r).pp: r for r in layout.ranks() if layout.speaks_for_stage(r)}
        pinned = device != "cpu"
        self._kept = {
            copy: torch.empty(copy.extent, dtype=dtype, pin_memory=pinned)
            for copy in plan.owned(shape, layout, rank)
        }

    def keep(
        self, version: int, parameters: Iterable[tuple[Mapping[str, Tensor], Sequence[SliceCopy]]]
    ) -> None:
        """Copies what the rank owns out of its parameters, chunk by chunk; the version before is gone."""
        self.version = version
        for params, copies in parameters:
            for copy in copies:
                self._kept[copy].copy_(params[copy.param].detach()[copy.param_index])

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._dtype, size) for name, size in self._shape.tensors().items()]

    def held_names(self) -> list[str]:
        """What iteration yields here: the stage's tensors on its sending rank, nothing on any other."""
        return [meta.name for bucket in self._own() for meta in bucket] if self.sends else []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket, flat in self.packed():
            yield from _views(bucket, flat)

    def packed(self) -> Iterator[tuple[list[ParamMeta], Tensor]]:
        """The same by buckets, each one flat tensor. Run it to the end on every rank: ranks that yield
        nothing send their parts meanwhile."""
        for bucket in self._own():
            if self.sends:
                yield bucket, self._gather(bucket)
            else:
                self._contribute(bucket)

    def relayed(self) -> Iterator[Tensor]:
        """Every bucket of the model as one flat tensor, on every rank of the default process group."""
        for stage, tensors in self._segments:
            for bucket in buckets(tensors, self._bucket_bytes):
                if stage == self.stage and self.sends:
                    flat = self._gather(bucket)
                else:
                    if stage == self.stage and self._contributes:
                        self._contribute(bucket)
                    flat = self._empty(_num_elements(bucket))
                dist.broadcast(flat, self._speakers[stage])
                yield flat
                del flat  # before the next is made

    def _own(self) -> Iterator[list[ParamMeta]]:
        """The buckets that this rank has a part in."""
        for stage, tensors in self._segments:
            if stage == self.stage and self._contributes:
                yield from buckets(tensors, self._bucket_bytes)

    def _gather(self, bucket: list[ParamMeta]) -> Tensor:
        flat = self._empty(_num_elements(bucket))
        tensors = dict(_views(bucket, flat))
        for tp, peer in enumerate(self._peers):
            copies = self._copies(bucket, tp)
            parts = [self._kept[copy] for copy in copies] if tp == self._me else self._receive(copies, peer)
            for copy, part in zip(copies, parts, strict=True):
                tensors[copy.tensor][copy.tensor_index].copy_(part)
            del parts  # before the next peer's are received
        return flat

    def _contribute(self, bucket: list[ParamMeta]) -> None:
        copies = self._copies(bucket, self._me)
        flat = self._empty(plan.num_elements(copies))
        for copy, part in zip(copies, _split(flat, copies), strict=True):
            part.copy_(self._kept[copy])
        if copies:
            dist.send(flat, self._peers[0], self._group)

    def _receive(self, copies: list[SliceCopy], peer: int) -> list[Tensor]:
        flat = self._empty(plan.num_elements(copies))
        if copies:
            dist.recv(flat, peer, self._group)
        return _split(flat, copies)

    def _copies(self, bucket: list[ParamMeta], tp: int) -> list[SliceCopy]:
        """What a tensor-parallel rank has of a bucket."""
        return [copy for meta in bucket for copy in self._owned[tp].get(meta.name, ())]

    def _empty(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=self._dtype, device=self._device)


def _num_elements(bucket: Sequence[ParamMeta]) -> int:
    return sum(meta.num_elements for meta in bucket)


def _by_tensor(copies: Sequence[SliceCopy]) -> dict[str, list[SliceCopy]]:
    found: dict[str, list[SliceCopy]] = {}
    for copy in copies:
        found.setdefault(copy.tensor, []).append(copy)
    return found


def _views(bucket: Sequence[ParamMeta], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    parts = flat.split([meta.num_elements for meta in bucket])
    return ((meta.name, part.view(meta.shape)) for meta, part in zip(bucket, parts, strict=True))


def _split(flat: Tensor, copies: Sequence[SliceCopy]) -> list[Tensor]:
    parts = flat.split([math.prod(copy.extent) for copy in copies])
    return [part.view(copy.extent) for copy, part in zip(copies, parts, strict=True)]
