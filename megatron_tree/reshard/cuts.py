"""Where a tensor is cut: by Megatron-Core over tensor-parallel ranks, by vLLM over an engine's workers. Pure.

Megatron cuts the rows of a fused qkv parameter by row ranges, not by heads, so that tp above the number of
KV heads needs no case of its own; its vocabulary is padded to a multiple of tp. vLLM cuts q, k, v, gate and
up by rows, o and down by columns, the vocabulary padded to a multiple of 64 by rows, and replicates KV heads
where there are fewer of them than workers. Which rank has which layer is `plan`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_tree.reshard.names import ModelShape, Name, Rule

ENGINE_VOCAB_MULTIPLE = 64


def param_shape(shape: ModelShape, name: Name, tensors: tuple[str, ...], tp: int) -> tuple[int, ...]:
    """What Megatron-Core allocates on one rank, vocabulary padding included."""
    rows, *rest = shape.tensor_shape(tensors[0])
    if name.rule == "columns":
        return (rows, rest[0] // tp)
    if name.rule == "vocab":
        rows = shape.padded_vocab(tp)
    elif name.rule in ("qkv", "gate_up"):
        rows = sum(shape.tensor_shape(tensor)[0] for tensor in tensors)
    return (rows if name.rule == "replicated" else rows // tp, *rest)


def row_ranges(
    shape: ModelShape, rule: Rule, tensors: tuple[str, ...], tp: int, tp_rank: int
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


def check_engine(shape: ModelShape, engine_tp: int) -> None:
    """The rules by which vLLM cuts a model. ValueError names the field, the rule and the values."""
    padded = _engine_vocab(shape)
    for field, count in (("heads", shape.heads), ("ffn rows", shape.ffn), ("padded vocabulary rows", padded)):
        if count % engine_tp:
            raise ValueError(f"engine.tp: must divide the model's {count} {field}, got {engine_tp}")
    if shape.kv_heads % engine_tp and engine_tp % shape.kv_heads:
        raise ValueError(
            f"engine.tp: must divide the model's {shape.kv_heads} KV heads or be a multiple of them, "
            f"got {engine_tp}"
        )


def engine_span(
    shape: ModelShape, rule: Rule, part: int, size: tuple[int, ...], engine_tp: int, worker: int
) -> tuple[int, int, int]:
    """(dimension, low, high) of what a worker needs of the `part`-th Hugging Face tensor of a table row.

    Worked example: 2 KV heads on 4 workers: workers 0 and 1 need head 0, workers 2 and 3 head 1.
    """
    axis = 1 if rule == "columns" else 0
    whole = size[axis]
    if rule == "replicated":
        return axis, 0, whole
    if rule == "vocab":
        rows = _engine_vocab(shape) // engine_tp
        return axis, min(worker * rows, whole), min((worker + 1) * rows, whole)
    copies = max(engine_tp // shape.kv_heads, 1) if rule == "qkv" and part > 0 else 1
    length, number = whole * copies // engine_tp, worker // copies
    return axis, number * length, (number + 1) * length


def _engine_vocab(shape: ModelShape) -> int:
    return -(-shape.vocab // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE
