"""A run with `rollout.async_depth` 1: stopped while trees grow ahead, resumed; nothing is trained twice."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.test_run import Command, _config, _metrics, world

__all__ = ["world"]  # the fixture


ITERATIONS = 6


@pytest.mark.full
def test_trees_are_one_version_old_and_a_stop_loses_nothing(world: Path) -> None:
    """Ctrl-C once iteration 2 is told: what grows ahead by then is dropped. After the resume it grows again,
    under the weights that the checkpoint holds."""
    run = world / "async"
    config = _config(
        world,
        run,
        rollout={"prompts": 4, "async_depth": 1},
        algo={"importance_cap": 2.0},
        train={
            "iterations": ITERATIONS,
            "parallel": {"tp": 1},
            "mini_batches": 1,
            "optimizer": {"lr": 1e-3},
        },
        eval={"at_end": False},
    )
    command = Command("train", config)
    command.wait_for(f"iteration 2/{ITERATIONS}  reward")
    command.process.send_signal(signal.SIGINT)
    code, _ = command.finish()
    assert code == 130, "".join(command.seen)
    done = max(_metrics(run))
    assert 2 <= done < ITERATIONS
    state = json.loads((run / f"checkpoints/iteration-{done}/state.json").read_text())
    assert (state["iteration"], state["order"]["position"]) == (done, 4 * done)

    code, out = (resumed := Command("train", config, "--resume")).finish()
    assert code == 0, "".join(resumed.seen)
    assert json.loads(out.splitlines()[-1])["iterations"] == ITERATIONS
    metrics = _metrics(run)
    for step in range(1, ITERATIONS + 1):
        logged = {name: metrics[step][f"rollout/version_{name}"] for name in ("lag", "spread")}
        fresh = step in (1, done + 1)  # the first iteration after a start has no older one to grow beside
        assert logged == {"lag": 0.0 if fresh else 1.0, "spread": 0.0}, step
        gap, weight = (metrics[step][f"policy/{name}"] for name in ("logprob_gap_max", "importance_weight"))
        if fresh:  # engine and trainer hold the same weights
            assert 0 < gap < 1e-4, step
            assert weight == pytest.approx(1.0, abs=1e-4)
        else:  # one update apart
            assert gap > 1e-3, step
            assert 0 < weight < 2
    trees = [json.loads(line) for line in (run / "trees.jsonl").read_text().splitlines()]
    grown = Counter((tree["group_id"], tree["tree"]) for tree in trees)
    assert len(grown) == ITERATIONS * 4 * 2  # prompts x M
    assert set(grown.values()) == {1}
