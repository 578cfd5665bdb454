"""A pool whose real engine is killed in the middle of its work."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_tree.metrics import values
from megatron_tree.types import GenerateResult
from tests.e2e.engines import Served, ask, serving

NUM_REQUESTS = 32


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, _ray: None) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("pool"), family="qwen2", tied=True, tp=1) as made:
        yield made


@pytest.mark.parametrize("victim", [0, pytest.param(-1, marks=pytest.mark.full)], ids=["actor", "vLLM"])
def test_a_killed_engine_costs_no_request(served: Served, victim: int) -> None:
    version = 1 + len(served.made)
    served.loop.run(served.pool.update(served.publish(version)))
    requests = [ask(f"{victim} before {s}", s, max_tokens=100) for s in range(NUM_REQUESTS)]
    calm = served.generate(*requests)
    served.pool.metrics()
    info = served.made[-1].info
    assert info is not None

    async def story() -> list[GenerateResult]:
        again = [ask(f"{victim} during {s}", s, max_tokens=100) for s in range(NUM_REQUESTS)]
        waiting = [asyncio.create_task(served.pool(request)) for request in again]
        await asyncio.sleep(0.3)
        assert not all(task.done() for task in waiting)
        os.kill(info.pids[victim], signal.SIGKILL)
        return await asyncio.gather(*waiting)

    started = time.perf_counter()
    stormy = served.loop.run(story())
    counted = values(served.pool.metrics())
    print(f"\nkilled and recovered in {time.perf_counter() - started:.1f} s: {counted}")
    assert [r.token_ids.tolist() for r in stormy] == [r.token_ids.tolist() for r in calm]
    assert {r.policy_version for r in stormy} == {version}
    assert counted["engine/restarts"] == 1
    assert counted["engine/requests"] == NUM_REQUESTS
    assert 1 <= counted["engine/resubmitted"] <= NUM_REQUESTS
    assert (
        served.gap(f"{victim} after") <= 1e-4
    )  # the replacement serves the published weights, not the folder's
    left = [pid for pid in info.pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert left == []
    assert [path for path in info.segments if Path(path).exists()] == []
