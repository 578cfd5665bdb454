"""A pool whose real engine is killed in the middle of its work."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron_tree.metrics import values
from megatron_tree.types import GenerateResult
from tests.e2e.engines import Served, ask

NUM_REQUESTS = 32


@pytest.mark.parametrize("victim", [0, pytest.param(-1, marks=pytest.mark.full)], ids=["actor", "vLLM"])
def test_a_killed_engine_costs_no_request(tied: Served, victim: int) -> None:
    tied.loop.run(tied.pool.update(tied.publish()))
    requests = [ask(f"{victim} before {s}", s, max_tokens=100) for s in range(NUM_REQUESTS)]
    calm = tied.generate(*requests)
    tied.pool.metrics()
    info = tied.made[-1].info
    assert info is not None

    async def story() -> list[GenerateResult]:
        again = [ask(f"{victim} during {s}", s, max_tokens=100) for s in range(NUM_REQUESTS)]
        waiting = [asyncio.create_task(tied.pool(request)) for request in again]
        await asyncio.sleep(0.3)
        assert not all(task.done() for task in waiting)
        os.kill(info.pids[victim], signal.SIGKILL)
        return await asyncio.gather(*waiting)

    started = time.perf_counter()
    stormy = tied.loop.run(story())
    counted = values(tied.pool.metrics())
    print(f"\nkilled and recovered in {time.perf_counter() - started:.1f} s: {counted}")
    assert [r.token_ids.tolist() for r in stormy] == [r.token_ids.tolist() for r in calm]
    assert {r.policy_version for r in stormy} == {tied.version}
    assert counted["engine/restarts"] == 1
    assert counted["engine/requests"] == NUM_REQUESTS
    assert 1 <= counted["engine/resubmitted"] <= NUM_REQUESTS
    assert (
        tied.gap(f"{victim} after") <= 1e-4
    )  # the replacement serves the published weights, not the folder's
    assert not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in info.pids)
    assert not any(Path(segment).exists() for segment in info.segments)


@pytest.mark.full
def test_an_engine_that_hangs_in_an_update_is_replaced(tied: Served) -> None:
    """It is stopped, so only a kill ends it; its replacement starts on the new version."""
    info, patient = tied.made[-1].info, tied.pool.config
    assert info is not None
    update, engines = tied.publish(), len(tied.made)
    os.kill(info.pids[-1], signal.SIGSTOP)
    tied.pool.config = patient.model_copy(update={"update_timeout_s": 3.0})
    tied.loop.run(tied.pool.update(update))
    tied.pool.config = patient
    assert len(tied.made) == engines + 1
    assert tied.gap("after a hang") <= 1e-4
    assert not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in info.pids)
