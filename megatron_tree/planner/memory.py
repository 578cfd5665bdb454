"""Bytes that one trainer rank holds. Pure: a shape, a layout and a micro-batch in, numbers out.

Activations are the storages that autograd saves, in the model of `train.model` with its layer spec; with
h hidden, f ffn / tp, q and kv the query and key columns of a rank, d the head dim, e bytes of an element, S
tokens, a layer saves

    two norms         S (4 h + e h + 4) each: the input in fp32, the scaled input, the inverse root
    their outputs     S e h each, as inputs of linear_qkv and linear_fc1
    rotary tables     S 4 e d: cosines and sines, for queries and again for keys, not cut by tp
    attention         S e q each for queries and output, S e kv for keys, 4 S heads for the log-sum-exp;
                      values are a view that keeps the fused S e (q + 2 kv) alive
    gated MLP         S 5 e f: both halves, silu, the linear half plus its offset, the product

The back end `flex` gives its output by heads, so that linear_proj's input is one more copy, S e q. Fused
kernels of Transformer Engine would save less: these figures bound them.

The head runs on the T trained tokens: T e h and T 4 V / tp for the softmax; while it is computed up to two
more copies of the logits live.

Not here: context and sequence parallelism, temporary buffers of the backward pass (`plan.reserve_gib`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_tree.layout import Coordinates, ParallelLayout
from megatron_tree.reshard import plan
from megatron_tree.reshard.names import ModelShape

BYTES = {"fp32": 4, "bf16": 2}
Backend = Literal["node", "flex"]
Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """What the activations of a micro-batch depend on."""

    tokens: float  # S
    trained: float  # T


@dataclass(frozen=True, slots=True)
class TrainState:
    """What decides a rank's memory, beside shape and layout."""

    dtype: Dtype
    backend: Backend
    micro_batch: PackedTokens
    num_microbatches: int  # of a step, on each dp rank
    reference: bool
    distributed_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank at its fullest moment."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    in_flight: int  # forward passes of a model chunk whose backward pass is to come
    activations: int  # of these
    activations_recomputed: int  # the same with full recomputation
    logits: int  # copies that live only while the head is computed

    @property
    def kept(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        return self.kept + self.activations + self.logits

    @property
    def total_recomputed(self) -> int:
        return self.kept + self.activations_recomputed + self.logits


def num_parameters(shape: ModelShape, layout: ParallelLayout, stage: int) -> int:
    """Of one rank of a stage, with vocabulary padding and the second copy of a tied head."""
    rank = layout.rank(Coordinates(tp=0, cp=0, dp=0, pp=stage))
    return sum(
        math.prod(size)
        for chunk in range(layout.vpp)
        for size in plan.param_shapes(shape, layout, rank, chunk).values()
    )


def rank_memory(shape: ModelShape, layout: ParallelLayout, stage: int, state: TrainState) -> RankMemory:
    parameters, element = num_parameters(shape, layout, stage), BYTES[state.dtype]
    shards = layout.dp * layout.cp if state.distributed_optimizer else 1
    # bf16 weights have an fp32 main copy in the optimizer
    optimizer = (8 if state.dtype == "fp32" else 12) * parameters
    in_flight = chunks_in_flight(layout, stage, state.num_microbatches)
    last = layout.has_head(stage, layout.vpp - 1)
    return RankMemory(
        weights=element * parameters,
        gradients=4 * parameters,
        optimizer=-(-optimizer // shards),
        reference=element * parameters if state.reference else 0,
        in_flight=in_flight,
        activations=round(_stage_activations(shape, layout, stage, state, in_flight, recompute=False)),
        activations_recomputed=round(
            _stage_activations(shape, layout, stage, state, in_flight, recompute=True)
        ),
        # beside the softmax: logits in the weights' dtype, and one more fp32 copy while they are divided
        logits=round((element + 4) * _num_logits(shape, layout.tp, state.micro_batch)) if last else 0,
    )


def chunks_in_flight(layout: ParallelLayout, stage: int, num_microbatches: int) -> int:
    """Forward passes of model chunks that wait for their backward pass, at most: 1F1B, interleaved where
    vpp > 1 (Megatron-Core's warm-up, and one).

    Worked example, pp=4, 8 micro-batches: 4, 3, 2, 1; with vpp=2: 11, 9, 7, 5 of half the layers.
    """
    if layout.vpp == 1:
        return min(layout.pp - stage, num_microbatches)
    warm_up = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp
    return min(warm_up + 1, num_microbatches * layout.vpp)


def micro_batch_activations(
    shape: ModelShape, layout: ParallelLayout, stage: int, state: TrainState, *, recompute: bool = False
) -> float:
    """Bytes that autograd saves of one micro-batch on one rank, over all chunks of its stage."""
    return _stage_activations(shape, layout, stage, state, layout.vpp, recompute=recompute)


def _stage_activations(
    shape: ModelShape,
    layout: ParallelLayout,
    stage: int,
    state: TrainState,
    in_flight: int,
    *,
    recompute: bool,
) -> float:
    batch, element = state.micro_batch, BYTES[state.dtype]
    layers = sum(len(layout.stage_layers(shape.num_layers, stage, v)) for v in range(layout.vpp))
    layer = _layer(shape, layout.tp, state.dtype, state.backend, batch)
    hidden = batch.tokens * shape.hidden * element
    saved = layers * (hidden if recompute else layer) * in_flight / layout.vpp
    if recompute and layers:
        saved += layer  # the one that is being recomputed
    if stage > 0 and state.dtype == "bf16" and not recompute:
        saved += hidden * in_flight  # received from the stage before; fp32 norms save it anyhow
    if stage == 0:
        saved += 8 * batch.tokens * in_flight / layout.vpp  # token ids, for the embedding
    if layout.has_head(stage, layout.vpp - 1):
        saved += _norm(batch.tokens, shape.hidden, element) + batch.trained * (shape.hidden * element + 29)
        saved += 4 * _num_logits(shape, layout.tp, batch)
    return saved


def _layer(shape: ModelShape, tp: int, dtype: Dtype, backend: Backend, batch: PackedTokens) -> float:
    """Bytes that autograd saves of one layer of one micro-batch on one rank."""
    tokens, e = batch.tokens, BYTES[dtype]
    heads, kv_heads = shape.heads / tp, max(shape.kv_heads / tp, 1)
    q, kv = heads * shape.head_dim, kv_heads * shape.head_dim
    norms = 2 * (_norm(tokens, shape.hidden, e) + tokens * e * shape.hidden)
    rotary = tokens * 4 * e * shape.head_dim
    attention = tokens * (e * (q * (3 if backend == "flex" else 2) + kv) + 4 * heads)
    if shape.qk_norm:
        attention += _norm(tokens, q, e) + _norm(tokens, kv, e)
        if dtype == "fp32":  # the input of the keys' norm is a view of the fused projection too
            attention -= tokens * 4 * kv
    fused = tokens * e * (q + 2 * kv)
    return norms + rotary + attention + fused + tokens * 5 * e * shape.ffn / tp


def _norm(tokens: float, width: float, element: int) -> float:
    return tokens * (4 * width + element * width + 4)


def _num_logits(shape: ModelShape, tp: int, batch: PackedTokens) -> float:
    return batch.trained * shape.padded_vocab(tp) / tp
