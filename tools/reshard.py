"""Converts and compares checkpoints: Hugging Face folders, Megatron's distributed checkpoints and its legacy
mp_rank folders, in any layout. A fault is one line on stderr and exit code 2."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from megatron_tree.layout import ParallelLayout

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Workers = Annotated[int, typer.Option(min=1, help="Processes that copy or compare.")]
HfConfig = Annotated[
    Path | None,
    typer.Option(help="Hugging Face folder of the model, for a checkpoint that carries no config."),
]
NUM_WORKERS = min(4, os.cpu_count() or 1)


@app.command()
def to_megatron(
    source: Path,
    target: Path,
    format: Annotated[str, typer.Option(help="dist: any layout loads it; legacy: mp_rank folders.")] = "dist",
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    stage_split: Annotated[str | None, typer.Option(help="Layers of every chunk, e.g. 3,5.")] = None,
    vocab_multiple: Annotated[
        int, typer.Option(min=1, help="Legacy: pad the vocabulary to this times tp (Megatron-LM: 128).")
    ] = 1,
    hf_config: HfConfig = None,
    workers: Workers = NUM_WORKERS,
) -> None:
    """Convert a checkpoint of any format to Megatron's."""
    from megatron_tree.reshard import convert, formats

    if format not in ("dist", "legacy"):
        raise ValueError(f"--format: must be dist or legacy, got {format}")
    layout = _layout(tp, pp, vpp, stage_split)
    if format == "dist" and (layout != ParallelLayout() or vocab_multiple != 1):
        raise ValueError("--tp, --pp, --vpp, --stage-split, --vocab-multiple: only for --format legacy")
    weights = formats.open_weights(source, hf_config)
    with _bar("copy") as progress:
        convert.to_megatron(
            weights,
            target,
            layout if format == "legacy" else None,
            vocab_multiple=vocab_multiple,
            workers=workers,
            progress=progress,
        )


@app.command()
def to_hf(
    source: Path,
    target: Path,
    hf_config: HfConfig = None,
    max_shard_gib: Annotated[float, typer.Option(min=1e-6, help="Largest size of a weights file.")] = 4.0,
    dtype: Annotated[str, typer.Option(help="keep, fp32 or bf16.")] = "keep",
    workers: Workers = NUM_WORKERS,
) -> None:
    """Convert a checkpoint of any format, or a run's checkpoints/iteration-N, to a Hugging Face folder."""
    import torch

    from megatron_tree.reshard import convert, formats

    dtypes = {"keep": None, "fp32": torch.float32, "bf16": torch.bfloat16}
    if dtype not in dtypes:
        raise ValueError(f"--dtype: must be {', '.join(dtypes)}, got {dtype}")
    weights = formats.open_weights(source, hf_config)
    _check_run(source, weights.carried)
    with _bar("copy") as progress:
        convert.to_hf(
            weights,
            target,
            dtype=dtypes[dtype],
            max_shard_bytes=int(max_shard_gib * convert.GIB),
            workers=workers,
            progress=progress,
        )


@app.command()
def verify(first: Path, second: Path, hf_config: HfConfig = None, workers: Workers = NUM_WORKERS) -> None:
    """Compare two checkpoints tensor by tensor: exit code 0 when all bits are equal, 1 when not."""
    from megatron_tree.reshard import convert, formats

    carried = [formats.carried_files(path) for path in (first, second)]
    known = hf_config or carried[0] or carried[1]
    a, b = (formats.open_weights(p, own or known) for p, own in zip((first, second), carried, strict=True))
    with _bar("compare") as progress:
        found = convert.verify(a, b, workers=workers, progress=progress)
    if found is not None:
        typer.echo(f"differ: {found}")
        raise typer.Exit(1)
    typer.echo(f"equal: {len(a.shape.tensors())} tensors")


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="Hugging Face folder, or its config.json.")],
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    stage_split: str | None = None,
    engine_tp: Annotated[list[int] | None, typer.Option(help="May be given several times.")] = None,
) -> None:
    """Prove that a layout's slices cover every element of every tensor exactly once. Reads no weights."""
    from megatron_tree.reshard.names import read_shape
    from megatron_tree.reshard.plan import prove

    began = time.perf_counter()
    shape = read_shape(model.parent if model.is_file() else model)
    layout = _layout(tp, pp, vpp, stage_split)
    proof = prove(shape, layout, engine_tp or [])
    mesh = f"tp {tp} x pp {pp} x vpp {vpp}, {layout.world_size} ranks"
    typer.echo(f"{shape.family}, {shape.num_layers} layers, {proof.elements / 1e9:.2f} B elements: {mesh}")
    typer.echo(
        f"every element of {proof.tensors} tensors is owned by exactly one rank: {proof.slices} slices"
    )
    typer.echo(f"a rank owns {_range(proof.owned_bytes)} and holds {_range(proof.held_bytes)} in bf16")
    for engine in proof.engines:
        typer.echo(
            f"engine tp {engine.tp}: its workers read every element, {_range(engine.read_bytes)} each;"
            f" {engine.atoms} atoms, each of one writer and the same readers"
        )
    typer.echo(f"proved in {time.perf_counter() - began:.1f} s")


def _range(sizes: tuple[int, int]) -> str:
    low, high = (f"{size / 1e9:.3f}" for size in sizes)
    return f"{low} GB" if low == high else f"{low} to {high} GB"


def _layout(tp: int, pp: int, vpp: int, stage_split: str | None) -> ParallelLayout:
    for name, value in (("tp", tp), ("pp", pp), ("vpp", vpp)):
        if value < 1:
            raise ValueError(f"--{name}: must be at least 1, got {value}")
    try:
        split = None if stage_split is None else tuple(map(int, stage_split.split(",")))
    except ValueError as error:
        raise ValueError(f"--stage-split: must be numbers with commas, got {stage_split}") from error
    return ParallelLayout(tp=tp, pp=pp, vpp=vpp, stage_split=split)


def _check_run(source: Path, carried: Path | None) -> None:
    """A run's checkpoint says which tokenizer it was trained with."""
    import json

    state = next((p for p in (source / "state.json", source.parent / "state.json") if p.exists()), None)
    if state is None or carried is None:
        return
    from megatron_tree.rollout.tokens import Tokens

    wanted, got = json.loads(state.read_text(encoding="utf-8"))["tokenizer"], Tokens(carried).fingerprint
    if got != wanted:
        raise ValueError(f"{carried}: its tokenizer must be the run's ({wanted}), got another ({got})")


@contextmanager
def _bar(verb: str) -> Iterator[object]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main() -> None:
    """MEGATRON_TREE_TRACEBACK=1 shows where an error came from."""
    try:
        sys.exit(app(standalone_mode=False))
    except (ValueError, OSError) as error:
        if os.environ.get("MEGATRON_TREE_TRACEBACK"):
            raise
        is_os = isinstance(error, OSError)
        _fail(f"{error.filename or 'disk'}: {error.strerror}" if is_os else str(error))
    except typer.Abort:
        sys.exit(130)
    except Exception as error:  # as in the cli: typer's usage errors; others are raised again
        usage = getattr(error, "format_message", None)  # click's own errors, which typer does not export
        if usage is None:
            raise
        _fail(usage() or "a command is needed")


def _fail(message: str) -> NoReturn:
    for field in ("model.path: ", "train.parallel."):  # here these are arguments and options
        message = message.removeprefix(field)
    sys.stderr.write(f"reshard: {' '.join(message.split())}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
