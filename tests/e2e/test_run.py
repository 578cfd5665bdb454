"""Whole runs as a user starts them: Ray, vLLM engines, Megatron ranks (TP 2 x PP 2), the quickstart's world.

A deterministic run is the second source of every other one: what is killed, stopped and resumed must end with
the same numbers, bit for bit.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import yaml

from examples.quickstart.prepare import prepare
from megatron_tree.config import load
from megatron_tree.runfolder import RunFolder
from megatron_tree.session import Session
from tests.e2e.processes import assert_gone
from tests.tiny_models import make_model

ROOT = Path(__file__).parents[2]
# wall clock; what restarts count; which of two requests for one prefix came first
VARIES = ("time/", "throughput/", "policy/version", "engine/", "budget/cached", "budget/prefix")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    prepare(folder, seed=0)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """Also after a test that failed."""
    yield
    for process in Command.started:
        process.kill()


def _config(world: Path, run: Path, **sections: dict) -> Path:
    config = yaml.safe_load((ROOT / "examples/quickstart/config.yaml").read_text())
    config["run"] = {"dir": str(run), "deterministic": True}
    config["model"]["path"] = str(world / "model")
    config["data"] |= {"train": [str(world / "train.jsonl")], "eval": [str(world / "test.jsonl")]}
    config["sft"] |= {"data": [str(world / "demonstrations.jsonl")], "steps": 10, "batch_size": 16}
    config["sft"]["optimizer"] = {"lr": 2e-3}
    config["rollout"] |= {"prompts": 6}
    config["train"] |= {"iterations": 3, "checkpoint_every": 1, "mini_batches": 2}
    config["eval"] = {"at_end": True, "samples": 2, "max_rows": 10}
    for name, values in sections.items():
        config[name] = (config.get(name) or {}) | values if values is not None else None
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    return path


class Command:
    """`megatron-tree …` in a process group of its own; stderr is read line by line."""

    started: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, *arguments: str | Path, module: str = "megatron_tree.cli") -> None:
        program = [sys.executable, "-m", module, *map(str, arguments)]
        self.process = subprocess.Popen(
            program,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.seen: list[str] = []
        self.started.append(self.process)

    def lines(self) -> Iterator[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.seen.append(line)
            yield line

    def wait_for(self, text: str) -> None:
        for line in self.lines():
            if text in line:
                return
        raise AssertionError(f"{text!r} never came:\n{''.join(self.seen)}")

    def finish(self) -> tuple[int, str]:
        """Exit code and stdout."""
        for _ in self.lines():
            pass
        assert self.process.stdout is not None
        return self.process.wait(120), self.process.stdout.read()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def _metrics(run: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {name: value for name, value in record.items() if not name.startswith(VARIES)}
        found.setdefault(record["step"], {}).update(kept)
    return found


@pytest.fixture(scope="module")
def whole(world: Path) -> tuple[Path, dict]:
    """A run that nothing disturbs."""
    run = world / "whole"
    code, out = (command := Command("train", _config(world, run))).finish()
    assert code == 0, "".join(command.seen)
    return run, json.loads(out.splitlines()[-1])


def test_summary_and_files(whole: tuple[Path, dict]) -> None:
    run, summary = whole
    assert summary["iterations"] == 3
    assert summary["policy_version"] == 4  # after the warm-up and after each iteration
    assert (summary["tp"], summary["pp"], summary["engines"]) == (2, 2, 1)
    assert json.loads((run / "summary.json").read_text()) == summary
    trees = [json.loads(line) for line in (run / "trees.jsonl").read_text().splitlines()]
    assert len(trees) == 3 * 6 * 2  # iterations x prompts x M
    assert all(len(tree["leaves"]) == 3 for tree in trees)  # 1 + L N
    assert {node["policy_version"] for tree in trees for node in tree["nodes"][1:]} == {1, 2, 3}
    rewards = [leaf["reward"] for tree in trees[-12:] for leaf in tree["leaves"]]
    assert _metrics(run)[3]["rollout/reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert list((run / "tensorboard").glob("events*"))


def test_engine_and_trainer_agree_after_every_publish(whole: tuple[Path, dict]) -> None:
    """The engines sample under versions 1, 2 and 3; their log-probs equal the trainer's of the same
    tokens."""
    run, summary = whole
    assert 0 < summary["max_logprob_gap"] <= 1e-3
    metrics = _metrics(run)
    assert metrics[1]["policy/kl"] < metrics[3]["policy/kl"]  # the weights moved away from the reference


def test_killed_stopped_and_resumed_is_the_same(world: Path, whole: tuple[Path, dict]) -> None:
    """A trainer rank is killed while it publishes iteration 2; Ctrl-C when that is done again; resume:
    metrics and trees of the whole run."""
    run = world / "disturbed"
    config = _config(world, run)
    command = Command("train", config, module="tests.e2e.faulty")
    command.wait_for("engines serve version 2")
    command.wait_for("write_version: rank 3 failed: RankDied")
    assert "restarting the trainer (1 of 2)" in command.seen[-1]
    command.wait_for("iteration 2/3  reward")
    started = command.children()
    command.process.send_signal(signal.SIGTERM)
    code, _ = command.finish()
    assert code == 130, "".join(command.seen)
    assert_gone(started)
    assert not list(Path("/dev/shm").glob(f"megatron-tree-{RunFolder(load(config)).run_id}*"))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["iteration-1", "iteration-2"]

    code, out = (resumed := Command("train", config, "--resume")).finish()
    assert code == 0, "".join(resumed.seen)
    summary = json.loads(out.splitlines()[-1])  # tells the whole story
    for name in ("iterations", "success_after", "reward_first", "reward_last", "max_logprob_gap"):
        assert summary[name] == whole[1][name], name
    assert _metrics(run) == _metrics(whole[0])
    assert _trees(run) == _trees(whole[0])


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shm", "ipc"])
def test_a_colocated_run_is_the_same(world: Path, whole: tuple[Path, dict], transport: str) -> None:
    """Engines sleep while ranks train, ranks release what they need only to train: also around checkpoints
    and the evaluation at the end. On a CPU the engines keep their memory, which is said once."""
    run = world / f"colocated_{transport}"
    config = _config(world, run, cluster={"placement": "colocated"}, engine={"transport": transport})
    code, _ = (command := Command("train", config)).finish()
    assert code == 0, "".join(command.seen)
    assert sum("colocated on a CPU" in line for line in command.seen) == 1
    assert _metrics(run) == _metrics(whole[0])


@pytest.mark.full
@pytest.mark.parametrize(("transport", "placement"), [("stream", "cpu"), ("ipc", "colocated")])
def test_a_run_whose_sender_dies_is_the_same(
    world: Path, whole: tuple[Path, dict], transport: str, placement: str
) -> None:
    """No image: the trainers send every version. A rank dies while it sends version 3; other trainers go on
    from the checkpoint and publish to the engine that had got half of it."""
    run = world / f"sent_by_{transport}"
    config = _config(world, run, cluster={"placement": placement}, engine={"transport": transport})
    code, _ = (command := Command("train", config, module="tests.e2e.faulty")).finish()
    assert code == 0, "".join(command.seen)
    told = [line for line in command.seen if "send_version: rank 3 failed: RankDied" in line]
    assert sum("restarting the trainer (1 of" in line for line in told) == 1
    assert not list(Path("/dev/shm").glob(f"megatron-tree-{RunFolder(load(config)).run_id}*"))
    assert _metrics(run) == _metrics(whole[0])
    assert _trees(run) == _trees(whole[0])


def test_untied_model_with_tensor_parallel_engines(world: Path) -> None:
    """An untied Llama, engine TP 2, trainer PP 2 x DP 2: published weights arrive whole, twice. Colocated:
    engines sleep, and rank 0 lends them every bucket."""
    run = world / "untied"
    model = world / "untied_model"
    _untied_copy(world / "model", model)
    config = _config(
        world,
        run,
        model={"path": str(model), "dtype": "fp32"},
        cluster={"placement": "colocated"},
        engine={"tp": 2, "transport": "ipc"},
        train={"iterations": 2, "parallel": {"tp": 1, "pp": 2, "dp": 2}, "optimizer": {"lr": 1e-3}},
        eval={"at_end": False},
    )
    code, out = (command := Command("train", config)).finish()
    assert code == 0, "".join(command.seen)
    assert 0 < json.loads(out.splitlines()[-1])["max_logprob_gap"] <= 1e-3
    metrics = _metrics(run)
    assert metrics[2]["policy/kl"] > 1e-6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.parallel.tp=3"], "train.parallel.tp: must divide the model's 4 heads, got 3"),
        (["train.parallel.pp=3"], "train.parallel.pp: must divide the model's 4 layers, got 3"),
        (["model.path=/nowhere"], "/nowhere"),
        (["train.lr=1"], "train.lr: unknown key, got 1"),
        (["data.train=[/nowhere.jsonl]"], "/nowhere.jsonl: must be a .jsonl or .parquet file"),
        (["environment.target=nowhere:World"], "environment.target: cannot import nowhere:World"),
    ],
)
def test_a_wrong_config_is_refused(world: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    """Before any process starts, and before the run folder is made."""
    config = _config(world, tmp_path / "wrong")
    with pytest.raises(ValueError, match=re.escape(message)):
        Session(load(config, overrides))
    assert not (tmp_path / "wrong").exists()


def test_a_refusal_is_one_line(world: Path, tmp_path: Path) -> None:
    config = _config(world, tmp_path / "wrong")
    code, out = (command := Command("train", config, "train.parallel.tp=3")).finish()
    assert (code, out) == (2, "")
    assert command.seen == ["megatron-tree: train.parallel.tp: must divide the model's 4 heads, got 3\n"]


def test_a_used_run_folder_is_refused(world: Path, whole: tuple[Path, dict]) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole[0].rglob("*")}
    code, _ = (command := Command("train", _config(world, whole[0]))).finish()
    assert code == 2
    assert "run.dir: must be new or empty unless run.resume is true" in command.seen[-1]
    assert {path: path.stat().st_mtime_ns for path in whole[0].rglob("*")} == before


def _trees(run: Path) -> list[dict]:
    trees = [json.loads(line) for line in (run / "trees.jsonl").read_text().splitlines()]
    for tree in trees:
        for node in tree["nodes"]:
            del node["policy_version"]  # counts publishes, of which a restart makes one more
    return trees


def _untied_copy(source: Path, target: Path) -> None:
    """The quickstart's tokenizer and vocabulary with a head of its own."""
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    make_model(target, family="llama", tied=False, vocab_size=vocab, seed=5)
    for file in source.iterdir():
        if file.name.startswith("tokenizer") or file.suffix == ".jinja":
            (target / file.name).write_bytes(file.read_bytes())
