"""The trees of one iteration after the other, as groups that end.

The groups of an iteration come out as they end, `chunk_tokens` or more at a time: the trainer scores the
first while others still grow. With `depth` 1 the next iteration's trees begin to grow as soon as this one's
have ended, while the trainer scores and learns.

Invariants (tests/unit/test_iterations.py, under the same words)
1. One iteration's trees grow at a time, at most `depth` iterations ahead of the one that trains.
2. After `idle` nothing grows: who publishes only then gets trees of one version, at most `depth` old.
3. Prompts of an iteration that was not trained are taken again: `order_state` is what to save, `drop` goes
   back.
4. With `in_order`, which groups share a chunk does not depend on which of them ended first.

Not here: how trees grow (`grow`), when versions are published (`session`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from megatron_tree.types import Group, Row

Grow = Callable[[Sequence[Row], int, Callable[[Group], None]], Coroutine[Any, Any, list[Group]]]
"""Rows, the iteration they are for, whom to call as each group ends -> the groups in the rows' order."""


class Order(Protocol):
    """`data.prompts.PromptOrder`."""

    def take(self, num: int) -> list[Row]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Iterations:
    """Iterations count from 0 and are asked for in turn; there are `total` of them."""

    def __init__(
        self,
        grow: Grow,
        order: Order,
        *,
        prompts: int,
        total: int,
        depth: int,
        chunk_tokens: int,
        in_order: bool,
    ) -> None:
        self._grow, self._order = grow, order
        self._prompts, self._total, self._depth = prompts, total, depth
        self._chunk_tokens, self._in_order = chunk_tokens, in_order
        self._growths: dict[int, _Growth] = {}  # this iteration's and the one ahead

    async def groups(self, iteration: int) -> AsyncIterator[list[Group]]:
        """Chunks of the iteration's groups. Raises what their growth raised."""
        self._growths = {i: growth for i, growth in self._growths.items() if i >= iteration}
        growth = self._begin(iteration)
        growth.task.add_done_callback(partial(self._go_on, iteration))
        chunk: list[Group] = []
        async for group in growth.groups(self._in_order):
            chunk.append(group)
            full = sum(_num_tokens(group) for group in chunk) >= self._chunk_tokens
            if full and (self._in_order or growth.ended.empty()):
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def grown(self, iteration: int) -> list[Group]:
        """All of them in the order of their prompts, once `groups` has yielded them."""
        return self._growths[iteration].task.result()

    async def idle(self) -> None:
        """Waits until nothing grows, whether it succeeds or not."""
        growing = [growth.task for growth in self._growths.values() if not growth.task.done()]
        if growing:
            await asyncio.wait(growing)

    async def drop(self, iteration: int) -> None:
        """Ends the growth of `iteration` and of what is ahead of it; their prompts are taken again."""
        dropped = [self._growths.pop(i) for i in sorted(self._growths) if i >= iteration]
        if dropped:
            self._order.load_state_dict(dropped[0].before)
        for growth in dropped:
            growth.task.cancel()
        await asyncio.gather(*(growth.task for growth in dropped), return_exceptions=True)

    def order_state(self, iteration: int) -> dict[str, Any]:
        """The order of prompts before those of `iteration` are taken."""
        if iteration in self._growths:
            return self._growths[iteration].before
        return self._order.state_dict()

    def _begin(self, iteration: int) -> _Growth:
        if iteration not in self._growths:
            before = self._order.state_dict()
            rows = self._order.take(self._prompts)
            self._growths[iteration] = _Growth(before, rows, partial(self._grow, rows, iteration))
        return self._growths[iteration]

    def _go_on(self, iteration: int, ended: asyncio.Task[list[Group]]) -> None:
        grown = not ended.cancelled() and ended.exception() is None
        dropped = iteration not in self._growths or self._growths[iteration].task is not ended
        if grown and not dropped and self._depth and iteration + 1 < self._total:
            self._begin(iteration + 1)


class _Growth:
    """The trees of one iteration. They grow whether or not anybody waits for them."""

    def __init__(
        self,
        before: dict[str, Any],
        rows: Sequence[Row],
        grow: Callable[[Callable[[Group], None]], Coroutine[Any, Any, list[Group]]],
    ) -> None:
        self.before, self._rows = before, rows
        self.ended: asyncio.Queue[Group | None] = asyncio.Queue()  # None: there are no more
        self.task = asyncio.ensure_future(grow(self.ended.put_nowait))
        self.task.add_done_callback(lambda _: self.ended.put_nowait(None))

    async def groups(self, in_order: bool) -> AsyncIterator[Group]:
        """As they end, or in the order of the rows."""
        early: dict[str, Group] = {}
        waited_for = deque(row.group_id for row in self._rows)
        while (group := await self.ended.get()) is not None:
            if not in_order:
                yield group
                continue
            early[group.row.group_id] = group
            while waited_for and waited_for[0] in early:
                yield early.pop(waited_for.popleft())
        self.task.result()  # raises what went wrong


def _num_tokens(group: Group) -> int:
    return sum(tree.num_unique_tokens for tree in group.trees)
