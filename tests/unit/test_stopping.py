"""What a stop cuts short, and what it leaves alone."""

from __future__ import annotations

import asyncio

import pytest

from megatron_tree.stopping import Stopping, StopRequested


def test_work_is_cancelled_by_a_stop_and_has_ended_when_it_is_raised() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    async def story() -> None:
        stopping = Stopping()
        asyncio.get_running_loop().call_later(0.01, stopping.set)
        with pytest.raises(StopRequested):
            await stopping.unless(work())
        assert ended == ["work"]
        with pytest.raises(StopRequested):
            stopping.check()

    asyncio.run(story())


def test_without_a_stop_work_is_what_it_is() -> None:
    async def seven() -> int:
        await asyncio.sleep(0)
        return 7

    async def wrong() -> int:
        raise KeyError("wrong")

    async def story() -> None:
        stopping = Stopping()
        stopping.check()
        assert await stopping.unless(seven()) == 7
        with pytest.raises(KeyError):
            await stopping.unless(wrong())

    asyncio.run(story())
