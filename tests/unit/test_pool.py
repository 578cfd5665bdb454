"""The engine pool against a fake engine of a few lines: what it samples is a function of the request's seed
alone, as a real engine's is (tests/e2e/test_pool.py does the same with vLLM).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megatron_tree.config import EngineConfig
from megatron_tree.engine.handle import Aborted, EngineDied
from megatron_tree.engine.pool import EnginePool
from megatron_tree.metrics import values
from megatron_tree.types import GenerateRequest, GenerateResult, RunFailed, Stream, Update


@dataclass
class FakeEngine:
    """Answers after one turn of the event loop. `faults`: what its n-th call of a method does instead."""

    index: int
    faults: dict[
        str, list[str]
    ]  # method -> "die", "hang", "abort", "refuse", "blind" (start) or "" for each call, first to last
    version: int = 0
    started: bool = False
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    served: list[str] = field(default_factory=list)
    wires: list[str] = field(default_factory=list)

    async def _fault(self, method: str) -> str:
        await asyncio.sleep(0)
        queue = self.faults.get(method, [])
        fault = queue.pop(0) if queue else ""
        if fault == "hang":
            await self.killed.wait()
        if fault == "die" or self.killed.is_set():
            raise EngineDied(f"{method} of engine {self.index}")
        if fault == "abort":
            raise Aborted("cut off")
        if fault == "refuse":
            raise ValueError(f"{method}: refused")
        return fault

    async def start(self, update: Update | None) -> int:
        sees = await self._fault("start") != "blind"
        self.started, self.version = True, update.version if update and sees else 0
        return self.version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        assert self.started
        self.served.append(request.request_id)
        await self._fault("generate")
        ids = np.array([request.seed, request.seed + 1], np.int32)
        return GenerateResult(ids, np.zeros(2, np.float32), "stop", 32, self.version)

    async def check(self, update: Update) -> None:
        await self._fault("check")

    async def update(self, update: Update) -> int:
        if update.stream is not None:
            self.wires.append(update.stream.wire)
        await self._fault("update")
        self.version = update.version
        return update.version

    async def kill(self) -> None:
        self.killed.set()


class Factory:
    """Spawns engines and keeps them; `faults[i]` are the faults of the i-th engine ever spawned."""

    def __init__(self, *faults: dict[str, list[str]]) -> None:
        self.faults = list(faults)
        self.made: list[FakeEngine] = []

    def __call__(self, index: int) -> FakeEngine:
        faults = self.faults.pop(0) if self.faults else {}
        self.made.append(FakeEngine(index, faults))
        return self.made[-1]


def pool_of(factory: Factory, count: int, **knobs: Any) -> EnginePool:
    limits = {
        "max_restarts": 2,
        "request_timeout_s": 0.2,
        "update_timeout_s": 0.2,
        "start_timeout_s": 0.2,
        **knobs,
    }
    return EnginePool(EngineConfig(count=count, **limits), factory)


def request(seed: int, route: str = "tree") -> GenerateRequest:
    return GenerateRequest(f"r{seed}", np.arange(64, dtype=np.int32), 8, seed, 1.0, 1.0, (), route)


def update(version: int) -> Update:
    return Update("/dev/shm/image", version, ("a",))


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


def test_a_route_stays_on_the_engine_that_holds_its_prefix() -> None:
    async def story() -> None:
        factory = Factory()
        pool = pool_of(factory, 2)
        await pool.start()
        await asyncio.gather(*(pool(request(i, f"tree {i % 4}")) for i in range(16)))
        on = [{int(served[1:]) % 4 for served in engine.served} for engine in factory.made]
        assert on == [{0, 2}, {1, 3}]  # least loaded first: engines in turn
        assert values(pool.metrics()) == {
            "engine/requests": 16,
            "engine/resubmitted": 0,
            "engine/restarts": 0,
            "engine/sampled_tokens": 32,
            "engine/prefix_hits": 0.5,  # 32 of 64 tokens
        }
        assert values(pool.metrics())["engine/requests"] == 0

    run(story())


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_no_request_is_lost_with_its_engine(fault: str) -> None:
    async def story() -> None:
        factory = Factory({"generate": ["", "", fault]})
        pool = pool_of(factory, 1)
        await pool.start(update(3))
        results = await asyncio.gather(*(pool(request(i, f"tree {i}")) for i in range(8)))
        assert [r.token_ids.tolist() for r in results] == [[i, i + 1] for i in range(8)]
        assert {r.policy_version for r in results} == {
            3
        }  # the replacement loaded it before it took a request
        assert [engine.killed.is_set() for engine in factory.made] == [True, False]
        assert values(pool.metrics())["engine/restarts"] == 1

    run(story())


def test_routes_of_a_dead_engine_go_to_a_living_one() -> None:
    async def story() -> None:
        factory = Factory({"generate": ["die"]}, {}, {"start": ["hang"]})
        pool = pool_of(factory, 2)
        await pool.start()
        result = await pool(request(5))
        assert result.token_ids.tolist() == [5, 6]
        assert factory.made[1].served == ["r5~1"]  # a resubmission has an id of its own

    run(story())


def test_an_aborted_request_is_submitted_again() -> None:
    async def story() -> None:
        factory = Factory({"generate": ["abort", "abort"]})
        pool = pool_of(factory, 1)
        await pool.start()
        assert (await pool(request(1))).token_ids.tolist() == [1, 2]
        assert factory.made[0].served == ["r1", "r1~1", "r1~2"]
        assert values(pool.metrics())["engine/restarts"] == 0

    run(story())


def test_a_refused_request_is_the_callers_error() -> None:
    async def story() -> None:
        factory = Factory({"generate": ["refuse"]})
        pool = pool_of(factory, 1)
        await pool.start()
        with pytest.raises(ValueError, match="refused"):
            await pool(request(1))
        assert not factory.made[0].killed.is_set()

    run(story())


def test_a_refused_update_changes_nothing() -> None:
    async def story() -> None:
        factory = Factory({}, {"check": ["refuse"]})
        pool = pool_of(factory, 2)
        await pool.start(update(1))
        with pytest.raises(ValueError, match="refused"):
            await pool.update(update(2))
        assert [engine.version for engine in factory.made] == [1, 1]
        assert (await pool(request(1))).policy_version == 1
        await pool.update(update(3))
        assert [engine.version for engine in factory.made] == [3, 3]

    run(story())


@pytest.mark.parametrize("sent", [False, True], ids=["read", "sent"])
@pytest.mark.parametrize(
    "faults", [{"update": ["die"]}, {"update": ["hang"]}, {"update": ["refuse"]}, {"check": ["die"]}]
)
def test_an_accepted_update_reaches_every_engine(faults: dict[str, list[str]], sent: bool) -> None:
    async def story() -> None:
        factory = Factory({}, {method: list(queue) for method, queue in faults.items()})
        pool = pool_of(factory, 2)
        pool.feed = FakeFeed(kept=2) if sent else None
        await pool.start()
        await pool.update(stream(2) if sent else update(2))
        assert [engine.version for engine in factory.made] == [
            2,
            0,
            2,
        ]  # the second was killed, never tried again
        assert [engine.killed.is_set() for engine in factory.made] == [False, True, False]

    run(story())


def test_restarts_are_bounded() -> None:
    async def story() -> None:
        factory = Factory(*({"generate": ["die"]} for _ in range(9)))
        pool, said = pool_of(factory, 1), []
        pool.say = said.append
        await pool.start()
        with pytest.raises(EngineDied, match="engine 0 is given up after 2 restarts"):
            await pool(request(1))
        assert len(factory.made) == 3
        assert said == [f"generate of engine 0; restarting engine 0 ({n} of 2)" for n in (1, 2)]

    run(story())


def test_a_start_that_fails_is_tried_again_and_a_refused_one_is_not() -> None:
    async def story() -> None:
        factory = Factory({"start": ["die"]}, {"start": ["hang"]})
        pool = pool_of(factory, 1)
        await pool.start(update(4))
        assert [engine.version for engine in factory.made] == [0, 0, 4]
        refusing = Factory({"start": ["refuse"]})
        with pytest.raises(ValueError, match="start: refused"):
            await pool_of(refusing, 1).start()
        assert len(refusing.made) == 1

    run(story())


def test_a_long_queue_is_no_hang() -> None:
    """Twenty answers 0.04 s apart: the last takes four time-outs, but no gap is as long as one."""

    class Slow(FakeEngine):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            await asyncio.sleep(0.04 * request.seed)
            return await super().generate(request)

    async def story() -> None:
        made: list[FakeEngine] = []

        def spawn(index: int) -> FakeEngine:
            made.append(Slow(index, {}))
            return made[-1]

        pool = EnginePool(EngineConfig(count=1, request_timeout_s=0.2), spawn)
        await pool.start()
        await asyncio.gather(*(pool(request(i)) for i in range(1, 21)))
        assert len(made) == 1

    run(story())


def test_stop_ends_waiting_requests() -> None:
    async def story() -> None:
        factory = Factory({"generate": ["hang"]})
        pool = pool_of(factory, 1, request_timeout_s=60.0)
        await pool.start()
        waiting = asyncio.create_task(pool(request(1)))
        await asyncio.sleep(0.01)
        await pool.stop()
        with pytest.raises(EngineDied, match="the pool was stopped"):
            await waiting
        assert factory.made[0].killed.is_set()

    run(story())


@dataclass
class FakeFeed:
    """Trainers that send what they keep. `faults`: what the n-th send does instead."""

    kept: int
    faults: list[str] = field(default_factory=list)
    sent: list[tuple[int, list[str]]] = field(default_factory=list)

    def keeps(self, version: int) -> bool:
        return self.kept == version

    async def send(
        self, update: Update, wires: Sequence[str], receive: Callable[[], Awaitable[object]]
    ) -> None:
        async def give() -> None:
            self.sent.append((update.version, list(wires)))
            await asyncio.sleep(0)
            if self.faults and self.faults.pop(0) == "die":
                self.kept = 0
                raise RunFailed("the trainers died")

        await asyncio.gather(give(), receive())


def stream(version: int) -> Update:
    sender = Stream(("host", 1), "float32", 1, 1, 1.0, ())
    return Update("", version, ("a",), sender)


def test_trainers_send_to_all_engines_and_again_to_a_replacement() -> None:
    async def story() -> None:
        factory = Factory({"generate": ["", "die"]}, {"update": ["", "die"]})
        pool = pool_of(factory, 2)
        pool.feed = feed = FakeFeed(kept=1)
        await pool.start()
        assert feed.sent == []  # the model folder's weights are there
        await pool.update(stream(1))
        assert feed.sent.pop() == (1, ["0.0", "1.0"])
        await asyncio.gather(*(pool(request(i, "tree")) for i in range(4)))
        await pool._settled()
        assert feed.sent.pop() == (1, ["0.1"])  # the version is sent again, under a name of its own
        assert factory.made[2].wires == ["0.1"]
        feed.kept = 2
        await pool.update(stream(2))
        assert feed.sent == [(2, ["0.1", "1.0"]), (2, ["1.1"])]
        assert [engine.version for engine in factory.made] == [1, 1, 2, 2]
        results = await asyncio.gather(*(pool(request(i, f"tree {i}")) for i in range(4)))
        assert {result.policy_version for result in results} == {2}

    run(story())


def test_engines_that_nobody_can_send_to_wait_for_the_next_update() -> None:
    """The trainers die while they send: one engine had not got all of it. Its replacement takes no request
    until other trainers publish, and neither would be sent anything of an old version meanwhile."""

    async def story() -> None:
        factory = Factory({"update": ["", "hang"]})
        pool = pool_of(factory, 1, update_timeout_s=60.0)
        pool.feed = feed = FakeFeed(kept=1, faults=["", "die"])
        await pool.start()
        await pool.update(stream(1))
        feed.kept = 2
        with pytest.raises(RunFailed, match="the trainers died"):
            await pool.update(stream(2))
        waiting = asyncio.create_task(pool(request(1)))
        await asyncio.sleep(0.05)
        assert [engine.killed.is_set() for engine in factory.made] == [True, False]
        assert factory.made[1].started
        assert factory.made[1].served == []
        feed.kept = 3
        await pool.update(stream(3))
        assert (await waiting).policy_version == 3
        assert [version for version, _ in feed.sent] == [1, 2, 3]
        assert values(pool.metrics())["engine/restarts"] == 1

    run(story())


def test_an_engine_that_does_not_see_the_image_waits_for_the_next_update() -> None:
    """Its host is not the lost one, where the image was. Trainers that restart publish; without them the
    requests end."""

    async def story() -> None:
        factory = Factory({"generate": ["die"]}, {"start": ["blind"]})
        pool = pool_of(factory, 1, start_timeout_s=60.0)
        said: list[str] = []
        pool.say = said.append
        await pool.start(update(1))
        waiting = asyncio.create_task(pool(request(1)))
        await asyncio.sleep(0.05)
        assert factory.made[1].started
        assert factory.made[1].served == []
        assert said[-1] == "engine 0 cannot have version 1 and waits for the next"
        await pool.update(update(2))
        assert (await waiting).policy_version == 2

    async def nobody_publishes() -> None:
        pool = pool_of(Factory({"generate": ["die"]}, {"start": ["blind"]}), 1)
        await pool.start(update(1))
        message = (
            r"^no engine sees /dev/shm/image, and no other version came in engine\.start_timeout_s = 0\.2 s$"
        )
        with pytest.raises(EngineDied, match=message):
            await pool(request(1))

    run(story())
    run(nobody_publishes())
