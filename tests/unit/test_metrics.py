"""Metrics reduce by their own rule; the files of a run folder are what was logged, also after a resume."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_tree.metrics import Max, Mean, Metrics, PhaseTimer, RunLog, Sum, mean, merge, values


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_merge_weighs_means_by_their_weights():
    """By hand: (3 + 5) / (1 + 3) = 2, not the mean 2.33 of 3 and 5/3."""
    parts: list[Metrics] = [
        {"a": Mean(3, 1), "b": Max(1.0), "c": Sum(2.0)},
        {"a": Mean(5, 3), "b": Max(-4.0), "c": Sum(0.5), "d": Sum(1.0)},
        {},
    ]
    assert values(merge(parts)) == {"a": 2.0, "b": 1.0, "c": 2.5, "d": 1.0}
    assert merge(reversed(parts)) == merge(parts)


def test_mean_of_numbers():
    assert mean(iter([1, 2, 6])) == Mean(9.0, 3.0)


def test_empty_metrics_read_zero():
    assert (mean([]).value, Mean(0, 0).value, Max().value) == (0.0, 0.0, 0.0)
    assert (Max() + Max(-3.0)).value == -3.0


@pytest.mark.parametrize("pair", [(1.0, math.nan), (math.nan, 1.0)])
def test_a_nan_is_the_maximum(pair: tuple[float, float]):
    assert math.isnan((Max(pair[0]) + Max(pair[1])).value)


def test_different_reductions_of_one_name_do_not_add():
    with pytest.raises(AttributeError):
        merge([{"a": Mean(1, 1)}, {"a": Sum(1)}])


def test_phases_add_up_and_survive_an_error():
    timer = PhaseTimer()
    for _ in range(2):
        with timer("grow"):
            time.sleep(0.02)
    with pytest.raises(KeyError), timer("train"):
        raise KeyError
    seconds = timer.metrics()
    assert seconds.keys() == {"time/grow_s", "time/train_s"}
    assert 0.04 <= seconds["time/grow_s"] < 1
    assert 0 <= seconds["time/train_s"] < 0.02


def test_scalars_reach_both_sinks(tmp_path: Path):
    log = RunLog(tmp_path / "run")
    log.scalars(0, {"reward/mean": 0.25})
    log.scalars(1, {"reward/mean": 0.5, "loss/kl": 0.0})
    log.tree(1, {"text": "Müller"})
    log.close()
    assert lines(tmp_path / "run" / "metrics.jsonl") == [
        {"step": 0, "reward/mean": 0.25},
        {"step": 1, "reward/mean": 0.5, "loss/kl": 0.0},
    ]
    assert lines(tmp_path / "run" / "trees.jsonl") == [{"step": 1, "text": "Müller"}]
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [(0, 0.25), (1, 0.5)]


def test_restart_drops_later_steps_and_the_line_a_kill_cut_off(tmp_path: Path):
    """The line separator U+2028 is text inside JSON, not the end of a line; the cut is inside a character."""
    log = RunLog(tmp_path)
    for step in range(3):
        log.scalars(step, {"a": step})
        log.tree(step, {"text": f"x\u2028{step}"})
    log.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 1, "ü'.encode()[:-1])
    log = RunLog(tmp_path)
    log.restart_after(1)
    log.scalars(2, {"a": 20})
    log.close()
    logged = [(line["step"], line["a"]) for line in lines(tmp_path / "metrics.jsonl")]
    assert logged == [(0, 0), (1, 1), (2, 20)]
    assert lines(tmp_path / "trees.jsonl") == [
        {"step": 0, "text": "x\u20280"},
        {"step": 1, "text": "x\u20281"},
    ]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("a")] == [(0, 0), (1, 1), (2, 20)]


class Wandb(ModuleType):
    """Weights & Biases as far as the sink goes: notes what it is told."""

    Error = type("Error", (Exception,), {})

    def __init__(self, fails: str | None = None) -> None:
        super().__init__("wandb")
        self.id, self.fails = "abc123", fails
        self.told: list[object] = []

    def init(self, **settings: object) -> Wandb:
        if self.fails:
            raise self.Error(self.fails)
        self.told.append(settings)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.told.append((name, step_metric))

    def log(self, scalars: dict[str, float]) -> None:
        self.told.append(scalars)

    def finish(self) -> None:
        self.told.append("finish")


def test_scalars_also_reach_wandb_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A restarted step is told again; a resumed run is the run it was."""
    wandb, folder = Wandb(), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = {"project": "trees", "name": "run", "dir": str(folder), "resume": "allow"}
    for known in (None, "abc123"):
        log = RunLog(folder, "trees")
        log.scalars(-1, {"sft/loss": 2.0})
        log.restart_after(-2)
        log.scalars(-1, {"sft/loss": 1.0})
        log.close()
        told = [{**settings, "id": known}, ("*", "step")]
        told += [{"step": -1, "sft/loss": 2.0}, {"step": -1, "sft/loss": 1.0}, "finish"]
        assert wandb.told == told
        wandb.told.clear()
    assert lines(folder / "metrics.jsonl") == [{"step": -1, "sft/loss": 1.0}]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, r"run\.wandb_project: needs the package wandb, .*, got 'trees'"),
        (Wandb("api_key not configured"), r"wandb does not open 'trees': api_key not configured"),
    ],
)
def test_wandb_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, message: str
):
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ValueError, match=message):
        RunLog(tmp_path, "trees")
