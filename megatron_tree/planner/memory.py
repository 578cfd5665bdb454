"""Bytes that one trainer rank holds at its fullest moment. Pure: shape, layout and step in, numbers out.

Parameters are those the slice plan lists. Gradients are fp32. The distributed optimizer keeps weights and
gradients in buffers whose parameters begin at multiples of 64 elements and which end at one that its dp * cp
shards divide; each rank has the optimizer states of one shard. Not here: what one micro-batch saves
(`activations`), temporary buffers (`plan.reserve_gib`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import mul

from megatron_tree.config import Fp8Config, ParallelConfig, RecomputeConfig
from megatron_tree.layout import Coordinates, ParallelLayout
from megatron_tree.planner.activations import BYTES, Activations, Backend, Dtype, PackedTokens
from megatron_tree.planner.schedule import passes
from megatron_tree.planner.work import layer_parameters
from megatron_tree.reshard import plan
from megatron_tree.reshard.names import EMBEDDING, TIED_HEAD, ModelShape
from megatron_tree.train import precision


@dataclass(frozen=True, slots=True)
class TrainState:
    """What decides a rank's memory, beside shape and layout."""

    dtype: Dtype
    backend: Backend
    micro_batch: PackedTokens
    num_microbatches: int  # of a step, on each dp rank
    reference: bool
    recompute: RecomputeConfig
    fp8: Fp8Config | None = None  # of products that Transformer Engine computes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank at its fullest moment."""

    weights: int
    fp8_copies: int  # of weights, beside them while a step lasts
    gradients: int
    optimizer: int
    reference: int
    in_flight: int  # forward passes of a model chunk whose backward pass is to come
    activations: int  # of these
    activations_recomputed: int  # the same with full recomputation
    logits: int  # copies that live only while the head is computed

    @property
    def kept(self) -> int:
        return self.weights + self.fp8_copies + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        return self.kept + self.activations + self.logits

    @property
    def total_recomputed(self) -> int:
        return self.kept + self.activations_recomputed + self.logits


def num_parameters(shape: ModelShape, layout: ParallelLayout, stage: int) -> int:
    """Of one rank of a stage, with vocabulary padding and the second copy of a tied head."""
    return sum(sum(sizes.values()) for sizes in _chunks(shape, layout, stage))


def rank_memory(shape: ModelShape, parallel: ParallelConfig, stage: int, state: TrainState) -> RankMemory:
    layout, element = parallel.layout, BYTES[state.dtype]
    chunks = _chunks(shape, layout, stage)
    parameters = sum(sum(sizes.values()) for sizes in chunks)
    shards = parallel.dp * parallel.cp if parallel.distributed_optimizer else None
    buffered = parameters if shards is None else sum(_padded(shape, layout, c, shards) for c in chunks)
    # bf16 weights have an fp32 main copy in the optimizer
    states = (8 if state.dtype == "fp32" else 12) * buffered // (shards or 1)
    per_pass = Activations(shape, parallel, state.dtype, state.backend, state.micro_batch)
    in_flight, activations = _fullest(shape, layout, stage, state, per_pass)
    full = state.recompute.model_copy(update={"granularity": "full"})
    return RankMemory(
        weights=element * buffered,
        fp8_copies=_fp8_copies(shape, layout, stage, state.fp8),
        gradients=4 * buffered,
        optimizer=states,
        reference=element * parameters if state.reference else 0,
        in_flight=in_flight,
        activations=activations,
        activations_recomputed=_fullest(shape, layout, stage, replace(state, recompute=full), per_pass)[1],
        logits=round(per_pass.logits) if layout.has_head(stage, layout.vpp - 1) else 0,
    )


def _chunks(shape: ModelShape, layout: ParallelLayout, stage: int) -> list[dict[str, int]]:
    """Elements of each parameter of each model chunk."""
    rank = layout.rank(Coordinates(tp=0, cp=0, dp=0, pp=stage))
    return [
        {name: math.prod(size) for name, size in plan.param_shapes(shape, layout, rank, chunk).items()}
        for chunk in range(layout.vpp)
    ]


def _padded(shape: ModelShape, layout: ParallelLayout, sizes: dict[str, int], shards: int) -> int:
    """Elements of the buffer of a model chunk. The two copies of a tied embedding that are on different
    stages have buckets of their own."""
    own = {EMBEDDING.param, TIED_HEAD.param} if shape.tied and layout.pp > 1 else set[str]()
    buckets = ([n for name, n in sizes.items() if (name in own) == alone] for alone in (True, False))
    unit = math.lcm(shards, 128)
    return sum(-(-sum(-(-n // 64) * 64 for n in bucket) // unit) * unit for bucket in buckets)


def _fp8_copies(shape: ModelShape, layout: ParallelLayout, stage: int, fp8: Fp8Config | None) -> int:
    """Each matrix of a layer by rows and by columns, a byte an element; `mxfp8` has a scale of a byte for
    every 32. Weights that are kept in FP8 (`param_gather`) are their own copies, as large as in bf16."""
    if fp8 is None or fp8.param_gather:
        return 0
    chunks = (layout.stage_layers(shape.num_layers, stage, chunk) for chunk in range(layout.vpp))
    layers = sum(
        precision.of_layer(fp8, shape.num_layers, layer) is not None for chunk in chunks for layer in chunk
    )
    elements = layers * layer_parameters(shape) // layout.tp
    return 2 * elements + (2 * elements // 32 if fp8.recipe == "mxfp8" else 0)


def _fullest(
    shape: ModelShape, layout: ParallelLayout, stage: int, state: TrainState, per_pass: Activations
) -> tuple[int, int]:
    """Passes in flight when most bytes are, and these bytes."""
    layers = [len(layout.stage_layers(shape.num_layers, stage, chunk)) for chunk in range(layout.vpp)]
    sizes = [
        per_pass.chunk(
            count,
            state.recompute,
            first=layout.has_embedding(stage, chunk),
            head=layout.has_head(stage, chunk),
        )
        for chunk, count in enumerate(layers)
    ]
    again = [per_pass.again(count, state.recompute) for count in layers]
    held, most = [0] * layout.vpp, (0.0, 0)
    for one in passes(layout, stage, _enough(layout, state.num_microbatches)):
        held[one.chunk] += one.forward
        # the head has gone when the layers of its micro-batch are computed again
        extra = again[one.chunk]
        if one.forward:
            extra = per_pass.head if layout.has_head(stage, one.chunk) else 0.0
        most = max(most, (sum(map(mul, held, sizes)) + extra, sum(held)))
        held[one.chunk] -= not one.forward
    return most[1], round(most[0])


def _enough(layout: ParallelLayout, num_microbatches: int) -> int:
    """Micro-batches after which a schedule repeats itself."""
    if layout.vpp == 1:
        return min(num_microbatches, layout.pp)
    groups = min(-(-num_microbatches // layout.pp), 4)
    return groups * layout.pp
