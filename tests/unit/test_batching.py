"""`Batcher` under the words of its head, with calls that end when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from megatron_tree.rollout.tools.batching import Batcher


class Calls:
    """Answers `key + "!"` once released; `bad` keys fail their batch."""

    def __init__(self, **limits: int) -> None:
        self.seen: list[list[str]] = []
        self.release: list[asyncio.Event] = []
        self.cancelled = 0
        self.ask = Batcher(self._call, **{"max_batch": 3, "max_calls": 2, "cache_size": 8} | limits)

    async def _call(self, keys: list[str]) -> list[str]:
        self.seen.append(keys)
        self.release.append(asyncio.Event())
        try:
            await self.release[-1].wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if "bad" in keys:
            raise ConnectionError("no server")
        return [f"{key}!" for key in keys]


def run(story: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 5))


async def ticks() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def test_batches_grow_with_the_load() -> None:
    """Two calls at once of at most three keys. What comes while both are under way travels together."""

    async def story() -> None:
        calls = Calls()
        first = asyncio.gather(*(calls.ask(key) for key in "abcd"))
        await ticks()
        assert calls.seen == [["a", "b", "c"], ["d"]]
        later = []
        for key in "efgh":  # one a tick
            later.append(asyncio.create_task(calls.ask(key)))
            await ticks()
        assert len(calls.seen) == 2
        calls.release[1].set()
        await ticks()
        assert calls.seen[2:] == [["e", "f", "g"]]
        calls.release[0].set()
        assert await first == ["a!", "b!", "c!", "d!"]
        await ticks()
        assert calls.seen[3:] == [["h"]]
        for event in calls.release:
            event.set()
        assert await asyncio.gather(*later) == ["e!", "f!", "g!", "h!"]

    run(story())


def test_nothing_waits_while_a_call_is_free() -> None:
    async def story() -> None:
        calls = Calls()
        one = asyncio.create_task(calls.ask("a"))
        await ticks()
        two = asyncio.create_task(calls.ask("b"))
        await ticks()
        assert calls.seen == [["a"], ["b"]]
        calls.release[1].set()
        assert await two == "b!"
        calls.release[0].set()
        assert await one == "a!"

    run(story())


def test_equal_keys_share_one_answer_and_the_latest_are_kept() -> None:
    async def story() -> None:
        calls = Calls(cache_size=2)
        asked = [asyncio.create_task(calls.ask(key)) for key in ("a", "b", "a")]
        await ticks()
        asked[0].cancel()  # takes the answer from nobody else
        calls.release[0].set()
        assert await asyncio.gather(*asked[1:]) == ["b!", "a!"]
        assert await calls.ask("a") == "a!"  # a, asked again, is later than b
        asked = [asyncio.create_task(calls.ask("c"))]
        await ticks()
        calls.release[1].set()
        await asked[0]
        assert (await calls.ask("a"), await calls.ask("c")) == ("a!", "c!")
        assert calls.seen == [["a", "b"], ["c"]]
        forgotten = asyncio.create_task(calls.ask("b"))
        await ticks()
        assert calls.seen[2:] == [["b"]]
        calls.release[2].set()
        assert await forgotten == "b!"

    run(story())


def test_a_failure_reaches_its_batch_alone_and_is_not_kept() -> None:
    async def story() -> None:
        calls = Calls(max_batch=2)
        asked = [asyncio.create_task(calls.ask(key)) for key in ("a", "bad", "c")]
        await ticks()
        assert calls.seen == [["a", "bad"], ["c"]]
        for event in calls.release:
            event.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(answer) for answer in found] == ["no server", "no server", "c!"]
        again = asyncio.create_task(calls.ask("a"))
        await ticks()
        calls.release[2].set()
        assert await again == "a!"

    run(story())


def test_close_cancels_what_is_under_way_and_what_waits() -> None:
    async def story() -> None:
        calls = Calls(max_calls=1, max_batch=1)
        asked = [asyncio.create_task(calls.ask(key)) for key in "ab"]
        await ticks()
        await calls.ask.close()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer) for answer in found] == [asyncio.CancelledError] * 2
        assert (calls.seen, calls.cancelled) == ([["a"]], 1)

    run(story())


def test_answers_outlive_their_event_loop() -> None:
    async def call(keys: list[str]) -> list[str]:
        return [f"{key}!" for key in keys]

    ask = Batcher(call, max_batch=2, max_calls=1, cache_size=2)
    assert [asyncio.run(ask(key)) for key in ("a", "b", "a")] == ["a!", "b!", "a!"]


def test_a_wrong_number_of_answers_is_our_own_bug() -> None:
    async def call(keys: list[str]) -> list[str]:
        return ["one too many", *keys]

    async def story() -> None:
        with pytest.raises(AssertionError, match="2 answers for 1 keys"):
            await Batcher(call, max_batch=1, max_calls=1, cache_size=1)("a")

    run(story())
