"""Colocated trainers and engines take turns on their GPUs: who releases, sleeps and wakes, in which order.

    generate --> train --> publish --> generate        generate --> train --> generate (nothing was published)

Invariants (tests/unit/test_turns.py, under the same words)
1. The trainer takes its memory back only after the engines sleep; they wake only after it was released.
2. Weights wake before they are published, caches after.
3. Engines that dropped their weights (sleep level 2) generate only after a whole publish.

Not here: what is released (`train.offload`), how an engine sleeps (`engine`).
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Literal, Protocol

Turn = Literal["generate", "train", "publish"]


class Sleeper(Protocol):
    """`engine.pool.EnginePool`."""

    async def sleep(self, level: int) -> None: ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None: ...


class Releaser(Protocol):
    """`train.group.TrainerGroup`. Releasing twice, or taking back what was not released, does nothing."""

    async def release(self) -> None: ...

    async def take_back(self) -> None: ...


class Turns:
    """Of sides with devices of their own: both are always awake."""

    async def train(self, *, then_publish: bool) -> None:
        """The trainer's turn. `then_publish`: the engines get other weights before they go on, so they need
        not keep theirs."""

    async def publish(self) -> None:
        """Both hold their weights, and nothing else is on the devices."""

    def published(self) -> None:
        """Every engine has the whole new version."""

    async def generate(self) -> None:
        """The engines' turn."""


class SharedTurns(Turns):
    """Of sides that share devices. The engines start, while no trainer is there, and it is their turn."""

    def __init__(self, engines: Sleeper, trainer: Releaser, started: Awaitable[None]) -> None:
        self._engines, self._trainer, self._started = engines, trainer, started
        self._turn: Turn = "generate"
        self._dropped = False  # the engines' weights, and none was published since

    async def train(self, *, then_publish: bool) -> None:
        await self._started
        if self._turn == "train":
            return
        if self._turn == "publish":  # vLLM sleeps only when it is wholly awake
            await self._engines.wake("kv_cache")
        await self._engines.sleep(2 if then_publish else 1)
        self._dropped |= then_publish
        self._turn = "train"
        await self._trainer.take_back()

    async def publish(self) -> None:
        if self._turn != "train":
            return
        await self._trainer.release()
        await self._engines.wake("weights")
        self._turn = "publish"

    def published(self) -> None:
        self._dropped = False

    async def generate(self) -> None:
        if self._turn == "generate":
            return
        assert not self._dropped, "the engines dropped their weights: publish comes first"
        await self.publish()
        await self._engines.wake("kv_cache")
        self._turn = "generate"
