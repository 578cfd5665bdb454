"""Many engines as one `Generate`: routing, restarts, and version updates that succeed on all engines or on
none.

Invariants (tests/unit/test_pool.py, under the same words):
1. A route stays on the engine that holds its prefix, as long as that engine lives.
2. No request is lost with its engine: it is submitted again with the same seed, so its tokens are the same.
3. An engine takes no request before it has loaded the current version.
4. A refused update changes nothing; an accepted one reaches every engine, by a restart if need be.

A version lies in an image that every engine reads by itself, or the trainers send it (`feed`). They can send
the one that they published last at any time, between two of their steps; if they failed themselves, or the
image was on a host that is lost, an engine that needs it takes no request until the next update.

Not here: what an engine is (`handle`), processes and Ray (`cluster`). The pool belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

from megatron_tree.config import EngineConfig
from megatron_tree.engine.handle import Aborted, EngineDied, EngineHandle
from megatron_tree.metrics import Mean, Metrics, Sum
from megatron_tree.types import GenerateRequest, GenerateResult, RunFailed, Update

Result = TypeVar("Result")
MAX_ABORTS = 16  # of one request; an engine aborts when the weights change, which is rarer than this


@dataclass(slots=True)
class Counters:
    """Since the last call of `EnginePool.metrics`."""

    requests: int = 0
    resubmitted: int = 0
    restarts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0


class Feed(Protocol):
    """The trainers, where they send what they publish."""

    def keeps(self, version: int) -> bool:
        """Whether this version can be sent."""
        ...

    async def send(
        self, update: Update, wires: Sequence[str], receive: Callable[[], Awaitable[object]]
    ) -> None:
        """Sends to the engines at the other ends, which load in `receive`: it is called once the trainers
        begin. RunFailed: the trainers failed, or what `receive` raised."""
        ...


@dataclass(slots=True)
class _Slot:
    """One place of the pool. Its engine changes with every restart."""

    index: int
    handle: EngineHandle
    starting: asyncio.Task[None] | None = None
    in_flight: int = 0
    num_routes: int = 0
    num_restarts: int = 0
    version: int | None = None  # None: the model folder's weights
    behind: bool = False  # the engine is well, but could not have the current version
    progressed: float = 0.0  # when the engine last answered anything
    lost: Exception | None = None  # why it is not restarted any more

    @property
    def ready(self) -> bool:
        return self.starting is None and self.lost is None and not self.behind

    @property
    def wire(self) -> str:
        """A name of its own for every engine that this place has had."""
        return f"{self.index}.{self.num_restarts}"


@dataclass(slots=True)
class EnginePool:
    """`spawn(i)` makes the i-th engine's process; the pool starts, kills and replaces it."""

    config: EngineConfig
    spawn: Callable[[int], EngineHandle]
    feed: Feed | None = None
    say: Callable[[str], None] = lambda _: None  # tells the user
    _slots: list[_Slot] = field(default_factory=list)
    _routes: dict[str, _Slot] = field(default_factory=dict)
    _current: Update | None = None
    _counters: Counters = field(default_factory=Counters)
    _updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, update: Update | None = None) -> None:
        """Starts all engines at once, on a published version if given. A start that fails counts as a
        restart.
        """
        self._current = update
        self._slots = [_Slot(index, self.spawn(index)) for index in range(self.config.count)]
        for slot in self._slots:
            slot.starting = asyncio.create_task(self._bring_up(slot))
        await self._settled()

    async def stop(self) -> None:
        for slot in self._slots:
            if slot.starting is not None:
                slot.starting.cancel()
            slot.lost = slot.lost or EngineDied("the pool was stopped")
        self._changed.set()
        await asyncio.gather(*(slot.handle.kill() for slot in self._slots))

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        """ValueError when the engine refuses the request, EngineDied when no engine is left."""
        attempt, tries, aborts = request, 0, 0
        while True:
            slot = await self._route(request.route)
            handle = slot.handle
            slot.in_flight += 1
            try:
                result = await self._while_progress(slot, handle.generate(attempt))
            except EngineDied as error:
                self._replace(slot, handle, error)
            except Aborted as error:
                aborts += 1
                if aborts == MAX_ABORTS:
                    raise EngineDied(
                        f"request {request.request_id}: aborted {aborts} times: {error}"
                    ) from error
            else:
                self._count(request, result)
                return result
            finally:
                slot.in_flight -= 1
            tries += 1
            self._counters.resubmitted += 1
            attempt = replace(request, request_id=f"{request.request_id}~{tries}")

    async def update(self, update: Update) -> None:
        """Moves every engine to a version. ValueError: an engine refuses it, and all go on serving the old
        one.

        After the check there is no way back: an engine that fails or hangs is killed and restarted on the new
        one.
        """
        async with self._updating:
            await self._settled()
            await asyncio.gather(
                *(self._asked(slot, lambda engine: engine.check(update)) for slot in self._live())
            )
            self._current = update
            self._routes.clear()  # the caches they follow are dropped
            for slot in self._slots:
                slot.num_routes = 0
            while late := [slot for slot in self._live() if slot.version != update.version]:
                await self._move([slot for slot in late if slot.starting is None], update)
                await self._settled()

    async def sleep(self, level: int) -> None:
        """No engine keeps memory of its device but what its process needs: caches are dropped, weights go to
        the host (level 1) or are dropped (level 2). They take no request until they are awake again."""
        await asyncio.gather(
            *(self._asked(slot, lambda engine: engine.sleep(level)) for slot in self._live())
        )

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        await asyncio.gather(*(self._asked(slot, lambda engine: engine.wake(part)) for slot in self._live()))

    def metrics(self) -> Metrics:
        """Counts since the last call."""
        c, self._counters = self._counters, Counters()
        return {
            "engine/requests": Sum(c.requests),
            "engine/resubmitted": Sum(c.resubmitted),
            "engine/restarts": Sum(c.restarts),
            "engine/sampled_tokens": Sum(c.sampled_tokens),
            "engine/prefix_hits": Mean(c.cached_tokens, c.prompt_tokens),
        }

    def _live(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.lost is None]

    async def _route(self, route: str) -> _Slot:
        """The slot that holds the route's prefix, else the least loaded; waits while none is
        ready."""
        while True:
            slot = self._routes.get(route)
            if slot is not None and slot.ready:
                return slot
            ready = [slot for slot in self._slots if slot.ready]
            if ready:
                slot = min(ready, key=lambda s: (s.in_flight, s.num_routes, s.index))
                slot.num_routes += 1
                self._routes[route] = slot
                return slot
            if not self._live():
                raise EngineDied(f"no engine is left: {self._slots[-1].lost}")
            self._changed.clear()
            if self.feed is None and all(slot.behind for slot in self._live()):
                await self._another_version()
            else:
                await self._changed.wait()

    async def _another_version(self) -> None:
        """Trainers that restart elsewhere publish one; if they never failed, none may come."""
        limit = self.config.start_timeout_s
        try:
            await asyncio.wait_for(self._changed.wait(), limit)
        except TimeoutError:
            assert self._current is not None, "an engine is behind something"
            raise EngineDied(
                f"no engine sees {self._current.image}, and no other version came in "
                f"engine.start_timeout_s = {limit:g} s"
            ) from None

    async def _while_progress(self, slot: _Slot, call: Awaitable[Result]) -> Result:
        """Awaits a request; EngineDied after the time-out.

        It counts from the engine's last answer, whichever request that was for: a long queue is no hang.
        """
        task = asyncio.ensure_future(call)
        asked = time.monotonic()
        try:
            while not task.done():
                left = max(asked, slot.progressed) + self.config.request_timeout_s - time.monotonic()
                if left <= 0:
                    limit = self.config.request_timeout_s
                    raise EngineDied(
                        f"engine {slot.index}: no answer in engine.request_timeout_s = {limit} s"
                    )
                await asyncio.wait({task}, timeout=left)
            slot.progressed = time.monotonic()
            return task.result()
        finally:
            task.cancel()

    def _replace(self, slot: _Slot, handle: EngineHandle, error: Exception) -> None:
        """Starts the replacement of a failed engine, unless another request that it failed already did."""
        if slot.handle is not handle or slot.starting is not None or slot.lost is not None:
            return
        self._routes = {route: at for route, at in self._routes.items() if at is not slot}
        slot.num_routes = 0
        slot.starting = asyncio.create_task(self._bring_up(slot, error))

    async def _bring_up(self, slot: _Slot, failed: Exception | None = None) -> None:
        """Starts a slot's engine on the current version; after a failure kills it and starts another. Gives
        the slot up after `engine.max_restarts`, or at once for a ValueError: another try would meet it again.
        """
        try:
            while True:
                if failed is not None:
                    await slot.handle.kill()
                    if slot.num_restarts == self.config.max_restarts:
                        slot.lost = EngineDied(
                            f"engine {slot.index} is given up after {slot.num_restarts} restarts: {failed}"
                        )
                        return
                    slot.num_restarts += 1
                    self._counters.restarts += 1
                    tried = f"{slot.num_restarts} of {self.config.max_restarts}"
                    self.say(f"{failed}; restarting engine {slot.index} ({tried})")
                    slot.handle = self.spawn(slot.index)
                try:
                    await self._start(slot, self._current)
                except RunFailed as error:  # the engine, or the trainers while they sent
                    failed = error
                else:
                    return
        except ValueError as error:
            slot.lost = error
            await slot.handle.kill()
        finally:
            slot.starting = None
            self._changed.set()

    async def _start(self, slot: _Slot, update: Update | None) -> None:
        """The process, then the current version: it reads it as it starts, or the trainers send it."""
        slot.version, slot.behind = None, False
        start = slot.handle.start(None if self.feed is not None else update)
        served = await _within(self.config.start_timeout_s, "engine.start_timeout_s", start)
        if update is None or served == update.version:
            slot.version = None if update is None else served
        elif self.feed is not None and self.feed.keeps(update.version):
            await self.feed.send(update, [slot.wire], lambda: self._load(slot, update))
        else:
            slot.behind = True
            self.say(f"engine {slot.index} cannot have version {update.version} and waits for the next")

    async def _settled(self) -> None:
        """Waits until no engine is starting. Raises the ValueError of one that refused to start, and
        EngineDied when none is left.
        """
        await asyncio.gather(*(slot.starting for slot in self._slots if slot.starting is not None))
        lost = [slot.lost for slot in self._slots if slot.lost is not None]
        for error in lost:
            if isinstance(error, ValueError) or len(lost) == len(self._slots):
                raise error

    async def _asked(self, slot: _Slot, call: Callable[[EngineHandle], Awaitable[None]]) -> None:
        """Asks until a living engine of this slot has answered, or the slot is given up."""
        while slot.lost is None:
            handle = slot.handle
            try:
                await _within(self.config.update_timeout_s, "engine.update_timeout_s", call(handle))
                return
            except EngineDied as error:
                self._replace(slot, handle, error)
            if slot.starting is not None:
                await slot.starting

    async def _move(self, slots: list[_Slot], update: Update) -> None:
        """Moves running engines to a version and begins to replace those that fail. RunFailed: the trainers
        failed while they sent it, and every engine that does not have all of it is replaced."""
        handles = [slot.handle for slot in slots]

        async def receive() -> None:
            await asyncio.gather(*(self._moved(slot, update) for slot in slots))

        if self.feed is None or not slots:
            return await receive()
        try:
            await self.feed.send(update, [slot.wire for slot in slots], receive)
        except RunFailed as failure:
            for slot, handle in zip(slots, handles, strict=True):
                if slot.version != update.version:
                    self._replace(slot, handle, failure)
            raise

    async def _moved(self, slot: _Slot, update: Update) -> None:
        handle = slot.handle
        try:
            await self._load(slot, update)
        except (EngineDied, ValueError) as error:
            self._replace(slot, handle, error)

    async def _load(self, slot: _Slot, update: Update) -> None:
        if update.stream is not None:
            update = replace(update, stream=replace(update.stream, wire=slot.wire))
        await _within(self.config.update_timeout_s, "engine.update_timeout_s", slot.handle.update(update))
        slot.version, slot.behind = update.version, False
        self._changed.set()

    def _count(self, request: GenerateRequest, result: GenerateResult) -> None:
        self._counters.requests += 1
        self._counters.prompt_tokens += len(request.prompt_ids)
        self._counters.cached_tokens += result.cached_tokens
        self._counters.sampled_tokens += len(result.token_ids)


async def _within(seconds: float, knob: str, call: Awaitable[Result]) -> Result:
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError as error:
        raise EngineDied(f"no answer in {knob} = {seconds} s") from error
