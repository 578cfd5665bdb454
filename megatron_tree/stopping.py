"""A stop that Ctrl-C or SIGTERM asked for: what can be cut short is, a step that began ends, then the run
saves and stops. Not here: the signals (`cli`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class StopRequested(Exception):
    """Raised where the run may be cut short."""


class Stopping(asyncio.Event):
    """Set once a stop was asked for."""

    def check(self) -> None:
        if self.is_set():
            raise StopRequested

    async def unless(self, work: Awaitable[T]) -> T:
        """What `work` returns, or StopRequested as soon as a stop is asked for; `work` is then cancelled."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StopRequested
            return task.result()
        finally:
            await cancel(stop)
            await cancel(task)


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancels it and waits until it has ended, however it ends."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
