"""Metrics that carry their reduction, phase timers, and the sinks of a run: TensorBoard and `metrics.jsonl`
in its folder, Weights & Biases if asked for.

A name is `section/what`, as TensorBoard groups it. Not here: what is computed (see `loop`, `algo`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that is still a sum and a weight, so that it can be reduced over micro-batches and ranks."""

    total: float
    weight: float

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum. The empty one is -inf and reads 0."""

    maximum: float = -math.inf

    @property
    def value(self) -> float:
        return self.maximum if math.isfinite(self.maximum) or math.isnan(self.maximum) else 0.0

    def __add__(self, other: Max) -> Max:
        if math.isnan(self.maximum) or math.isnan(other.maximum):
            return Max(math.nan)
        return Max(max(self.maximum, other.maximum))


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    @property
    def value(self) -> float:
        return self.total

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)


Metric = Mean | Max | Sum
Metrics = dict[str, Metric]


def merge(parts: Iterable[Metrics]) -> Metrics:
    """Reduces metrics of micro-batches or ranks: equal names are added by their own reduction."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged


def values(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def mean(values: Iterable[float]) -> Mean:
    listed = list(values)
    return Mean(float(sum(listed)), float(len(listed)))


class PhaseTimer:
    """Seconds per phase of one iteration, exclusive: phases do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}


class RunLog:
    """The files of a run folder that grow: TensorBoard scalars and texts, `metrics.jsonl`, `trees.jsonl`.

    A step that is redone is logged once: `restart_after` drops what was logged of later steps. With
    `wandb_project` the scalars go to Weights & Biases too, which keeps both values of a step.
    """

    def __init__(self, folder: Path, wandb_project: str | None = None) -> None:
        """ValueError where wandb is asked for and missing, or does not let the run in."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._wandb = None if wandb_project is None else _wandb_run(folder, wandb_project)
        self._open(purge_step=None)

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._metrics = _append(self._folder / "metrics.jsonl")
        self._trees = _append(self._folder / "trees.jsonl")
        self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=purge_step)

    def records(self) -> list[dict[str, float]]:
        """What was logged so far: one entry per line of `metrics.jsonl`, with its `step`."""
        self._metrics.flush()
        text = (self._folder / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]  # lines of ASCII numbers

    def restart_after(self, step: int) -> None:
        """Drops the lines of steps after `step`, and cut-off ones; TensorBoard hides its own."""
        self._close_files()
        for name in ("metrics.jsonl", "trees.jsonl"):
            _drop_after(self._folder / name, step)
        self._open(purge_step=step + 1)

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()
        self._metrics.write(json.dumps({"step": step, **scalars}) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log({"step": step, **scalars})

    def text(self, step: int, name: str, text: str) -> None:
        self._board.add_text(name, text, step)

    def tree(self, step: int, record: dict[str, object]) -> None:
        self._trees.write(json.dumps({"step": step, **record}, ensure_ascii=False) + "\n")
        self._trees.flush()  # a kill must not take lines of an iteration that a checkpoint counts as done

    def close(self) -> None:
        self._close_files()
        if self._wandb is not None:
            self._wandb.finish()

    def _close_files(self) -> None:
        self._board.close()
        self._metrics.close()
        self._trees.close()


def _wandb_run(folder: Path, project: str) -> Any:
    """A run of this folder, the same one after a resume. Its step is a metric: wandb's own only grows, while
    the warm-up counts below 0 and steps may be done again."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"run.wandb_project: needs the package wandb, {error}, got {project!r}") from error
    named = folder / "wandb.id"
    known = named.read_text(encoding="utf-8") if named.exists() else None
    try:
        run = wandb.init(project=project, name=folder.name, dir=str(folder), id=known, resume="allow")
    except wandb.Error as error:
        raise ValueError(f"run.wandb_project: wandb does not open {project!r}: {error}") from error
    named.write_text(run.id, encoding="utf-8")
    run.define_metric("*", step_metric="step")
    return run


def _append(path: Path) -> IO[str]:
    return path.open("a", encoding="utf-8")


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    # bytes: a kill may cut a character, and text has line separators that are part of a JSON string
    kept = [line for line in path.read_bytes().split(b"\n") if _whole(line, step)]
    aside = path.with_suffix(".tmp")
    aside.write_bytes(b"".join(line + b"\n" for line in kept))
    aside.replace(path)


def _whole(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError):
        return False  # the line that a kill cut off
