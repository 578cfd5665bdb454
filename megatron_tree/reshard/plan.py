"""The slice plan: which element of which Hugging Face tensor lies where on which rank. Pure: layouts in,
copies out.

Invariants (tests/unit/test_plan.py, under the same words):
1. Every element of every tensor is owned exactly once.
2. The slices that a rank holds cover each element of its parameters exactly once, but for vocabulary padding.
3. What a rank owns it also holds.

Loading reads what a rank holds; exporting and publishing write what it owns. The rows of a fused qkv
parameter are cut by row ranges, not by heads, so that tp above the number of KV heads needs no case of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard.names import ModelShape, Name


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """One rectangle that is the same in a Hugging Face tensor and in a rank's parameter.

    Worked example: tp=2, ffn 8, hidden 4: rank 1 holds rows 4..8 of `up_proj` at rows 4..8 of its own
    `linear_fc1` (rows 0..4 are its gate): tensor_start (4, 0), param_start (4, 0), extent (4, 4).
    """

    tensor: str
    tensor_start: tuple[int, ...]
    param: str
    param_start: tuple[int, ...]
    extent: tuple[int, ...]

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
    """The slices that this rank, and no other, writes."""
    at = layout.coordinates(rank)
    if at.dp or at.cp:
        return []
    tied_copy = shape.tied and layout.pp > 1
    return [
        copy
        for name, copy in _walk(shape, layout, rank)
        if (name.rule != "replicated" or at.tp == 0)
        and not (tied_copy and name.place == "last" and name.rule == "vocab")
    ]


def params(shape: ModelShape, layout: ParallelLayout, rank: int) -> list[str]:
    """Names of the rank's parameters, in layer order."""
    return [param for _, param, _ in _stage_names(shape, layout, rank)]


def num_elements(copies: Iterable[SliceCopy]) -> int:
    return sum(math.prod(copy.extent) for copy in copies)


def _walk(shape: ModelShape, layout: ParallelLayout, rank: int) -> Iterator[tuple[Name, SliceCopy]]:
    tp_rank = layout.coordinates(rank).tp
    for name, param, tensors in _stage_names(shape, layout, rank):
        for copy in _copies(shape, name, param, tensors, layout.tp, tp_rank):
            yield name, copy


def _stage_names(
    shape: ModelShape, layout: ParallelLayout, rank: int
) -> Iterator[tuple[Name, str, tuple[str, ...]]]:
    stage = layout.coordinates(rank).pp
    layers = layout.stage_layers(shape.num_layers, stage)
    first = [name for name in shape.names if name.place == "first"]
    last = [name for name in shape.names if name.place == "last"]
    if stage == 0:
        yield from ((name, name.param, name.tensors) for name in first)
    for local, layer in enumerate(layers):
        for name in shape.names:
            if name.place == "layer":
                tensors = tuple(tensor.format(layer=layer) for tensor in name.tensors)
                yield name, name.param.format(layer=local), tensors
    if stage == layout.pp - 1:
        for name in last:
            # with one stage a tied head is the embedding itself: Megatron allocates no second parameter
            if not (shape.tied and layout.pp == 1 and name.rule == "vocab"):
                yield name, name.param, name.tensors


def _copies(
    shape: ModelShape, name: Name, param: str, tensors: tuple[str, ...], tp: int, tp_rank: int
) -> Iterator[SliceCopy]:
    """Slices of one parameter on one tensor-parallel rank."""
    full = shape.tensor_shape(tensors[0])
    if name.rule == "columns":
        width = full[1] // tp
        yield SliceCopy(tensors[0], (0, tp_rank * width), param, (0, 0), (full[0], width))
        return
    for tensor, tensor_row, param_row, rows in _row_ranges(shape, name.rule, tensors, tp, tp_rank):
        rest = full[1:]
        zeros = (0,) * len(rest)
        yield SliceCopy(tensor, (tensor_row, *zeros), param, (param_row, *zeros), (rows, *rest))


def _row_ranges(
    shape: ModelShape, rule: str, tensors: tuple[str, ...], tp: int, tp_rank: int
) -> Iterator[tuple[str, int, int, int]]:
    """(tensor, first row there, first row in the parameter, number of rows)."""
    rows = shape.tensor_shape(tensors[0])[0]
    if rule == "replicated":
        yield tensors[0], 0, 0, rows
    elif rule == "rows":
        yield tensors[0], tp_rank * (rows // tp), 0, rows // tp
    elif rule == "vocab":
        part = shape.padded_vocab(tp) // tp
        first = tp_rank * part
        if first < rows:
            yield tensors[0], first, 0, min(part, rows - first)
    elif rule == "gate_up":
        part = rows // tp
        for index, tensor in enumerate(tensors):
            yield tensor, tp_rank * part, index * part, part
    else:
        yield from _qkv_ranges(shape, tensors, tp, tp_rank)


def _qkv_ranges(
    shape: ModelShape, tensors: tuple[str, ...], tp: int, tp_rank: int
) -> Iterator[tuple[str, int, int, int]]:
    """The fused parameter is, per KV group, its queries, its key, its value; a rank holds an equal range of
    its rows."""
    q_rows = shape.heads // shape.kv_heads * shape.head_dim
    sizes = (q_rows, shape.head_dim, shape.head_dim)
    part = sum(sizes) * shape.kv_heads // tp
    low, high = tp_rank * part, (tp_rank + 1) * part
    row = 0
    for group in range(shape.kv_heads):
        for tensor, size in zip(tensors, sizes, strict=True):
            start, stop = max(row, low), min(row + size, high)
            if start < stop:
                yield tensor, group * size + start - row, start - low, stop - start
            row += size
