"""A run on paper: memory of every stage, engines, tokens, FLOPs, seconds of an iteration, its bottleneck.

Pure, from a config and the model's `config.json`: starts no process, reads no weights. Not here: refusals
(`limits`), what a rank holds (`memory`), what an iteration costs (`work`), tables (`view`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tree.config import Config
from megatron_tree.layout import Coordinates, ParallelLayout
from megatron_tree.planner import work
from megatron_tree.planner.limits import EnginePlan, check_layout, check_memory, engine_plan
from megatron_tree.planner.memory import BYTES, RankMemory, TrainState, num_parameters, rank_memory
from megatron_tree.reshard import plan
from megatron_tree.reshard.names import ModelShape

ASSUMPTIONS = (
    "trainer ranks and engines have devices of their own; phases follow one another",
    "paths use all turns and plan.fill of the caps on prompt, turns, observations",
    "prefix caches hold all a tree computed before; trees share nothing",
    "attention reads grouped keys in place on GPUs (flex), copies them on CPUs (node)",
    "not counted: tools, pipeline sends, optimizer arithmetic, evaluation, cut trees",
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage; its tensor- and data-parallel ranks are alike."""

    layers: tuple[tuple[int, int], ...]  # [first, last) of each model chunk
    ranks: tuple[int, int]  # [first, last)
    parameters: int  # of one rank, vocabulary padding included
    memory: RankMemory
    published_bytes: int  # that the stage's owners write for each version


@dataclass(frozen=True, slots=True)
class Cost:
    """One phase of an iteration. `amount` is of the busiest rank or engine worker."""

    name: str
    amount: float
    unit: str  # FLOP or bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    parameters: int  # of the model, each once
    image_bytes: int  # of one published version; two slots exist
    layout: ParallelLayout
    stages: tuple[Stage, ...]
    engine: EnginePlan
    tokens: work.Tokens  # of an iteration
    num_microbatches: int  # of a step, on each dp rank
    flops: work.Flops  # of an iteration
    bubble: float  # share of a step in which a stage waits
    costs: tuple[Cost, ...]
    seconds: float  # of an iteration
    bottleneck: str  # the dearest of `costs`
    assumptions: tuple[str, ...]


def estimate(config: Config, shape: ModelShape, *, distributed_optimizer: bool = False) -> Estimate:
    """ValueError where the model does not run as configured on the hardware of the plan section."""
    layout = config.train.parallel.layout
    check_layout(shape, layout)
    state = TrainState(
        dtype=config.model.dtype,
        backend="flex" if config.plan.device == "gpu" else "node",
        micro_batch=work.micro_batch(config),
        num_microbatches=work.num_microbatches(config),
        reference=config.algo.kl_coef > 0,
        distributed_optimizer=distributed_optimizer,
    )
    if config.plan.device == "gpu":
        check_memory(config, shape, state)
    stages = tuple(_stage(shape, layout, pp, state, config.engine.dtype) for pp in range(layout.pp))
    engine = engine_plan(config, shape)
    tokens = work.expected_iteration(config)
    found = work.flops(shape, tokens, reference=state.reference)
    waits, busy = layout.pp - 1, state.num_microbatches * layout.vpp
    costs = _costs(config, shape, stages, engine, tokens, found, waits / busy, distributed_optimizer)
    return Estimate(
        parameters=plan.num_elements(plan.engine_reads(shape, 1, 0)),
        image_bytes=sum(stage.published_bytes for stage in stages),
        layout=layout,
        stages=stages,
        engine=engine,
        tokens=tokens,
        num_microbatches=state.num_microbatches,
        flops=found,
        bubble=waits / (busy + waits),
        costs=costs,
        seconds=sum(cost.seconds for cost in costs),
        bottleneck=max(costs, key=lambda cost: cost.seconds).name,
        assumptions=ASSUMPTIONS,
    )


def _stage(shape: ModelShape, layout: ParallelLayout, pp: int, state: TrainState, image_dtype: str) -> Stage:
    ranks = [rank for rank in layout.ranks() if layout.coordinates(rank).pp == pp]
    chunks = (layout.stage_layers(shape.num_layers, pp, v) for v in range(layout.vpp))
    owned = sum(plan.num_elements(plan.owned(shape, layout, rank)) for rank in ranks)
    return Stage(
        layers=tuple((chunk.start, chunk.stop) for chunk in chunks),
        ranks=(ranks[0], ranks[-1] + 1),
        parameters=num_parameters(shape, layout, pp),
        memory=rank_memory(shape, layout, pp, state),
        published_bytes=owned * BYTES[image_dtype],
    )


def _costs(
    config: Config,
    shape: ModelShape,
    stages: tuple[Stage, ...],
    engine: EnginePlan,
    tokens: work.Tokens,
    flops: work.Flops,
    waiting: float,
    distributed_optimizer: bool,
) -> tuple[Cost, ...]:
    """`waiting` is the bubble over the busy time of a stage."""
    layout, hardware, ranks = (
        config.train.parallel.layout,
        config.plan,
        config.train.parallel.layout.world_size,
    )
    rate = hardware.peak_tflops * 1e12 * hardware.efficiency
    workers = config.engine.count * config.engine.tp
    score, train = flops.score / ranks, flops.train / ranks
    tensor = _tensor_parallel_bytes(config, shape, tokens)
    parameters, element = max(stage.parameters for stage in stages), BYTES[config.model.dtype]
    # a ring moves (dp - 1) / dp of the buffer to reduce it, and as much to hand the sums, or weights, round
    gathered = element if distributed_optimizer else 4
    gradients = (layout.dp - 1) / layout.dp * parameters * (4 + gathered) * config.train.mini_batches
    written = max(_written_bytes(shape, layout, pp, config.engine.dtype) for pp in range(layout.pp))
    published = written + engine.weight_bytes
    return (
        _decode(config, shape, engine, tokens, flops, rate),
        Cost("prefill", flops.prefill / workers, "FLOP", flops.prefill / workers / rate),
        Cost("score", score, "FLOP", score / rate),
        Cost("train", train, "FLOP", train / rate),
        Cost("pipeline bubble", 0.0, "FLOP", waiting * (score + train) / rate),
        Cost("tensor-parallel sums", tensor, "bytes", tensor / (hardware.node_gb_per_s * 1e9)),
        Cost("gradient sums", gradients, "bytes", gradients / (hardware.network_gb_per_s * 1e9)),
        Cost("publish", published, "bytes", published / (hardware.network_gb_per_s * 1e9)),
    )


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
    """A layer's forward pass sums the hidden states twice over tp ranks, its backward pass twice more; a ring
    moves 2 (tp - 1) / tp of them each time."""
    layout = config.train.parallel.layout
    passes = 2 * 2 + 2 * (2 if config.algo.kl_coef > 0 else 1)
    hidden = tokens.unique / layout.dp * shape.hidden * BYTES[config.model.dtype]
    return passes * shape.num_layers / layout.pp * 2 * (layout.tp - 1) / layout.tp * hidden


def _written_bytes(shape: ModelShape, layout: ParallelLayout, pp: int, dtype: str) -> int:
    rank = layout.rank(Coordinates(tp=0, cp=0, dp=0, pp=pp))  # also writes what is replicated
    return plan.num_elements(plan.owned(shape, layout, rank)) * BYTES[dtype]
