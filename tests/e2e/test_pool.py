"""A pool whose real engine is killed in the middle of its work."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import ray

from megatron_tree.engine.engine import Engine
from megatron_tree.metrics import values
from megatron_tree.types import GenerateRequest, GenerateResult
from tests.e2e.engines import Served, ask
from tests.e2e.processes import assert_gone

NUM_REQUESTS = 32


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, -1], ids=["actor", "vLLM"])
def test_a_killed_engine_costs_no_request(tied: Served, victim: int) -> None:
    tied.loop.run(tied.pool.update(tied.publish()))
    requests = [ask(f"{victim} before {s}", s, max_tokens=100) for s in range(NUM_REQUESTS)]
    calm = tied.generate(*requests)
    tied.pool.metrics()
    started, info = tied.processes(), tied.made[-1].info
    assert info is not None

    async def story() -> list[GenerateResult]:
        again = [ask(f"{victim} during {s}", s, max_tokens=100) for s in range(NUM_REQUESTS)]
        waiting = [asyncio.create_task(tied.pool(request)) for request in again]
        await asyncio.sleep(0.3)
        assert not all(task.done() for task in waiting)
        started[victim].kill()
        return await asyncio.gather(*waiting)

    began = time.perf_counter()
    stormy = tied.loop.run(story())
    counted = values(tied.pool.metrics())
    print(f"\nkilled and recovered in {time.perf_counter() - began:.1f} s: {counted}")
    assert [r.token_ids.tolist() for r in stormy] == [r.token_ids.tolist() for r in calm]
    assert {r.policy_version for r in stormy} == {tied.version}
    assert counted["engine/restarts"] == 1
    assert counted["engine/requests"] == NUM_REQUESTS
    assert 1 <= counted["engine/resubmitted"] <= NUM_REQUESTS
    assert (
        tied.gap(f"{victim} after") <= 1e-4
    )  # the replacement serves the published weights, not the folder's
    assert_gone(started)
    assert not any(Path(segment).exists() for segment in info.segments)


def test_an_engine_killed_while_it_loads_is_replaced(tied: Served) -> None:
    """Past the check there is no way back: the replacement starts on the new version and answers what was
    under way; whichever version a request ended under, its tokens are those of a calm engine."""

    def requests(when: str) -> list[GenerateRequest]:
        return [ask(f"{when} {s}", s, max_tokens=100) for s in range(NUM_REQUESTS)]

    calm = {tied.version: tied.generate(*requests("before loading"))}
    update, started = tied.publish(), tied.processes()
    ray.get(tied.made[-1]._actor.__ray_call__.remote(die_half_loaded))
    tied.pool.metrics()

    async def story() -> list[GenerateResult]:
        waiting = [asyncio.create_task(tied.pool(request)) for request in requests("while loading")]
        await asyncio.sleep(0.2)
        await tied.pool.update(update)
        return await asyncio.gather(*waiting)

    stormy = tied.loop.run(story())
    counted = values(tied.pool.metrics())
    assert (counted["engine/restarts"], counted["engine/requests"]) == (1, NUM_REQUESTS)
    calm[update.version] = tied.generate(*requests("after loading"))
    for seed, result in enumerate(stormy):
        assert result.token_ids.tolist() == calm[result.policy_version][seed].token_ids.tolist()
    assert update.version in {result.policy_version for result in stormy}
    assert tied.gap("after a kill while loading") <= 1e-4
    assert_gone(started)


def die_half_loaded(engine: Engine) -> None:
    """Once the weights are in vLLM's layers, before they are put to use."""

    async def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    engine._llm.finish_weight_update = die


@pytest.mark.full
def test_an_engine_that_hangs_in_an_update_is_replaced(tied: Served) -> None:
    """It is stopped, so only a kill ends it; its replacement starts on the new version."""
    update, engines, started = tied.publish(), len(tied.made), tied.processes()
    started[-1].suspend()
    patient = tied.pool.config
    tied.pool.config = patient.model_copy(update={"update_timeout_s": 3.0})
    tied.loop.run(tied.pool.update(update))
    tied.pool.config = patient
    assert len(tied.made) == engines + 1
    assert tied.gap("after a hang") <= 1e-4
    assert_gone(started)
