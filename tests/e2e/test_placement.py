"""Processes on several nodes and on shared devices: what lands where, what happens when a node is lost, and
real engines that sleep. The stories of the cluster run in processes of their own (`tests.e2e.nodes`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples.quickstart.prepare import prepare
from megatron_tree.cluster import running_ray
from megatron_tree.types import RunFailed
from tests.e2e.engines import Served, serving
from tests.e2e.nodes import A, B, C
from tests.e2e.processes import assert_gone

ROOT = Path(__file__).parents[2]


def tell(*arguments: str) -> tuple[dict, str]:
    """The last line of a story's stdout, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.nodes", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def told() -> dict:
    return tell()[0]


def test_actors_land_where_they_are_placed(told: dict) -> None:
    """The driver's node has no GPU. Each rank sees one GPU of A, the engine the GPU of B."""
    assert told["ranks"] == [f"{A}:0", f"{A}:1"]
    assert told["engine"] == f"{B}:0"
    assert told["bound"] == A  # the address of rank 0's node: the run is on several hosts


def test_too_few_gpus_are_refused_before_anything_starts(told: dict) -> None:
    assert told["refused"] == (
        "ValueError: cluster: must hold 2 trainer ranks and 2 engine workers, 4, got 3; engine.count=1 or "
        "cluster.placement=colocated, where memory allows, fits"
    )


def test_gpus_that_another_run_holds_are_named(told: dict) -> None:
    held = "RunFailed: cluster: something else holds GPUs of the placement"
    assert told["held"].startswith(held)
    assert f"2 on {A}" in told["held"]
    assert f"1 on {B}" in told["held"]


def test_a_run_takes_what_another_leaves_free(told: dict) -> None:
    """B is held by the first run, and of C one GPU by another."""
    assert told["beside"] == {C: 3}


def test_an_engine_of_a_lost_node_goes_on_elsewhere(told: dict) -> None:
    """And answers what was asked of the lost one. The first GPU of C is another run's, two have ranks."""
    assert (told["moved_engine"], told["restarts"]) == (f"{C}:3", 1)


def test_a_lost_node_is_named_and_the_ranks_go_on_elsewhere(told: dict) -> None:
    """As long as no node has room for the group, a start says so in one line."""
    assert told["lost_ranks"] in [
        f"TrainerFailed: hang: rank {rank} failed: RankDied: its node {A} is lost" for rank in (0, 1)
    ]
    assert told["no_place"] == (
        f"RunFailed: cluster: node {A} is lost, and no other has 2 GPUs free for trainer rank 0"
    )
    assert told["moved_ranks"] == [f"{C}:1", f"{C}:2"]


@pytest.mark.full
def test_a_run_goes_on_when_the_node_of_its_ranks_is_lost(tmp_path: Path) -> None:
    """Real ranks, TP 2: the node is lost after two of three iterations, another one is there."""
    prepare(tmp_path, seed=0)
    config = yaml.safe_load((ROOT / "examples/quickstart/config.yaml").read_text())
    config["run"] = {"dir": str(tmp_path / "run"), "deterministic": True}
    config["model"]["path"] = str(tmp_path / "model")
    config["data"] |= {"train": [str(tmp_path / "train.jsonl")], "eval": []}
    config["sft"] = None
    config["rollout"] |= {"prompts": 4}
    config["train"] |= {"iterations": 3, "checkpoint_every": 1, "parallel": {"tp": 2}}
    config["eval"] = {}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    summary, said = tell(str(tmp_path / "config.yaml"))
    assert summary["iterations"] == 3
    assert f"RankDied: its node {A} is lost; restarting the trainer (1 of 2)" in said


def test_a_real_engine_sleeps_and_wakes_around_a_publish(tied: Served) -> None:
    """On a CPU vLLM keeps the memory; the calls are those of a GPU. After each sleep it serves what it
    should: the old version when nothing was published, else the new one."""

    async def story(level: int, publish: bool) -> None:
        await tied.pool.sleep(level)
        await tied.pool.wake("weights")
        if publish:
            await tied.pool.update(tied.publish())
        await tied.pool.wake("kv_cache")

    for level, publish in ((2, True), (1, False)):
        tied.loop.run(story(level, publish))
        assert tied.gap(f"after sleep {level}") <= 1e-4


@pytest.mark.full
@pytest.mark.usefixtures("_ray")
def test_an_engine_whose_child_dies_while_it_sleeps_is_replaced(tmp_path: Path) -> None:
    """vLLM's error of a dead child is none that the pool knows. About 100 s: two starts of TP 2."""
    with serving(tmp_path, family="qwen2", tied=True, tp=2) as served:
        started = served.processes()
        served.loop.run(served.pool.sleep(2))
        next(process for process in started if process.name().endswith("EngineCore")).kill()
        for part in ("weights", "kv_cache"):
            served.loop.run(served.pool.wake(part))  # type: ignore[arg-type]
        assert len(served.made) == 2
        assert served.gap("after") <= 1e-4
        assert_gone(started)


def test_a_cluster_that_does_not_answer_is_one_line() -> None:
    with (
        pytest.raises(RunFailed, match=r"^RAY_ADDRESS: no cluster answers at 127\.0\.0\.1:1$"),
        running_ray("127.0.0.1:1"),
    ):
        pass
