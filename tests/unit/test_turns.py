"""The order of calls when trainers and engines share devices, under the invariants of `turns`, recorded by
stand-ins; the pool's own calls reach its engines, also those that die meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tree.config import EngineConfig
from megatron_tree.engine.handle import EngineDied
from megatron_tree.engine.pool import EnginePool
from megatron_tree.turns import SharedTurns, Turns
from megatron_tree.types import Update


class Recorder:
    """Both sides at once: notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    async def wake(self, part: str) -> None:
        self.calls.append(f"wake {part}")

    async def release(self) -> None:
        self.calls.append("release")

    async def take_back(self) -> None:
        self.calls.append("take back")


def take(*turns: str, shared: bool = True) -> list[str]:
    """`train`: a publish is to follow; `save`: none is; `refused`: one that failed."""
    sides = Recorder()

    async def story() -> None:
        started = asyncio.ensure_future(asyncio.sleep(0))
        state = SharedTurns(sides, sides, started) if shared else Turns()
        steps: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "train": lambda: state.train(then_publish=True),
            "save": lambda: state.train(then_publish=False),
            "generate": state.generate,
            "refused": state.publish,
        }
        for turn in turns:
            if turn == "publish":
                await state.publish()
                sides.calls.append("update")
                state.published()
            else:
                await steps[turn]()

    asyncio.run(story())
    return sides.calls


TRAIN = ["sleep 2", "take back"]
PUBLISH = ["release", "wake weights", "update"]
SAVE = ["sleep 1", "take back", "release", "wake weights", "wake kv_cache"]  # and generate again


@pytest.mark.parametrize(
    ("turns", "calls"),
    [
        # a start and an iteration: engines have started; restore, publish, grow, score, learn, publish, grow
        (
            ["train", "publish", "generate", "train", "train", "publish", "generate"],
            [*TRAIN, *PUBLISH, "wake kv_cache", *TRAIN, *PUBLISH, "wake kv_cache"],
        ),
        # a checkpoint between two iterations: engines keep their weights, for none are published
        (
            ["train", "publish", "generate", "save", "generate"],
            [*TRAIN, *PUBLISH, "wake kv_cache", *SAVE],
        ),
        # a checkpoint right after the publish: vLLM falls asleep from wholly awake only
        (
            ["train", "publish", "save", "generate"],
            [*TRAIN, *PUBLISH, "wake kv_cache", *SAVE],
        ),
        # the trainer failed after the engines woke: a new group trains, and publishes again
        (
            ["train", "publish", "train", "publish", "generate"],
            [*TRAIN, *PUBLISH, "wake kv_cache", *TRAIN, *PUBLISH, "wake kv_cache"],
        ),
    ],
)
def test_the_order_of_calls(turns: list[str], calls: list[str]) -> None:
    assert take(*turns) == calls


def test_devices_of_their_own_need_no_turns() -> None:
    assert take("train", "publish", "generate", "save", "generate", shared=False) == ["update"]


def test_engines_that_dropped_their_weights_do_not_generate() -> None:
    with pytest.raises(AssertionError, match="publish comes first"):
        take("train", "generate")
    with pytest.raises(AssertionError, match="publish comes first"):
        take("train", "publish", "generate", "train", "save", "generate")


@given(st.lists(st.sampled_from(["train", "save", "publish", "refused", "generate"]), max_size=12))
def test_invariants(turns: list[str]) -> None:
    """Replays the recorded calls on what they mean for the memory, up to the last turn."""
    try:
        calls = take(*turns)
    except AssertionError:
        return
    weights, cache, trainer, whole = True, True, False, True
    for call in calls:
        if call.startswith("sleep"):
            assert (weights, cache) == (True, True)  # vLLM sleeps only when it is wholly awake
            weights, cache, whole = False, False, whole and call == "sleep 1"
        elif call == "take back":
            assert (weights, cache) == (False, False)  # 1.
            trainer = True
        elif call == "release":
            trainer = False
        elif call == "update":
            assert weights  # 2.
            whole = True
        else:
            assert not trainer  # 1.
            weights, cache = True, call == "wake kv_cache"
    if turns and turns[-1] == "generate":
        assert (weights, cache, whole, trainer) == (True, True, True, False)  # 3.


class Engine:
    """Dies the first time it is asked for what `dies_at` says."""

    def __init__(self, dies_at: str, calls: list[str]) -> None:
        self.dies_at, self.calls = dies_at, calls

    async def start(self, update: Update | None) -> None:
        self.calls.append("start")

    async def sleep(self, level: int) -> None:
        await self._do(f"sleep {level}")

    async def wake(self, part: str) -> None:
        await self._do(f"wake {part}")

    async def kill(self) -> None:
        self.calls.append("kill")

    async def _do(self, call: str) -> None:
        if call == self.dies_at:
            raise EngineDied(call)
        self.calls.append(call)


@pytest.mark.parametrize("dies_at", ["sleep 2", "wake weights", "nothing"])
def test_an_engine_that_dies_meanwhile_is_replaced_and_asked_again(dies_at: str) -> None:
    """Its replacement starts awake."""
    calls: list[str] = []
    faults = iter([dies_at, "nothing"])
    pool = EnginePool(EngineConfig(), lambda index: Engine(next(faults), calls))  # type: ignore[arg-type,return-value]

    async def story() -> None:
        await pool.start()
        await pool.sleep(2)
        await pool.wake("weights")
        await pool.wake("kv_cache")

    asyncio.run(story())
    expected = ["start", "sleep 2", "wake weights", "wake kv_cache"]
    if dies_at != "nothing":
        at = expected.index(dies_at)
        expected[at:at] = ["kill", "start"]
    assert calls == expected
