"""The command line: train, sft, eval, plan, doctor. A user's mistake is one line on stderr and exit code
2."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from megatron_tree.config import Config, ConfigError, load
from megatron_tree.types import RunFailed

if TYPE_CHECKING:
    from megatron_tree.session import Session

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

ConfigPath = Annotated[
    Path, typer.Argument(help="YAML file; its sections are the models of megatron_tree/config.py.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="key.sub=value, the value as YAML, e.g. train.iterations=2", metavar="[KEY=VALUE]..."
    ),
]


@app.command()
def train(config: ConfigPath, overrides: Overrides = None, resume: bool = False) -> None:
    """Train with Tree-GRPO. The last line of stdout is the summary as JSON."""
    more = ["run.resume=true"] if resume else []
    _run(_load(config, [*(overrides or []), *more]), "train")


@app.command()
def sft(config: ConfigPath, overrides: Overrides = None) -> None:
    """Warm up on the demonstrations of the config's sft section and export the weights."""
    loaded = _load(config, overrides)
    if loaded.sft is None:
        raise ConfigError("sft: the section is missing")
    _run(loaded, "warm_up", rolls_out=False)


@app.command(name="eval")
def evaluate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Evaluate model.path on data.eval: sampled and greedy chains."""
    loaded = _load(config, overrides)
    if not loaded.data.eval:
        raise ConfigError("data.eval: must name at least one file, got none")
    _run(loaded, "evaluate_only", trains=False)


@app.command()
def plan(config: ConfigPath, overrides: Overrides = None, json: bool = False) -> None:
    """Estimate memory, tokens, FLOPs and time of a run, or say why it cannot run; starts nothing.

    Of model.path only config.json is read. The plan section of the config describes the hardware.
    """
    from megatron_tree.planner.view import show

    show(_load(config, overrides), as_json=json)


@app.command()
def doctor() -> None:
    """Show versions, devices and which implementation each operation uses here, and why."""
    from megatron_tree.doctor import run

    raise typer.Exit(run())


def main() -> None:
    """Entry point. Environments of the user are found from the working folder.

    MEGATRON_TREE_TRACEBACK=1 shows where an error came from.
    """
    sys.path.insert(0, "")
    try:
        sys.exit(app(standalone_mode=False))
    except (ValueError, RunFailed) as error:
        if os.environ.get("MEGATRON_TREE_TRACEBACK"):
            raise
        _fail(str(error), code=2 if isinstance(error, ValueError) else 1)
    except OSError as error:  # a full disk, a folder without permission
        if os.environ.get("MEGATRON_TREE_TRACEBACK"):
            raise
        _fail(f"{error.filename or 'disk'}: {error.strerror or error}", code=1)
    except (typer.Abort, asyncio.CancelledError):
        sys.exit(130)
    except Exception as error:  # typer exports no base of its usage errors: they are told by a method
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        _fail(usage() or "a command is needed", code=2)


def _load(path: Path, overrides: list[str] | None) -> Config:
    return load(path, overrides or [])


def _run(config: Config, verb: str, *, trains: bool = True, rolls_out: bool = True) -> None:
    from megatron_tree import loop
    from megatron_tree.report import write_summary
    from megatron_tree.session import Session
    from megatron_tree.stopping import StopRequested

    session = Session(config, trains=trains, rolls_out=rolls_out)
    try:
        summary = asyncio.run(_until_done(session, getattr(loop, verb)))
    except StopRequested:
        sys.stderr.write(f"stopped after iteration {session.iteration}; go on with --resume\n")
        raise typer.Exit(130) from None
    write_summary(session.folder.path, summary)


async def _until_done(
    session: Session, verb: Callable[[Session], Awaitable[dict[str, object]]]
) -> dict[str, object]:
    """A first Ctrl-C or SIGTERM asks the run to save and stop, a second one ends it at once."""
    here, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        if session.stopping.is_set():
            task.cancel()
        sys.stderr.write("\nstopping: what began is finished and saved; again to stop at once\n")
        session.stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        here.add_signal_handler(number, stop)
    async with session:
        return await verb(session)


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"megatron-tree: {' '.join(message.split())}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
