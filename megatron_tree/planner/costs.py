"""What each phase of an iteration moves or computes on its busiest rank or worker, and how long that takes.

A ring over n ranks moves (n - 1) / n of a buffer to reduce and scatter it, and as much to gather it; an
all-reduce is both. Pure. Not here: how many tokens and FLOPs there are (`work`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tree.config import Config
from megatron_tree.layout import Coordinates, ParallelLayout
from megatron_tree.planner import work
from megatron_tree.planner.activations import BYTES
from megatron_tree.planner.limits import NODE_RANKS, EnginePlan
from megatron_tree.planner.memory import num_parameters
from megatron_tree.reshard import plan
from megatron_tree.reshard.names import ModelShape


@dataclass(frozen=True, slots=True)
class Cost:
    """One phase of an iteration. `amount` is of the busiest rank or engine worker."""

    name: str
    amount: float
    unit: str  # FLOP or bytes
    seconds: float


def phase_costs(
    config: Config,
    shape: ModelShape,
    engine: EnginePlan,
    grown: work.Tokens,
    packed: work.Tokens,
    flops: work.Flops,
    num_microbatches: int,
) -> tuple[Cost, ...]:
    """Of the tokens that engines have `grown` and trainers have `packed`. Phases that cost nothing are left
    out."""
    layout, hardware = config.train.parallel.layout, config.plan
    rate = hardware.peak_tflops * 1e12 * hardware.efficiency
    node, network = hardware.node_gb_per_s * 1e9, hardware.network_gb_per_s * 1e9
    workers = config.engine.count * config.engine.tp
    score, train, recomputed = _busiest_rank(config, shape, packed)
    waiting = (layout.pp - 1) / (num_microbatches * layout.vpp)  # over the busy time of a stage
    tensor, context = _tensor_parallel_bytes(config, shape, packed), _context_bytes(config, shape, packed)
    gradients = _gradient_bytes(config, shape)
    published = engine.update_bytes + max(
        _written_bytes(shape, layout, pp, config.engine.dtype) for pp in range(layout.pp)
    )
    near = layout.tp * layout.cp <= NODE_RANKS
    costs = (
        _decode(config, shape, engine, grown, flops, rate),
        Cost("prefill", flops.prefill / workers, "FLOP", flops.prefill / workers / rate),
        Cost("score", score, "FLOP", score / rate),
        Cost("train", train, "FLOP", train / rate),
        Cost("recomputation", recomputed, "FLOP", recomputed / rate),
        Cost("pipeline bubble", 0.0, "FLOP", waiting * (score + train + recomputed) / rate),
        Cost("tensor-parallel sums", tensor, "bytes", tensor / node),
        Cost("context-parallel keys", context, "bytes", context / (node if near else network)),
        Cost("gradient sums", gradients, "bytes", gradients / network),
        Cost("publish", published, "bytes", published / network),
    )
    return tuple(cost for cost in costs if cost.seconds)


def _busiest_rank(config: Config, shape: ModelShape, tokens: work.Tokens) -> tuple[float, float, float]:
    """FLOPs of scoring, training and recomputation on a rank of the stage that has most of them."""
    layout = config.train.parallel.layout
    scores = work.num_scores(reference=config.algo.kl_coef > 0)
    found = []
    for stage in range(layout.pp):
        layers, head = _num_layers(shape, layout, stage), layout.has_head(stage, layout.vpp - 1)
        forward = work.forward_flops(shape, tokens, layers, head=head)
        again = work.recomputed_flops(shape, tokens, layers, config.train.recompute)
        found.append((scores * forward, 3 * forward, again))
    score, train, again = max(found, key=sum)
    alike = layout.world_size // layout.pp
    return score / alike, train / alike, again / alike


def _decode(
    config: Config, shape: ModelShape, engine: EnginePlan, tokens: work.Tokens, flops: work.Flops, rate: float
) -> Cost:
    """Steps of one token for each running sequence: each reads the weights and all running keys and values.

    The chains of an iteration run in 1 + L waves, so fewer than `num_sequences` may be at hand.
    """
    rollout, count, tp = config.rollout, config.engine.count, config.engine.tp
    leaves = rollout.prompts * rollout.trees * rollout.leaves_per_tree
    running = min(engine.num_sequences, max(1.0, leaves / (count * (1 + rollout.expand_rounds))))
    steps = tokens.generated / count / running
    context = tokens.generated_keys / tokens.generated
    moved = steps * (engine.weight_bytes + running * context * engine.kv_bytes_per_token)
    seconds = moved / (config.plan.memory_gb_per_s * 1e9)
    computed = flops.decode / (count * tp)
    if computed / rate > seconds:
        return Cost("decode", computed, "FLOP", computed / rate)
    return Cost("decode", moved, "bytes", seconds)


def _tensor_parallel_bytes(config: Config, shape: ModelShape, tokens: work.Tokens) -> float:
    """Each half of a layer sums its hidden states in the forward pass, and the gradients of its input in the
    backward pass. Sequence parallelism scatters and gathers instead, the same bytes, and gathers the input
    once more for the gradient of the weights."""
    parallel, recompute = config.train.parallel, config.train.recompute
    layout = parallel.layout
    passes = work.num_scores(reference=config.algo.kl_coef > 0) + 1
    halves = 2 * 2 * passes + 2 * (3 if parallel.sequence_parallel else 2)
    if recompute.granularity == "full":
        halves += 2 * 2
    elif recompute.granularity == "selective" and "mlp" in recompute.modules:
        halves += 2
    hidden = tokens.unique / (layout.dp * layout.cp) * shape.hidden * BYTES[config.model.dtype]
    return halves * _most_layers(shape, layout) * (layout.tp - 1) / layout.tp * hidden


def _context_bytes(config: Config, shape: ModelShape, tokens: work.Tokens) -> float:
    """A layer gathers keys and values in the forward pass, also in one that recomputes attention, and
    scatters the sums of their gradients in the backward pass."""
    layout, recompute = config.train.parallel.layout, config.train.recompute
    again = recompute.granularity == "full" or (
        recompute.granularity == "selective" and "core_attn" in recompute.modules
    )
    passes = work.num_scores(reference=config.algo.kl_coef > 0) + 2 + again
    heads = max(shape.kv_heads / layout.tp, 1)
    keys = tokens.unique / layout.dp * 2 * heads * shape.head_dim * BYTES[config.model.dtype]
    return passes * _most_layers(shape, layout) * (layout.cp - 1) / layout.cp * keys


def _gradient_bytes(config: Config, shape: ModelShape) -> float:
    """fp32 sums out; back come the sums, or the weights that a distributed optimizer made of them."""
    parallel = config.train.parallel
    layout, ranks = parallel.layout, parallel.dp * parallel.cp
    parameters = max(num_parameters(shape, layout, stage) for stage in range(layout.pp))
    back = BYTES[config.model.dtype] if parallel.distributed_optimizer else 4
    return (ranks - 1) / ranks * parameters * (4 + back) * config.train.mini_batches


def _written_bytes(shape: ModelShape, layout: ParallelLayout, pp: int, dtype: str) -> int:
    rank = layout.rank(Coordinates(tp=0, cp=0, dp=0, pp=pp))  # also writes what is replicated
    return plan.num_elements(plan.owned(shape, layout, rank)) * BYTES[dtype]


def _num_layers(shape: ModelShape, layout: ParallelLayout, stage: int) -> int:
    return sum(len(layout.stage_layers(shape.num_layers, stage, chunk)) for chunk in range(layout.vpp))


def _most_layers(shape: ModelShape, layout: ParallelLayout) -> int:
    return max(_num_layers(shape, layout, stage) for stage in range(layout.pp))
