"""`megatron-tree plan`: a config checked against its model, and the layout it gives. Starts no process, reads
no weights.

Not here: memory, FLOPs, time.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron_tree.config import Config
from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import plan
from megatron_tree.reshard.names import ModelShape, check_model, read_shape

BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage; its tensor-parallel ranks are alike but for the padding of the vocabulary."""

    layers: range
    ranks: tuple[int, ...]
    parameters: int  # of one rank, without padding
    published_bytes: int  # that the stage's owners write for each version


def stages(shape: ModelShape, layout: ParallelLayout, image_dtype: str) -> list[Stage]:
    found = []
    for pp_rank in range(layout.pp):
        ranks = tuple(rank for rank in layout.ranks() if layout.coordinates(rank).pp == pp_rank)
        held = plan.held(shape, layout, ranks[0])
        owned = [copy for rank in ranks for copy in plan.owned(shape, layout, rank)]
        found.append(
            Stage(
                layers=layout.stage_layers(shape.num_layers, pp_rank),
                ranks=ranks,
                parameters=plan.num_elements(held),
                published_bytes=plan.num_elements(owned) * BYTES[image_dtype],
            )
        )
    return found


def show(config: Config) -> None:
    """Prints the layout. ValueError where the model does not fit it."""
    layout = config.train.parallel.layout
    shape = read_shape(config.model.path)
    check_model(shape, layout)
    found = stages(shape, layout, config.engine.dtype)
    rollout, console = config.rollout, Console(highlight=False)
    table = Table(
        title=f"{config.model.path}: {shape.family}, {shape.num_layers} layers", title_justify="left"
    )
    for column in ("stage", "layers", "ranks", "parameters of a rank", "published"):
        table.add_column(column, justify="right")
    for number, stage in enumerate(found):
        table.add_row(
            str(number),
            f"{stage.layers.start}-{stage.layers.stop - 1}",
            ", ".join(map(str, stage.ranks)),
            f"{stage.parameters:,}",
            f"{stage.published_bytes / 1e6:,.1f} MB",
        )
    console.print(table)
    leaves = rollout.prompts * rollout.trees * rollout.leaves_per_tree
    console.print(
        f"trainer: TP {layout.tp} x PP {layout.pp} x DP {layout.dp} = {layout.world_size} ranks, "
        f"{config.model.dtype}\n"
        f"engines: {config.engine.count} x TP {config.engine.tp}, {config.engine.dtype}\n"
        f"iteration: {rollout.prompts} prompts x {rollout.trees} trees x {rollout.leaves_per_tree} leaves "
        f"= {leaves} leaves, {config.train.mini_batches} optimizer steps"
    )
