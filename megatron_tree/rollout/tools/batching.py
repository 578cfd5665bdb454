"""Keys that are asked for at the same moment are answered together.

What is asked in one tick of the event loop travels in one call. While `max_calls` are under way, later keys
wait and travel together as soon as one ends: nothing waits while a call is free, and batches grow with the
load, up to `max_batch`. Equal keys share one answer, and the latest `cache_size` answers are kept.

Not here: time-outs and retries, which are the call's own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

Key = TypeVar("Key")
Answer = TypeVar("Answer")


@dataclass(slots=True)
class _PerLoop(Generic[Key, Answer]):
    """What belongs to one event loop: a run may use several, one after the other."""

    loop: asyncio.AbstractEventLoop
    waiting: list[Key] = field(default_factory=list)
    futures: dict[Key, asyncio.Future[Answer]] = field(default_factory=dict)  # waiting or under way
    calls: set[asyncio.Task[None]] = field(default_factory=set)


class Batcher(Generic[Key, Answer]):
    """`call` answers a list of distinct keys in their order; what it raises reaches every asker of its
    batch."""

    def __init__(
        self,
        call: Callable[[list[Key]], Awaitable[Sequence[Answer]]],
        *,
        max_batch: int,
        max_calls: int,
        cache_size: int,
    ) -> None:
        self._call = call
        self._max_batch, self._max_calls, self._cache_size = max_batch, max_calls, cache_size
        self._cache: OrderedDict[Key, Answer] = OrderedDict()
        self._state: _PerLoop[Key, Answer] | None = None

    async def __call__(self, key: Key) -> Answer:
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        state = self._here()
        if key not in state.futures:
            if not state.waiting:
                state.loop.call_soon(self._send, state)  # after this tick's other askers
            state.waiting.append(key)
            state.futures[key] = state.loop.create_future()
        # shielded: a cancelled asker must not cancel the others' answer
        return await asyncio.shield(state.futures[key])

    async def close(self) -> None:
        """Cancels what is under way, and forgets the answers."""
        state, self._state = self._state, None
        self._cache.clear()
        if state is not None and state.loop is asyncio.get_running_loop():
            state.waiting.clear()
            for future in state.futures.values():
                future.cancel()
            calls = list(state.calls)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _here(self) -> _PerLoop[Key, Answer]:
        loop = asyncio.get_running_loop()
        if self._state is None or self._state.loop is not loop:
            self._state = _PerLoop(loop)
        return self._state

    def _send(self, state: _PerLoop[Key, Answer]) -> None:
        while state.waiting and len(state.calls) < self._max_calls:
            keys = state.waiting[: self._max_batch]
            del state.waiting[: self._max_batch]
            call = state.loop.create_task(self._answer(state, keys))
            state.calls.add(call)
            call.add_done_callback(partial(self._ended, state))

    def _ended(self, state: _PerLoop[Key, Answer], call: asyncio.Task[None]) -> None:
        state.calls.discard(call)
        self._send(state)

    async def _ask(self, keys: list[Key]) -> Sequence[Answer]:
        answers = await self._call(keys)
        assert len(answers) == len(keys), f"{len(answers)} answers for {len(keys)} keys"
        return answers

    async def _answer(self, state: _PerLoop[Key, Answer], keys: list[Key]) -> None:
        [outcome] = await asyncio.gather(self._ask(keys), return_exceptions=True)
        futures = [state.futures.pop(key) for key in keys]
        if isinstance(outcome, BaseException):
            for future in futures:
                future.set_exception(outcome)
                future.exception()  # read here: every asker may have been cancelled
            return
        for key, future, answer in zip(keys, futures, outcome, strict=True):
            future.set_result(answer)
            self._cache[key] = answer
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
