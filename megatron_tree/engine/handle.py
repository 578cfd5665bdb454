"""What the pool asks of one engine, and the two ways in which an engine fails."""

from __future__ import annotations

from typing import Literal, Protocol

from megatron_tree.types import GenerateRequest, GenerateResult, RunFailed, Update


class EngineDied(RunFailed):
    """The engine is gone or of no further use; the pool kills and restarts it."""


class Aborted(Exception):
    """The request ended without a result although the engine is well; the pool submits it again."""


class EngineHandle(Protocol):
    """One engine, wherever it runs. Any method may raise EngineDied; ValueError means that the caller is
    wrong.
    """

    async def start(self, update: Update | None) -> int:
        """Loads the model and, if given, the published version, before any request is taken. Returns the
        version that it then serves: 0, the model folder's, also where it does not see the image."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Raises Aborted."""
        ...

    async def check(self, update: Update) -> None:
        """ValueError when the engine could not load this version. Changes nothing."""
        ...

    async def update(self, update: Update) -> int:
        """Loads the version in place and drops the prefix cache; returns the version. After any failure but
        ValueError the engine is useless."""
        ...

    async def sleep(self, level: int) -> None:
        """Frees its device's memory, weights too: at level 1 it keeps them on the host. Takes no request."""
        ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Takes a part of the memory back, weights first; it may generate once it has both. Awake already, it
        does nothing."""
        ...

    async def kill(self) -> None:
        """Ends the engine's processes at once. Never raises because they are already gone."""
        ...
