"""What a session does when starting or recovering fails, with stand-ins for its processes: Ray, Megatron and
vLLM are imported, none is started."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

from megatron_tree import loop
from megatron_tree.session import Session
from megatron_tree.stopping import StopRequested
from megatron_tree.train.group import TrainerFailed
from megatron_tree.types import Group, RunFailed


class Opening(Session):
    """Starts one thing that is to be stopped, and perhaps fails then."""

    def __init__(self, events: list[str], fails: bool) -> None:
        self.folder = SimpleNamespace(claim=lambda: events.append("claimed"))  # type: ignore[assignment]
        self.trains, self._opened = False, contextlib.AsyncExitStack()
        self.events, self.fails = events, fails

    async def _open(self) -> None:
        self._opened.callback(self.events.append, "stopped")
        if self.fails:
            raise RuntimeError("the second thing does not start")


def test_what_was_started_is_stopped_where_the_rest_does_not_start() -> None:
    events: list[str] = []

    async def story(fails: bool) -> None:
        async with Opening(events, fails):
            events.append("runs")

    with pytest.raises(RuntimeError, match="second thing"):
        asyncio.run(story(fails=True))
    assert events == ["claimed", "stopped"]
    events.clear()
    asyncio.run(story(fails=False))
    assert events == ["claimed", "runs", "stopped"]


@pytest.mark.parametrize(("restarts", "tries"), [(3, 3), (2, 2)])
def test_a_trainer_that_fails_while_it_recovers_is_restarted_again(restarts: int, tries: int) -> None:
    """The first two new groups fail too: three restarts are enough, two are not."""
    seen: list[TrainerFailed] = []

    async def recover(failure: TrainerFailed) -> None:
        if len(seen) == restarts:
            raise failure
        seen.append(failure)
        if len(seen) <= 2:
            raise TrainerFailed(f"group {len(seen)}")

    run: Callable[[], None] = lambda: asyncio.run(  # noqa: E731
        loop.recover(SimpleNamespace(recover=recover), TrainerFailed("the first"))  # type: ignore[arg-type]
    )
    if restarts == 3:
        run()
    else:
        with pytest.raises(TrainerFailed, match="group 2"):
            run()
    assert len(seen) == tries
    assert str(seen[0]) == "the first"


@pytest.mark.parametrize(
    ("failure", "events"),
    [
        (RunFailed("no engine is left"), ["grown", "saved"]),
        (StopRequested(), ["grown", "saved"]),
        (KeyError("of the user's tool"), ["grown", "saved"]),
        (TrainerFailed("score: rank 3 failed"), ["grown"]),
    ],
)
def test_what_is_trained_is_kept_when_the_rest_fails(failure: Exception, events: list[str]) -> None:
    """A failed trainer has nothing to save."""
    seen: list[str] = []

    async def grow() -> AsyncIterator[list[Group]]:
        seen.append("grown")
        yield []

    async def settle() -> None: ...

    async def score(_: list[Group]) -> None:
        raise failure

    async def save(*, wait: bool) -> None:
        assert wait
        seen.append("saved")

    timer = SimpleNamespace(timer=SimpleNamespace(seconds={}))
    run = SimpleNamespace(trains=True, progress=timer, grow=grow, settle=settle, score=score, save=save)
    with pytest.raises(type(failure)):
        asyncio.run(loop.iterate(run))  # type: ignore[arg-type]
    assert seen == events
