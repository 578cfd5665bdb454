"""A run on paper: memory of every stage, engines, tokens, FLOPs, seconds of an iteration, its bottleneck.

Pure, from a config and the model's `config.json`: starts no process, reads no weights. Not here: refusals
(`limits`), what a rank holds (`memory`), what an iteration takes (`work`, `costs`), tables (`view`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tree.config import Config
from megatron_tree.layout import ParallelLayout
from megatron_tree.placement import Transport
from megatron_tree.planner import work
from megatron_tree.planner.activations import BYTES, Backend
from megatron_tree.planner.costs import Cost, phase_costs
from megatron_tree.planner.limits import (
    EnginePlan,
    check_devices,
    check_layout,
    check_memory,
    check_precision,
    devices_needed,
    engine_plan,
)
from megatron_tree.planner.memory import RankMemory, TrainState, num_parameters, rank_memory
from megatron_tree.reshard import plan
from megatron_tree.reshard.names import ModelShape

ASSUMPTIONS = (
    "phases follow one another; colocated engines fall asleep and wake in no time",
    "paths use all turns and plan.fill of the caps on prompt, turns, observations",
    "prefix caches hold all a tree computed before, and nothing of other trees",
    "not counted: tools, pipeline sends, optimizer arithmetic, evaluation, cut trees",
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage; its tensor-, context- and data-parallel ranks are alike."""

    layers: tuple[tuple[int, int], ...]  # [first, last) of each model chunk
    ranks: tuple[int, int]  # [first, last)
    parameters: int  # of one rank, vocabulary padding included
    memory: RankMemory
    published_bytes: int  # that the stage's owners write for each version


@dataclass(frozen=True, slots=True)
class Estimate:
    parameters: int  # of the model, each once
    image_bytes: int  # of one published version; with shm two slots exist
    layout: ParallelLayout
    stages: tuple[Stage, ...]
    engine: EnginePlan
    num_gpus: int  # the fewest that hold every rank and engine; 0: a CPU
    transport: Transport  # of a version, from owners to engines
    grown: work.Tokens  # of an iteration, by the engines
    packed: work.Tokens  # of an iteration, for the trainer: a prompt once for all its trees
    num_microbatches: int  # of a step, on each dp rank
    num_fillers: int  # micro-batches of a step, over all dp ranks, that get no tree
    flops: work.Flops  # of an iteration
    bubble: float  # share of a step in which a stage waits
    costs: tuple[Cost, ...]
    seconds: float  # of an iteration
    bottleneck: str  # the dearest of `costs`
    assumptions: tuple[str, ...]


def estimate(config: Config, shape: ModelShape) -> Estimate:
    """ValueError where the model does not run as configured on the hardware of the plan section."""
    check_layout(config, shape)
    check_precision(config, shape)
    layout, state = config.train.parallel.layout, train_state(config)
    if config.plan.device == "gpu":
        check_memory(config, shape, state)
    stages = tuple(_stage(config, shape, pp, state) for pp in range(layout.pp))
    engine = engine_plan(config, shape)
    transport = check_devices(config)
    grown = work.expected_tree(config) * (config.rollout.prompts * config.rollout.trees)
    packed = work.expected_prompt(config) * config.rollout.prompts
    flops = work.flops(shape, grown, packed, config.train.recompute, reference=state.reference)
    costs = phase_costs(config, shape, engine, grown, packed, flops, state.num_microbatches)
    waits = layout.pp - 1
    return Estimate(
        parameters=plan.num_elements(plan.engine_reads(shape, 1, 0)),
        image_bytes=sum(stage.published_bytes for stage in stages),
        layout=layout,
        stages=stages,
        engine=engine,
        num_gpus=devices_needed(config) if config.plan.device == "gpu" else 0,
        transport=transport,
        grown=grown,
        packed=packed,
        num_microbatches=state.num_microbatches,
        num_fillers=max(0, state.num_microbatches * layout.dp - work.num_pieces(config)),
        flops=flops,
        bubble=waits / (state.num_microbatches * layout.vpp + waits),
        costs=costs,
        seconds=sum(cost.seconds for cost in costs),
        bottleneck=max(costs, key=lambda cost: cost.seconds).name,
        assumptions=ASSUMPTIONS,
    )


def train_state(config: Config) -> TrainState:
    wanted = config.train.attention
    auto: Backend = "flex" if config.plan.device == "gpu" else "node"
    return TrainState(
        dtype=config.model.dtype,
        backend=auto if wanted == "auto" else wanted,
        micro_batch=work.micro_batch(config),
        num_microbatches=work.num_microbatches(config),
        reference=config.algo.kl_coef > 0,
        recompute=config.train.recompute,
        fp8=config.train.fp8 if config.plan.device == "gpu" else None,
    )


def _stage(config: Config, shape: ModelShape, pp: int, state: TrainState) -> Stage:
    layout = config.train.parallel.layout
    ranks = [rank for rank in layout.ranks() if layout.coordinates(rank).pp == pp]
    chunks = (layout.stage_layers(shape.num_layers, pp, v) for v in range(layout.vpp))
    owned = sum(plan.num_elements(plan.owned(shape, layout, rank)) for rank in ranks)
    return Stage(
        layers=tuple((chunk.start, chunk.stop) for chunk in chunks),
        ranks=(ranks[0], ranks[-1] + 1),
        parameters=num_parameters(shape, layout, pp),
        memory=rank_memory(shape, config.train.parallel, pp, state),
        published_bytes=owned * BYTES[config.engine.dtype],
    )
