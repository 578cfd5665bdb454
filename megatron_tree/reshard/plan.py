"""The slice plan: which element of which Hugging Face tensor lies where on which rank, and which an engine
worker reads. Pure: layouts in, rectangles out.

Invariants (tests/unit/test_plan.py, under the same words):
1. Every element of every tensor is owned exactly once.
2. The slices that a rank holds cover each element of its parameters exactly once, but for vocabulary padding.
3. What a rank owns it also holds.
4. The atoms partition every tensor, and what a rank owns.
5. What an engine worker reads is a disjoint union of atoms.
6. The workers of an engine together read every element.

Loading reads what a rank holds; exporting and publishing write what it owns. `prove` checks the invariants
for one model, layout and set of engines. Where a tensor is cut is `cuts`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import cuts
from megatron_tree.reshard.names import TIED_HEAD, ModelShape, Name, check_model


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a Hugging Face tensor."""

    tensor: str
    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.extent, strict=True))


@dataclass(frozen=True, slots=True)
class Atom(Region):
    """What one rank writes and the same workers of an engine read: the unit in which a slice would travel to
    workers on other hosts. On one host nothing travels, and engines digest slices as their owners wrote them.

    Worked example: 8 rows written by rank 0 (0..4) and rank 1 (4..8) and read by three workers whole are two
    atoms: (0..4, writer 0, readers 0 1 2) and (4..8, writer 1, readers 0 1 2).
    """

    writer: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """One rectangle that is the same in a Hugging Face tensor and in a rank's parameter.

    Worked example: tp=2, ffn 8, hidden 4: rank 1 holds rows 4..8 of `up_proj` at rows 4..8 of its own
    `linear_fc1` (rows 0..4 are its gate): tensor_start (4, 0), param_start (4, 0), extent (4, 4).
    Parameters are named within their model chunk: with vpp > 1 each chunk has a `decoder.layers.0`.
    """

    tensor: str
    tensor_start: tuple[int, ...]
    param: str
    param_start: tuple[int, ...]
    extent: tuple[int, ...]
    chunk: int = 0

    @property
    def region(self) -> Region:
        return Region(self.tensor, self.tensor_start, self.extent)

    @property
    def tensor_index(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.tensor_start, self.extent, strict=True))

    @property
    def param_index(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.param_start, self.extent, strict=True))


def held(shape: ModelShape, layout: ParallelLayout, rank: int) -> list[SliceCopy]:
    """Every slice that the rank's parameters are made of."""
    return [copy for _, copy in _walk(shape, layout, rank)]


def owned(shape: ModelShape, layout: ParallelLayout, rank: int) -> list[SliceCopy]:
    """The slices that this rank, and no other, writes. A tied head is the embedding's second copy."""
    if not layout.is_first_replica(rank):
        return []
    tp_rank = layout.coordinates(rank).tp
    return [
        copy
        for name, copy in _walk(shape, layout, rank)
        if (name.rule != "replicated" or tp_rank == 0) and name is not TIED_HEAD
    ]


def params(shape: ModelShape, layout: ParallelLayout, rank: int, chunk: int = 0) -> list[str]:
    """Names of the parameters of one of the rank's model chunks, in layer order."""
    return [param for _, param, _ in _chunk_names(shape, layout, rank, chunk)]


def param_shapes(
    shape: ModelShape, layout: ParallelLayout, rank: int, chunk: int = 0
) -> dict[str, tuple[int, ...]]:
    """The same with their shapes, vocabulary padding included: what Megatron-Core allocates."""
    return {
        param: cuts.param_shape(shape, name, tensors, layout.tp)
        for name, param, tensors in _chunk_names(shape, layout, rank, chunk)
    }


def num_elements(rectangles: Iterable[SliceCopy | Region]) -> int:
    return sum(math.prod(rectangle.extent) for rectangle in rectangles)


def _walk(shape: ModelShape, layout: ParallelLayout, rank: int) -> Iterator[tuple[Name, SliceCopy]]:
    tp_rank = layout.coordinates(rank).tp
    for chunk in range(layout.vpp):
        for name, param, tensors in _chunk_names(shape, layout, rank, chunk):
            for copy in _copies(shape, name, param, tensors, layout.tp, tp_rank, chunk):
                yield name, copy


def _chunk_names(
    shape: ModelShape, layout: ParallelLayout, rank: int, chunk: int
) -> Iterator[tuple[Name, str, tuple[str, ...]]]:
    stage = layout.coordinates(rank).pp
    layers = layout.stage_layers(shape.num_layers, stage, chunk)
    return _names(shape, layers, layout.has_embedding(stage, chunk), layout.has_head(stage, chunk))


def _names(
    shape: ModelShape, layers: range, first: bool, last: bool
) -> Iterator[tuple[Name, str, tuple[str, ...]]]:
    """(table row, parameter, tensors) of consecutive layers, with what stands before and behind them."""
    if first:
        yield from ((name, name.param, name.tensors) for name in shape.names if name.place == "first")
    for local, layer in enumerate(layers):
        for name in shape.names:
            if name.place == "layer":
                tensors = tuple(tensor.format(layer=layer) for tensor in name.tensors)
                yield name, name.param.format(layer=local), tensors
    if last:
        for name in shape.names:
            # a tied head beside its embedding is the embedding itself: no second parameter is allocated
            if name.place == "last" and not (name is TIED_HEAD and first):
                yield name, name.param, name.tensors


def _copies(
    shape: ModelShape, name: Name, param: str, tensors: tuple[str, ...], tp: int, tp_rank: int, chunk: int
) -> Iterator[SliceCopy]:
    """Slices of one parameter on one tensor-parallel rank."""
    full = shape.tensor_shape(tensors[0])
    if name.rule == "columns":
        width = full[1] // tp
        yield SliceCopy(tensors[0], (0, tp_rank * width), param, (0, 0), (full[0], width), chunk)
        return
    for tensor, tensor_row, param_row, rows in cuts.row_ranges(shape, name.rule, tensors, tp, tp_rank):
        rest = full[1:]
        zeros = (0,) * len(rest)
        yield SliceCopy(tensor, (tensor_row, *zeros), param, (param_row, *zeros), (rows, *rest), chunk)


def engine_reads(shape: ModelShape, engine_tp: int, worker: int) -> list[Region]:
    """What one tensor-parallel worker of a vLLM engine needs, in layer order. ValueError where vLLM cannot
    cut the model so."""
    cuts.check_engine(shape, engine_tp)
    found = []
    for name, _, tensors in _names(shape, range(shape.num_layers), first=True, last=True):
        for part, tensor in enumerate(tensors):
            size = shape.tensor_shape(tensor)
            axis, low, high = cuts.engine_span(shape, name.rule, part, size, engine_tp, worker)
            if low < high:
                found.append(Region(tensor, *_rectangle(size, axis, low, high)))
    return found


def _rectangle(
    size: tuple[int, ...], axis: int, low: int, high: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, extent) of a region that is whole in every other dimension."""
    start, extent = [0] * len(size), list(size)
    start[axis], extent[axis] = low, high - low
    return tuple(start), tuple(extent)


def atoms(shape: ModelShape, layout: ParallelLayout, engine_tp: int) -> list[Atom]:
    """Every slice that a rank owns, cut where what the workers read begins or ends; in layer order."""
    writes, reads = _writes(shape, layout), _reads(shape, engine_tp)
    found = []
    for tensor, size in shape.tensors().items():
        axis, pieces = _cut(size, writes.get(tensor, []), reads.get(tensor, []))
        for low, high, writer, readers in pieces:
            found.append(Atom(tensor, *_rectangle(size, axis, low, high), writer, readers))
    return found


_Marked = list[tuple[Region, int]]  # with the rank that writes it, or the worker that reads it
_Span = tuple[int, int]  # first and last + 1 along the dimension in which a tensor is cut


def _writes(shape: ModelShape, layout: ParallelLayout) -> dict[str, _Marked]:
    return _by_tensor((copy.region, r) for r in layout.ranks() for copy in owned(shape, layout, r))


def _reads(shape: ModelShape, engine_tp: int) -> dict[str, _Marked]:
    return _by_tensor((region, w) for w in range(engine_tp) for region in engine_reads(shape, engine_tp, w))


def _by_tensor(marked: Iterable[tuple[Region, int]]) -> dict[str, _Marked]:
    found: dict[str, _Marked] = {}
    for region, who in marked:
        found.setdefault(region.tensor, []).append((region, who))
    return found


def _cut(
    size: tuple[int, ...], writes: _Marked, reads: _Marked
) -> tuple[int, list[tuple[int, int, int, tuple[int, ...]]]]:
    """The dimension, and (low, high, writer, readers) of each atom, in order."""
    axis, spans = _spans(size, [region for region, _ in (*writes, *reads)])
    wanted = spans[len(writes) :]
    edges = {edge for span in wanted for edge in span}
    pieces = []
    for (first, last), (_, writer) in sorted(zip(spans, writes, strict=False), key=lambda pair: pair[0]):
        inner = sorted(edge for edge in edges if first < edge < last)
        for low, high in pairwise((first, *inner, last)):
            covering = (begin <= low and high <= end for begin, end in wanted)
            readers = tuple(worker for (_, worker), covers in zip(reads, covering, strict=True) if covers)
            pieces.append((low, high, writer, readers))
    return axis, pieces


def _spans(size: tuple[int, ...], regions: Sequence[Region]) -> tuple[int, list[_Span]]:
    """The regions as intervals. Trainers and engines cut a tensor in the same one dimension: anything else is
    refused, so intervals are all there is to prove."""
    if len(size) == 2 and any(region.extent[1] != size[1] for region in regions):
        axis, other = 1, 0
    else:
        axis, other = 0, len(size) - 1
    for region in regions:
        if len(size) == 2 and (region.start[other], region.extent[other]) != (0, size[other]):
            raise AssertionError(f"cut in two dimensions of {size}: {region}")
    return axis, [(region.start[axis], region.start[axis] + region.extent[axis]) for region in regions]


@dataclass(frozen=True, slots=True)
class EngineProof:
    tp: int
    atoms: int
    read_bytes: tuple[int, int]  # fewest and most of a worker


@dataclass(frozen=True, slots=True)
class Proof:
    """What `prove` counted; bytes are (fewest, most) of a rank, without vocabulary padding."""

    tensors: int
    elements: int
    slices: int  # that owners write
    owned_bytes: tuple[int, int]  # of the ranks with dp 0 and cp 0, the only ones that write
    held_bytes: tuple[int, int]
    engines: tuple[EngineProof, ...]


def prove(
    shape: ModelShape, layout: ParallelLayout, engine_tps: Iterable[int], element_bytes: int = 2
) -> Proof:
    """Checks invariants 1-6 for one model, layout and set of engine sizes, on intervals: no weight is
    allocated, and no layer is taken to be like another.

    ValueError where the model does not fit the layout or an engine; AssertionError where the plan is wrong.
    `element_bytes` scales the byte counts. A 70B model on TP 8 x PP 8 x VPP 2 takes less than a second.
    """
    check_model(shape, layout)
    ranks = [rank for rank in layout.ranks() if layout.is_first_replica(rank)]  # others are copies of these
    holds = [held(shape, layout, rank) for rank in ranks]
    owns = [owned(shape, layout, rank) for rank in ranks]
    for rank, mine, written in zip(ranks, holds, owns, strict=True):
        _prove_held(shape, layout, rank, mine)
        if missing := set(written) - set(mine):
            raise AssertionError(f"rank {rank} owns but does not hold {missing}")
    writes, tensors = _writes(shape, layout), shape.tensors()
    if writes.keys() != tensors.keys():
        raise AssertionError(f"tensors without an owner: {tensors.keys() ^ writes.keys()}")
    for tensor, size in tensors.items():
        axis, spans = _spans(size, [region for region, _ in writes[tensor]])
        _prove_tiled(tensor, (0, size[axis]), spans)
    return Proof(
        tensors=len(tensors),
        elements=sum(math.prod(size) for size in tensors.values()),
        slices=sum(map(len, owns)),
        owned_bytes=_extremes(map(num_elements, owns), element_bytes),
        held_bytes=_extremes(map(num_elements, holds), element_bytes),
        engines=tuple(_prove_engine(shape, tp, writes, element_bytes) for tp in engine_tps),
    )


def _prove_held(shape: ModelShape, layout: ParallelLayout, rank: int, copies: list[SliceCopy]) -> None:
    """Invariant 2. Slices are taken for regions of the rank's parameters."""
    parts: dict[tuple[int, str], list[Region]] = {}
    for copy in copies:
        region = Region(copy.param, copy.param_start, copy.extent)
        parts.setdefault((copy.chunk, copy.param), []).append(region)
    for chunk in range(layout.vpp):
        for name, param, tensors in _chunk_names(shape, layout, rank, chunk):
            size = cuts.param_shape(shape, name, tensors, layout.tp)
            axis, spans = _spans(size, parts.pop((chunk, param), []))
            high = size[axis]
            if name.rule == "vocab":
                high = max(0, min(high, shape.vocab - layout.coordinates(rank).tp * high))
            _prove_tiled(f"rank {rank}: {param}", (0, high), spans)
    if parts:
        raise AssertionError(f"rank {rank}: slices of parameters it does not have: {sorted(parts)}")


def _prove_engine(shape: ModelShape, tp: int, writes: dict[str, _Marked], element_bytes: int) -> EngineProof:
    """Invariants 4-6."""
    reads = _reads(shape, tp)
    num_atoms, read = 0, [0] * tp
    for tensor, size in shape.tensors().items():
        axis, pieces = _cut(size, writes[tensor], reads[tensor])
        num_atoms += len(pieces)
        _prove_tiled(tensor, (0, size[axis]), [(low, high) for low, high, _, _ in pieces])
        if not all(readers for _, _, _, readers in pieces):
            raise AssertionError(f"engine tp {tp} does not read all of {tensor}")
        for region, rank in writes[tensor]:
            first, last = region.start[axis], region.start[axis] + region.extent[axis]
            own = [(low, high) for low, high, writer, _ in pieces if writer == rank and first <= low < last]
            _prove_tiled(f"{tensor} as written by rank {rank}", (first, last), own)
        for region, worker in reads[tensor]:
            first, last = region.start[axis], region.start[axis] + region.extent[axis]
            seen = [(low, high) for low, high, _, readers in pieces if worker in readers]
            _prove_tiled(f"{tensor} as read by worker {worker}", (first, last), seen)
            read[worker] += math.prod(region.extent)
    return EngineProof(tp, num_atoms, _extremes(read, element_bytes))


def _prove_tiled(what: str, whole: _Span, spans: Iterable[_Span]) -> None:
    """The spans lie end to end and are exactly the whole."""
    at = whole[0]
    for low, high in sorted(spans):
        if low != at:
            raise AssertionError(f"{what}: {'gap' if low > at else 'overlap'} between {at} and {low}")
        at = high
    if at != whole[1]:
        raise AssertionError(f"{what}: covered to {at} of {whole[1]}")


def _extremes(elements: Iterable[int], element_bytes: int) -> tuple[int, int]:
    counts = list(elements)
    return min(counts) * element_bytes, max(counts) * element_bytes
