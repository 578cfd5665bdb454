"""Kill -9 of the whole program at random points: it always goes on from a whole checkpoint, to the same
numbers. So does a run of which one rank dies, or hangs, whatever it is at.

Rollouts are prepared (`replay`), so that a start costs no engine. The undisturbed run is the second source.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from examples.quickstart.prepare import prepare
from tests.e2e.processes import assert_gone
from tests.e2e.test_run import ROOT, VARIES

ITERATIONS = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    prepare(folder, seed=0)
    return folder


def _config(world: Path, name: str) -> Path:
    config = yaml.safe_load((ROOT / "examples/quickstart/config.yaml").read_text())
    config["run"] = {"dir": str(world / name), "deterministic": True, "resume": True}
    config["model"]["path"] = str(world / "model")
    config["data"] |= {"train": [str(world / "train.jsonl")], "eval": []}
    config["sft"] |= {"data": [str(world / "demonstrations.jsonl")], "steps": 2, "batch_size": 16}
    config["rollout"] |= {"prompts": 4}
    config["train"] |= {"iterations": ITERATIONS, "checkpoint_every": 1, "mini_batches": 2}
    config["train"] |= {"export_checkpoints": True, "parallel": {"tp": 1, "pp": 2}}
    config["eval"] = {}
    path = world / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _start(config: Path, *arguments: str, module: str = "replay") -> subprocess.Popen[str]:
    program = [sys.executable, "-m", f"tests.e2e.{module}", *arguments, str(config)]
    return subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str], said: str = "") -> dict:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    assert said in err
    return json.loads(out.splitlines()[-1])


def _steps(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(VARIES)} for line in lines]


def _lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def _kill(process: subprocess.Popen[str]) -> None:
    """The driver alone: everything it started must end by itself (Ray's own agents take a minute or so)."""
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert_gone(started, but="Agent")


def _kill_at_random_points(world: Path, name: str, kills: int, seed: int) -> int:
    """Kills as soon as some more steps are logged, and a moment later. Returns how many kills hit a run that
    was not over."""
    config, run, draws = _config(world, name), world / name, random.Random(seed)
    hits = 0
    for _ in range(kills):
        process = _start(config)
        target = _lines(run) + draws.choice([0, 1, 1, 2])
        while process.poll() is None and _lines(run) < target:
            time.sleep(0.02)
        time.sleep(draws.uniform(0, 1.0) if target else draws.uniform(5, 15))
        if process.poll() is None:
            hits += 1
            _kill(process)
        else:
            _finish(process)
            break
    assert _finish(_start(config))["iterations"] == ITERATIONS
    return hits


def _check(world: Path, name: str) -> None:
    if not (world / "whole").exists():
        _finish(_start(_config(world, "whole")))
    assert _steps(world / name) == _steps(world / "whole")
    last = f"checkpoints/iteration-{ITERATIONS}/hf/model.safetensors"
    expected, got = load_file(world / "whole" / last), load_file(world / name / last)
    assert all((expected[tensor] == got[tensor]).all() for tensor in expected)


def test_three_kills(world: Path) -> None:
    assert _kill_at_random_points(world, "three", 3, seed=1) >= 2
    _check(world, "three")


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "signal_name", "train", "said"),
    [
        ("start", "SIGKILL", {}, "start: rank 1 failed: RankDied"),
        # of the warm-up; the other rank runs out of time
        ("train", "SIGSTOP", {"collective_timeout_s": 10}, "no answer from rank 1 not answering"),
        # the only checkpoint, after the last iteration
        ("save", "SIGKILL", {"checkpoint_every": 0}, "failed: RankDied"),
    ],
)
def test_a_rank_is_struck(world: Path, method: str, signal_name: str, train: dict, said: str) -> None:
    name = f"{method}-{signal_name}"
    config = _config(world, name)
    sections = yaml.safe_load(config.read_text())
    sections["train"] |= train
    config.write_text(yaml.safe_dump(sections))
    process = _start(config, method, signal_name, module="struck")
    assert _finish(process, said)["iterations"] == ITERATIONS
    _check(world, name)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_kills(world: Path) -> None:
    hits = 0
    for turn in range(
        5
    ):  # five runs of up to four kills: a run that is killed often enough ends all the same
        hits += _kill_at_random_points(world, f"turn{turn}", 4, seed=100 + turn)
        _check(world, f"turn{turn}")
    assert hits >= 12
