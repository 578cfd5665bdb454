"""What cannot run, refused in one line that names the rule and the nearest layout that can. Pure.

Not here: what a rank holds (`memory`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from megatron_tree.config import Config, Fp8Config, ParallelConfig
from megatron_tree.engine import on_gpu
from megatron_tree.layout import ParallelLayout
from megatron_tree.placement import Node, Transport, place, transport
from megatron_tree.planner.activations import BYTES
from megatron_tree.planner.memory import RankMemory, TrainState, rank_memory
from megatron_tree.planner.work import expected_path
from megatron_tree.reshard import plan
from megatron_tree.reshard.cuts import check_engine
from megatron_tree.reshard.names import EMBEDDING, HEAD, ModelShape, check_model
from megatron_tree.train import kernels, precision
from megatron_tree.train.precision import Device

GIB = 1 << 30
NODE_RANKS = 8  # tensor parallelism wider than a node is possible, but never proposed


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Bytes and tokens of one engine."""

    weight_bytes: int  # of the worker that holds most, as it serves them
    update_bytes: int  # of a version, by the worker that reads most
    read_bytes: int  # the same by all workers
    kv_bytes: int  # cache of one worker
    kv_bytes_per_token: int  # of one worker
    kv_tokens: int
    path_tokens: float  # expected, with the prompt
    num_sequences: int  # of that length that fit and may decode together


def check_layout(config: Config, shape: ModelShape) -> None:
    """`check_model`, with the nearest layout that it lets pass; where layers do not divide also the same
    stages with uneven numbers of them."""
    parallel, layers = config.train.parallel, shape.num_layers
    refusal = _refusal(check_model, shape, parallel.layout)
    if refusal is None:
        return
    tp, chunks = _nearest(parallel.tp, _tps(shape, config.train.fp8)), parallel.pp * parallel.vpp
    fits = _refusal(parallel.layout.split, layers) is None
    even = (pp for pp in range(1, layers + 1) if layers % pp == 0)
    pp = parallel.pp if fits else _nearest(parallel.pp, even)
    ways = [_with(shape, parallel, tp, pp)]
    if not fits and layers >= chunks:
        same = _with(shape, parallel, tp, parallel.pp)
        ways.append(_changed(same, vpp=parallel.vpp, stage_split=_even_split(layers, chunks)))
    named = ", or ".join(_named(config, way) + _more_devices(config, way) for way in ways)
    raise ValueError(f"{refusal}; the nearest layout that can run is {named}")


def check_precision(config: Config, shape: ModelShape) -> None:
    """The recipe of train.fp8 fits the plan's device, which has what the image has, the model and the
    layout; the kernels that the config asks for are there; engine.quantization fits the device."""
    major, _, minor = f"{config.plan.compute_capability:.1f}".partition(".")
    capability = int(major), int(minor)
    gpu = Device(capability, transformer_engine=True, apex=True, fused_weight_gradients=True)
    check_kernels(config, shape, gpu if config.plan.device == "gpu" else Device(None))
    if config.plan.device == "gpu":
        on_gpu.check_capability(config.engine, capability)


def check_kernels(config: Config, shape: ModelShape, device: Device) -> None:
    """What every rank checks for itself as it starts."""
    train = config.train
    precision.check(train.fp8, device, shape, train.parallel.layout)
    kernels.choose(train.kernels, train.attention, config.model.dtype, train.fp8, device)


def check_devices(config: Config) -> Transport:
    """Every trainer rank and engine worker has its place on `plan.devices` GPUs in nodes of eight, or on as
    many as it takes, or on a CPU. Returns how versions get from one to the other there."""
    if config.plan.device == "cpu":
        return transport(config.engine, place(config, [Node("0", "0", 0)], named="plan.device"), "")
    if config.cluster.placement == "cpu":
        raise ValueError("plan.device: must be cpu where cluster.placement is, got gpu")
    nodes = _nodes(config, config.plan.devices or devices_needed(config))
    placement = place(config, nodes, named="plan.devices")
    hosts = len(placement.hosts)
    apart = f"the run takes {hosts} nodes of {nodes[0].num_gpus} GPUs" if hosts > 1 else ""
    return transport(config.engine, placement, apart)


def devices_needed(config: Config) -> int:
    """The fewest GPUs that hold every rank and engine."""
    ranks, workers = config.train.parallel.layout.world_size, config.engine.count * config.engine.tp
    fewest = max(ranks, workers) if _colocated(config) else ranks + workers
    return next(n for n in count(fewest) if _refusal(place, config, _nodes(config, n)) is None)


def _nodes(config: Config, num_devices: int) -> list[Node]:
    """Of eight; where the config does not say how many devices there are, as wide as its widest group."""
    widest = 1 if config.plan.devices else max(config.train.parallel.tp, config.engine.tp)
    full, rest = divmod(num_devices, size := max(NODE_RANKS, widest))
    sizes = [size] * full + [rest] * bool(rest)
    return [Node(str(index), str(index), size) for index, size in enumerate(sizes)]


def check_memory(config: Config, shape: ModelShape, state: TrainState) -> None:
    """Every rank fits its device, and beside an engine that shares it, or the ways out are named."""
    parallel = config.train.parallel
    found = [rank_memory(shape, parallel, stage, state) for stage in range(parallel.pp)]
    fullest = max(range(parallel.pp), key=lambda stage: found[stage].total)
    memory, (room, less) = found[fullest], _room(config)
    if memory.total > room * GIB:
        parts = ("weights", "fp8_copies", "gradients", "optimizer", "reference", "activations", "logits")
        sizes = ((part.replace("_", " "), getattr(memory, part)) for part in parts)
        listed = ", ".join(f"{part} {size / GIB:.1f}" for part, size in sizes if size)
        raise ValueError(
            f"train.parallel: a rank of stage {fullest} must fit plan.memory_gib "
            f"{config.plan.memory_gib:g} less {less}, got {memory.total / GIB:.1f} GiB ({listed}); "
            f"{_ways_out(config, shape, state, found)}" + _switches(config, shape, state)
        )
    if _colocated(config):
        _check_engine_beside(config, max(memory.weights for memory in found))


def _colocated(config: Config) -> bool:
    return config.cluster.placement == "colocated"


def _room(config: Config) -> tuple[float, str]:
    """GiB of a device for a rank that trains, and in words what the rest is for: an engine that sleeps beside
    it keeps its driver context and workspaces."""
    reserves, words = (2, "twice plan.reserve_gib") if _colocated(config) else (1, "plan.reserve_gib")
    return config.plan.memory_gib - reserves * config.plan.reserve_gib, f"{words} {config.plan.reserve_gib:g}"


def _check_engine_beside(config: Config, weight_bytes: int) -> None:
    """While engines generate, a rank has nothing on the device but its weights and `plan.reserve_gib`."""
    hardware, engine = config.plan, config.engine
    kept = weight_bytes / GIB + hardware.reserve_gib
    most = math.floor((1 - kept / hardware.memory_gib) * 100) / 100
    if engine.gpu_memory_utilization > most:
        raise ValueError(
            f"engine.gpu_memory_utilization: must leave {kept:.1f} GiB of plan.memory_gib "
            f"{hardware.memory_gib:g} to the trainer's rank on the same device (weights and plan.reserve_gib "
            f"{hardware.reserve_gib:g}), got {engine.gpu_memory_utilization:g}; the largest that fits is "
            f"{most:.2f}"
        )


def _ways_out(config: Config, shape: ModelShape, state: TrainState, found: Sequence[RankMemory]) -> str:
    """The smallest layout that fits, and how short micro-batches would have to be for this one."""
    parallel, room = config.train.parallel, _room(config)[0]
    ways = []
    fits = _smallest_that_fits(shape, parallel, state, room)
    if fits is not None:
        ways.append(f"the smallest layout that fits is {_named(config, fits)}{_more_devices(config, fits)}")
    share = min((room * GIB - m.kept) / (m.activations + m.logits) for m in found)  # linear in the tokens
    tokens = int(share * config.train.micro_batch_tokens)
    tokens -= tokens % config.train.token_multiple
    if tokens >= config.data.max_prompt_tokens + config.rollout.max_path_tokens:
        ways.append(f"this layout fits with train.micro_batch_tokens={tokens}")
    return ", ".join(ways) or f"no layout up to tp={NODE_RANKS} fits a micro-batch of the longest path"


def _more_devices(config: Config, parallel: ParallelConfig) -> str:
    """What a layout needs beside itself, if there are too few devices for it."""
    train = config.train.model_copy(update={"parallel": parallel})
    changed = config.model_copy(update={"train": train})
    if _refusal(check_devices, changed) is None:
        return ""
    unbounded = changed.model_copy(update={"plan": config.plan.model_copy(update={"devices": None})})
    return f" with plan.devices={devices_needed(unbounded)}"


def _switches(config: Config, shape: ModelShape, state: TrainState) -> str:
    """What one more knob, each by itself, would leave on the fullest rank of this layout."""
    parallel, full = config.train.parallel, state.recompute.model_copy(update={"granularity": "full"})
    tried = []
    if state.recompute != full:
        tried.append(("train.recompute.granularity=full", parallel, replace(state, recompute=full)))
    if parallel.dp * parallel.cp > 1 and not parallel.distributed_optimizer:
        changed = _changed(parallel, distributed_optimizer=True)
        tried.append(("train.parallel.distributed_optimizer=true", changed, state))
    if parallel.tp > 1 and not parallel.sequence_parallel:
        changed = _changed(parallel, sequence_parallel=True)
        tried.append(("train.parallel.sequence_parallel=true", changed, state))
    words = []
    for name, layout, how in tried:
        total = max(rank_memory(shape, layout, stage, how).total for stage in range(layout.pp))
        words.append(f"{total / GIB:.1f} GiB with {name}")
    return f"; it would be {', '.join(words)}" if words else ""


def _smallest_that_fits(
    shape: ModelShape, parallel: ParallelConfig, state: TrainState, room: float
) -> ParallelConfig | None:
    """Fewest ranks; of equals the widest tensor parallelism, which has no bubble. cp, dp and, where they
    divide the layers, virtual stages stay."""
    tps = [tp for tp in _tps(shape, state.fp8) if tp <= NODE_RANKS]
    sizes = ((tp, pp) for tp in tps for pp in range(1, shape.num_layers + 1))
    for tp, pp in sorted(sizes, key=lambda size: (size[0] * size[1], size[1])):
        tried = _with(shape, parallel, tp, pp)
        if _takes(shape, state.fp8, tried.layout) and all(
            rank_memory(shape, tried, stage, state).total <= room * GIB for stage in range(pp)
        ):
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
        weight_bytes=_weight_bytes(config, shape, engine.tp),
        update_bytes=max(reads),
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
    room = config.plan.memory_gib * config.engine.gpu_memory_utilization - config.plan.reserve_gib
    return int(room * GIB) - _weight_bytes(config, shape, tp)


def _weight_bytes(config: Config, shape: ModelShape, tp: int) -> int:
    """Of the worker that holds most. In FP8 the layers' matrices take a byte an element and an fp32 scale for
    each row; embedding, head and vectors stay as they are published."""
    element, stays = BYTES[config.engine.dtype], {*EMBEDDING.tensors, *HEAD.tensors}

    def held(region: plan.Region) -> int:
        size, rounded = math.prod(region.extent), len(region.extent) == 2 and region.tensor not in stays
        if config.engine.quantization is not None and rounded:
            return size + 4 * region.extent[0]
        return element * size

    return max(sum(map(held, plan.engine_reads(shape, tp, worker))) for worker in range(tp))


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


def _tps(shape: ModelShape, fp8: Fp8Config | None) -> list[int]:
    """Those that the model takes and, where there are any, its products in FP8 too."""
    layouts = [ParallelLayout(tp=tp) for tp in range(1, shape.heads + 1)]
    model = [layout.tp for layout in layouts if _takes(shape, None, layout)]
    return [layout.tp for layout in layouts if _takes(shape, fp8, layout)] or model


def _takes(shape: ModelShape, fp8: Fp8Config | None, layout: ParallelLayout) -> bool:
    refusals = (_refusal(check_model, shape, layout), _refusal(precision.check, fp8, None, shape, layout))
    return refusals == (None, None)


def _with(shape: ModelShape, parallel: ParallelConfig, tp: int, pp: int) -> ParallelConfig:
    """Another tp and pp, and of the rest what goes with them."""
    split = parallel.stage_split
    keeps_split = split is not None and pp == parallel.pp and sum(split) == shape.num_layers
    keeps_vpp = keeps_split or (pp > 1 and shape.num_layers % (pp * parallel.vpp) == 0)
    return _changed(
        parallel,
        tp=tp,
        pp=pp,
        vpp=parallel.vpp if keeps_vpp else 1,
        stage_split=split if keeps_split else None,
        sequence_parallel=parallel.sequence_parallel and tp > 1,
    )


def _changed(parallel: ParallelConfig, **changes: object) -> ParallelConfig:
    return ParallelConfig.model_validate(parallel.model_dump() | changes)


def _named(config: Config, parallel: ParallelConfig) -> str:
    """tp, pp, and what else differs from the config."""
    old = config.train.parallel
    words = [f"tp={parallel.tp} pp={parallel.pp}"]
    for name in ("vpp", "stage_split", "sequence_parallel"):
        value = getattr(parallel, name)
        if value != getattr(old, name):
            words.append(f"{name}={json.dumps(value)}")
    train = config.train.model_copy(update={"parallel": parallel})
    short = -train.micro_batch_tokens % train.token_multiple
    if short:
        words.append(f"train.micro_batch_tokens={train.micro_batch_tokens + short}")
    return " ".join(words)


def _even_split(num_layers: int, chunks: int) -> tuple[int, ...]:
    """As equal as can be; the first and the last chunk, which hold embedding and head, get the fewer."""
    least, more = divmod(num_layers, chunks)
    inner = sorted(range(chunks), key=lambda i: (min(i, chunks - 1 - i) == 0, i))[:more]
    return tuple(least + (i in inner) for i in range(chunks))


def _nearest(wanted: int, allowed: Iterable[int]) -> int:
    """Of two as near the larger: it holds no more memory."""
    return min(allowed, key=lambda value: (abs(value - wanted), -value))


def _refusal(check: Callable[..., object], *args: object) -> str | None:
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return None
