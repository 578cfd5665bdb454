"""What cannot run, refused in one line that names the rule and the nearest layout that can. Pure.

Not here: what a rank holds (`memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_tree.config import Config
from megatron_tree.layout import ParallelLayout
from megatron_tree.planner.memory import BYTES, RankMemory, TrainState, rank_memory
from megatron_tree.planner.work import expected_path
from megatron_tree.reshard import plan
from megatron_tree.reshard.cuts import check_engine
from megatron_tree.reshard.names import ModelShape, check_model

GIB = 1 << 30
NODE_RANKS = 8  # tensor parallelism wider than a node is possible, but never proposed


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Bytes and tokens of one engine."""

    weight_bytes: int  # of the worker that holds most
    read_bytes: int  # by all workers, for each version
    kv_bytes: int  # cache of one worker
    kv_bytes_per_token: int  # of one worker
    kv_tokens: int
    path_tokens: float  # expected, with the prompt
    num_sequences: int  # of that length that fit and may decode together


def check_layout(shape: ModelShape, layout: ParallelLayout) -> None:
    """`check_model`, with the nearest layout that it lets pass."""
    refusal = _refusal(check_model, shape, layout)
    if refusal is None:
        return
    tp = _nearest(layout.tp, _tps(shape))
    pp = layout.pp
    if _refusal(check_model, shape, _with(layout, tp, pp)) is not None:
        pps = [pp for pp in range(1, shape.num_layers + 1) if shape.num_layers % (pp * layout.vpp) == 0]
        pp = _nearest(layout.pp, pps or [1])
    raise ValueError(f"{refusal}; the nearest layout that can run is tp={tp} pp={pp}")


def check_memory(config: Config, shape: ModelShape, state: TrainState) -> None:
    """Every rank fits its device, or the ways out are named."""
    layout, hardware = config.train.parallel.layout, config.plan
    room = hardware.memory_gib - hardware.reserve_gib
    found = [rank_memory(shape, layout, stage, state) for stage in range(layout.pp)]
    fullest = max(range(layout.pp), key=lambda stage: found[stage].total)
    memory = found[fullest]
    if memory.total <= room * GIB:
        return
    parts = ("weights", "gradients", "optimizer", "reference", "activations", "logits")
    listed = ", ".join(f"{part} {getattr(memory, part) / GIB:.1f}" for part in parts)
    raise ValueError(
        f"train.parallel: a rank of stage {fullest} must fit plan.memory_gib {hardware.memory_gib:g} less "
        f"plan.reserve_gib {hardware.reserve_gib:g}, got {memory.total / GIB:.1f} GiB ({listed}); "
        f"{_ways_out(config, shape, state, found)}; with full recomputation it would be "
        f"{memory.total_recomputed / GIB:.1f} GiB"
    )


def _ways_out(config: Config, shape: ModelShape, state: TrainState, found: Sequence[RankMemory]) -> str:
    """The smallest layout that fits, and how short micro-batches would have to be for this one."""
    layout, room = config.train.parallel.layout, config.plan.memory_gib - config.plan.reserve_gib
    ways = []
    fits = _smallest_that_fits(shape, layout, state, room)
    if fits is not None:
        ways.append(f"the smallest layout that fits is tp={fits.tp} pp={fits.pp}")
    share = min((room * GIB - m.kept) / (m.activations + m.logits) for m in found)  # linear in the tokens
    tokens = int(share * config.train.micro_batch_tokens)
    if tokens >= config.data.max_prompt_tokens + config.rollout.max_path_tokens:
        ways.append(f"this layout fits with train.micro_batch_tokens={tokens}")
    return ", ".join(ways) or f"no layout up to tp={NODE_RANKS} fits a micro-batch of the longest path"


def _smallest_that_fits(
    shape: ModelShape, layout: ParallelLayout, state: TrainState, room: float
) -> ParallelLayout | None:
    """Fewest ranks; of equals the widest tensor parallelism, which has no bubble."""
    pps = [pp for pp in range(1, shape.num_layers + 1) if shape.num_layers % pp == 0]
    tps = [tp for tp in _tps(shape) if tp <= NODE_RANKS]
    for tp, pp in sorted(((tp, pp) for tp in tps for pp in pps), key=lambda c: (c[0] * c[1], c[1])):
        tried = ParallelLayout(tp=tp, pp=pp, dp=layout.dp)
        if all(rank_memory(shape, tried, stage, state).total <= room * GIB for stage in range(pp)):
            return tried
    return None


def engine_plan(config: Config, shape: ModelShape) -> EnginePlan:
    """ValueError where vLLM cannot cut the model, or the weights leave no room for one longest sequence."""
    engine, element = config.engine, BYTES[config.engine.dtype]
    tps = [tp for tp in range(1, shape.heads + 1) if _refusal(check_engine, shape, tp) is None]
    if refusal := _refusal(check_engine, shape, engine.tp):
        raise ValueError(f"{refusal}; the nearest that can run is engine.tp={_nearest(engine.tp, tps)}")
    if _kv_tokens(config, shape, engine.tp) < engine.max_model_len:
        raise ValueError(_engine_too_small(config, shape, tps))
    reads = [plan.num_elements(plan.engine_reads(shape, engine.tp, w)) * element for w in range(engine.tp)]
    tokens, length = _kv_tokens(config, shape, engine.tp), expected_path(config).length
    return EnginePlan(
        weight_bytes=max(reads),
        read_bytes=sum(reads),
        kv_bytes=_kv_bytes(config, shape, engine.tp),
        kv_bytes_per_token=_kv_bytes_per_token(config, shape, engine.tp),
        kv_tokens=tokens,
        path_tokens=length,
        num_sequences=max(1, min(int(tokens / length), engine.max_num_seqs)),
    )


def _kv_bytes(config: Config, shape: ModelShape, tp: int) -> int:
    """What vLLM has for keys and values on one worker; below 0 where the weights alone do not fit."""
    if config.plan.device == "cpu":
        return int(config.engine.kv_cache_gib * GIB)
    weights = max(plan.num_elements(plan.engine_reads(shape, tp, worker)) for worker in range(tp))
    room = config.plan.memory_gib * config.engine.gpu_memory_utilization - config.plan.reserve_gib
    return int(room * GIB) - weights * BYTES[config.engine.dtype]


def _kv_bytes_per_token(config: Config, shape: ModelShape, tp: int) -> int:
    heads = max(shape.kv_heads // tp, 1)  # replicated where there are more workers than heads
    return 2 * shape.num_layers * heads * shape.head_dim * BYTES[config.engine.dtype]


def _kv_tokens(config: Config, shape: ModelShape, tp: int) -> int:
    """Whole blocks of one worker's cache, in tokens."""
    block = config.engine.block_size
    blocks = _kv_bytes(config, shape, tp) // (block * _kv_bytes_per_token(config, shape, tp))
    return max(0, blocks) * block


def _engine_too_small(config: Config, shape: ModelShape, tps: Iterable[int]) -> str:
    engine, tp = config.engine, config.engine.tp
    needed = engine.max_model_len * _kv_bytes_per_token(config, shape, tp) / GIB
    if config.plan.device == "cpu":
        return (
            f"engine.kv_cache_gib: must hold one sequence of engine.max_model_len {engine.max_model_len} "
            f"tokens, {needed:.2f} GiB, got {engine.kv_cache_gib:g}"
        )
    fits = [tp for tp in tps if tp <= NODE_RANKS and _kv_tokens(config, shape, tp) >= engine.max_model_len]
    return (
        f"engine.tp: a worker must keep {needed:.2f} GiB for one sequence of engine.max_model_len "
        f"{engine.max_model_len} tokens, got {_kv_bytes(config, shape, tp) / GIB:.2f} GiB with tp={tp} "
        f"(plan.memory_gib {config.plan.memory_gib:g} x engine.gpu_memory_utilization "
        f"{engine.gpu_memory_utilization:g} less plan.reserve_gib {config.plan.reserve_gib:g} and weights); "
        + (f"the smallest that fits is engine.tp={fits[0]}" if fits else f"none up to {NODE_RANKS} fits")
    )


def _tps(shape: ModelShape) -> list[int]:
    return [
        tp for tp in range(1, shape.heads + 1) if _refusal(check_model, shape, ParallelLayout(tp=tp)) is None
    ]


def _with(layout: ParallelLayout, tp: int, pp: int) -> ParallelLayout:
    split = layout.stage_split if pp == layout.pp else None
    return ParallelLayout(tp=tp, pp=pp, vpp=layout.vpp if pp > 1 else 1, dp=layout.dp, stage_split=split)


def _nearest(wanted: int, allowed: Iterable[int]) -> int:
    """Of two as near the larger: it holds no more memory."""
    return min(allowed, key=lambda value: (abs(value - wanted), -value))


def _refusal(check: Callable[..., None], *args: object) -> str | None:
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return None
