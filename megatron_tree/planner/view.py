"""`megatron-tree plan` on the terminal: the estimate as tables, or as one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_tree.config import Config
from megatron_tree.placement import Transport
from megatron_tree.planner.costs import Cost
from megatron_tree.planner.estimate import Estimate, estimate
from megatron_tree.planner.limits import GIB
from megatron_tree.reshard.names import ModelShape, read_shape

MIN_WIDTH = 80


def show(config: Config, *, as_json: bool) -> None:
    """Prints the estimate. ValueError for what cannot run."""
    shape = read_shape(config.model.path)
    found = estimate(config, shape)
    if as_json:
        print(json.dumps({"model": asdict(shape)} | _plain(found)))
        return
    console = Console(highlight=False)
    if console.width < MIN_WIDTH:
        console.width = MIN_WIDTH
    _head(console, config, shape, found)
    for table in (_stages(found), _memory(found), _engines(found), _tokens(config, found), _costs(found)):
        console.print(table, "")
    _notes(console, config, found)


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, their properties (totals) too."""
    if is_dataclass(value):
        computed = [name for name, kind in vars(type(value)).items() if isinstance(kind, property)]
        names = [*(field.name for field in fields(value)), *computed]
        return {name: _plain(getattr(value, name)) for name in names}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _head(console: Console, config: Config, shape: ModelShape, found: Estimate) -> None:
    layout, engine = found.layout, config.engine
    vpp = f" (VPP {layout.vpp})" if layout.vpp > 1 else ""
    cp = f" x CP {layout.cp}" if layout.cp > 1 else ""
    console.print(
        f"[bold]{config.model.path}[/]: {shape.family}, {shape.num_layers} layers, "
        f"{_si(found.parameters).rstrip()} parameters\n"
        f"trainer  TP {layout.tp} x PP {layout.pp}{vpp}{cp} x DP {layout.dp} = {layout.world_size} ranks, "
        f"{config.model.dtype}\n"
        f"         {', '.join(_how(config))}\n"
        f"engines  {engine.count} x TP {engine.tp} = {engine.count * engine.tp} workers, {engine.dtype}"
        f"{', layers in ' + engine.quantization if engine.quantization else ''}\n"
        f"GPUs     {_gpus(config, found)}\n"
        f"version  {_bytes(found.image_bytes)}, {_way(config, found.transport)}\n"
    )


def _gpus(config: Config, found: Estimate) -> str:
    if not found.num_gpus:
        return "none"
    shared = config.cluster.placement == "colocated"
    how = "where ranks and workers take turns" if shared else "one for each rank and worker"
    return f"{found.num_gpus}, {how}"


def _way(config: Config, transport: Transport) -> str:
    return {
        "shm": f"two slots in {config.engine.image_dir}",
        "stream": "kept by its owners in host memory and sent to each engine",
        "ipc": "kept by its owners in host memory and lent to the engines on their GPUs",
    }[transport]


def _how(config: Config) -> list[str]:
    parallel, recompute = config.train.parallel, config.train.recompute
    words = [f"linear layers in FP8, {fp8.recipe}"] if (fp8 := config.train.fp8) else []
    words += ["sequence parallel"] * parallel.sequence_parallel
    words += ["distributed optimizer"] * parallel.distributed_optimizer
    if recompute.granularity == "none":
        return [*words, "no recomputation"]
    if recompute.granularity == "selective":
        return [*words, f"recomputes {' and '.join(recompute.modules)}"]
    layers = f"{recompute.layers} layers at a time" if recompute.layers > 1 else "every layer"
    return [*words, f"recomputes {layers}"]


def _stages(found: Estimate) -> Table:
    table = _table("Stages", "stage", "layers", "ranks", "parameters\nof a rank", "published", "in flight")
    for number, stage in enumerate(found.stages):
        table.add_row(
            str(number),
            ", ".join(_range(*layers) for layers in stage.layers),
            _range(*stage.ranks),
            f"{stage.parameters:,}",
            f"{_si(stage.published_bytes)}B",
            str(stage.memory.in_flight),
        )
    return table


def _memory(found: Estimate) -> Table:
    unit, name = _unit(max(stage.memory.total for stage in found.stages))
    in_fp8 = any(stage.memory.fp8_copies for stage in found.stages)
    columns = ("weights", *("in FP8",) * in_fp8, "grads", "optim", "ref", "activ.", "logits")
    table = _table(f"Memory of one rank, {name}", "stage", *columns)
    for column in ("total", "activ.\nrecomputed", "total\nthen"):
        table.add_column(column, justify="right")
    for number, stage in enumerate(found.stages):
        m = stage.memory
        copies = (m.fp8_copies,) * in_fp8
        parts = (m.weights, *copies, m.gradients, m.optimizer, m.reference, m.activations, m.logits)
        row = [f"{count / unit:,.1f}" for count in parts]
        then = [f"{count / unit:,.1f}" for count in (m.activations_recomputed, m.total_recomputed)]
        table.add_row(str(number), *row, f"[bold]{m.total / unit:,.1f}[/]", *then)
    return table


def _engines(found: Estimate) -> Table:
    engine = found.engine
    table = _table("One engine", "weights of\na worker", "KV cache of\na worker", "KV bytes\na token")
    for name in ("KV cache\ntokens", "path\ntokens", "paths that\nfit", "run at\nonce"):
        table.add_column(name, justify="right")
    table.add_row(
        _bytes(engine.weight_bytes),
        _bytes(engine.kv_bytes),
        f"{engine.kv_bytes_per_token:,}",
        f"{engine.kv_tokens:,}",
        f"{engine.path_tokens:,.0f}",
        f"{int(engine.kv_tokens / engine.path_tokens):,}",
        str(engine.num_sequences),
    )
    return table


def _tokens(config: Config, found: Estimate) -> Table:
    rollout, grown, packed = config.rollout, found.grown, found.packed
    leaves = rollout.prompts * rollout.trees * rollout.leaves_per_tree
    table = _table(
        f"Tokens of an iteration: {rollout.prompts} x {rollout.trees} trees, {leaves:,} leaves, "
        f"{grown.requests:,.0f} turns",
        "generated\n= trained",
        "requested",
        "of it\ncached",
        "packed",
        "copied",
        "copied /\npacked",
        "steps x micro-\nbatches",
    )
    counts = (grown.generated, grown.requested, grown.cached, packed.unique, packed.copied)
    table.add_row(
        *(_si(count).rstrip() for count in counts),
        f"{packed.copied / packed.unique:.2f}",
        f"{config.train.mini_batches} x {found.num_microbatches}",
    )
    return table


def _costs(found: Estimate) -> Table:
    table = _table("Time of an iteration", "", "busiest rank or worker", "seconds", "share")
    for cost in found.costs:
        style = "bold" if cost.name == found.bottleneck else None
        share = f"{cost.seconds / found.seconds:.0%}"
        table.add_row(cost.name, _amount(cost, found), _seconds(cost.seconds), share, style=style)
    table.add_row("together", "", _seconds(found.seconds), "100%", style="dim")
    return table


def _notes(console: Console, config: Config, found: Estimate) -> None:
    hardware = config.plan
    console.print(f"bottleneck: [bold]{found.bottleneck}[/]")
    if found.num_fillers:
        slots = found.num_microbatches * found.layout.dp
        console.print(
            f"{found.num_fillers} of the {slots} micro-batches of a step are fillers: too few trees"
        )
    console.print(
        f"hardware: {hardware.peak_tflops:g} TFLOP/s x {hardware.efficiency:g}, memory "
        f"{hardware.memory_gb_per_s:g} GB/s, node {hardware.node_gb_per_s:g} GB/s, network "
        f"{hardware.network_gb_per_s:g} GB/s; plan.fill {hardware.fill:g}",
        style="dim",
    )
    for line in found.assumptions:
        console.print(f"- {line}", style="dim", soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=None, title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if not column and not index else "right")
    return table


def _amount(cost: Cost, found: Estimate) -> str:
    if cost.name == "pipeline bubble":
        return f"{found.bubble:.1%} of a step"
    return _si(cost.amount) + ("FLOP" if cost.unit == "FLOP" else "B")


def _range(first: int, stop: int) -> str:
    if first == stop:
        return "none"
    return str(first) if stop - first == 1 else f"{first}-{stop - 1}"


def _unit(largest: float) -> tuple[int, str]:
    return (GIB, "GiB") if largest >= GIB else (GIB >> 10, "MiB")


def _bytes(count: float) -> str:
    unit, name = _unit(count)
    return f"{count / unit:,.1f} {name}"


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.3g}"


def _si(value: float) -> str:
    """Three digits and a prefix, a unit to follow: `18.5 G`."""
    for power, letter in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {letter}"
    return f"{value:.0f} "
