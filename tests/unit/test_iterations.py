"""The invariants of `rollout.iterations`, under the words of its head, with growth that the test drives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megatron_tree.data.prompts import PromptOrder
from megatron_tree.rollout.iterations import Iterations
from megatron_tree.types import Group, Node, Row, Tree
from tests.unit.rollout_fakes import row

ROWS = [row(name) for name in "abcdef"]


@dataclass
class Garden:
    """Groups of `size` tokens end when the test says so; an iteration ends with its last group."""

    size: int = 10
    begun: list[tuple[int, str]] = field(default_factory=list)  # (iteration, its prompts)
    at_once: int = 0
    most_at_once: int = 0
    failure: Exception | None = None
    _ends: dict[str, asyncio.Event] = field(default_factory=dict)

    async def grow(
        self, rows: Sequence[Row], iteration: int, on_group: Callable[[Group], None]
    ) -> list[Group]:
        names = [row.group_id.partition("@")[0] for row in rows]
        self.begun.append((iteration, "".join(names)))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await asyncio.gather(*(self._group(row, on_group) for row in rows))
        finally:
            self.at_once -= 1

    async def _group(self, row: Row, on_group: Callable[[Group], None]) -> Group:
        await self._end(row.group_id.partition("@")[0]).wait()
        if self.failure is not None:
            raise self.failure
        ids = np.zeros(self.size, np.int32)
        prompt = Node(-1, ids[:0], ids, np.zeros(0, np.float32), "prompt", 0)
        group = Group(row, [Tree(row.group_id, 0, [prompt], [])])
        on_group(group)
        return group

    def _end(self, name: str) -> asyncio.Event:
        return self._ends.setdefault(name, asyncio.Event())

    async def end(self, *names: str) -> None:
        """One after the other, with time for everything that follows from it."""
        for name in names:
            self._end(name).set()
            await settle()


def iterations(garden: Garden, **changed: Any) -> tuple[Iterations, PromptOrder]:
    order = PromptOrder(ROWS, seed=0, shuffle=False)
    options = {"prompts": 2, "total": 3, "depth": 0, "chunk_tokens": 1, "in_order": False} | changed
    return Iterations(garden.grow, order, **options), order


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def names(groups: Sequence[Group]) -> str:
    return "".join(group.row.group_id[0] for group in groups)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 5))


@pytest.mark.parametrize(
    ("in_order", "chunk_tokens", "chunks"),
    [
        (False, 1, ["b", "d", "ac"]),  # what has ended when it is asked for travels together
        (False, 20, ["bd", "ac"]),
        (False, 1000, ["bdac"]),
        (True, 1, ["a", "b", "c", "d"]),
        (True, 20, ["ab", "cd"]),
        (True, 30, ["abc", "d"]),
    ],
)
def test_groups_come_out_as_they_end(in_order: bool, chunk_tokens: int, chunks: list[str]) -> None:
    """b, d, a and c end in this order, a and c while d is being scored."""

    async def story() -> None:
        garden = Garden()
        trees, _ = iterations(garden, prompts=4, in_order=in_order, chunk_tokens=chunk_tokens)
        found: list[str] = []

        async def score() -> None:
            async for chunk in trees.groups(0):
                found.append(names(chunk))
                if "d" in found[-1]:
                    await rest.wait()

        rest = asyncio.Event()
        scoring = asyncio.create_task(score())
        await garden.end("b", "d", "a", "c")
        rest.set()
        await scoring
        assert found == chunks
        assert names(trees.grown(0)) == "abcd"

    run(story())


def test_which_groups_share_a_chunk_does_not_depend_on_which_ended_first() -> None:
    async def story(ending: str) -> list[str]:
        garden = Garden()
        trees, _ = iterations(garden, prompts=6, in_order=True, chunk_tokens=25)
        ended = asyncio.create_task(garden.end(*ending))
        found = [names(chunk) async for chunk in trees.groups(0)]
        await ended
        return found

    assert [asyncio.run(story(ending)) for ending in ("abcdef", "fedcba", "cafebd")] == [["abc", "def"]] * 3


@pytest.mark.parametrize("depth", [0, 1])
def test_one_iterations_trees_grow_at_a_time(depth: int) -> None:
    """At most `depth` ahead of the one that trains; the last iteration has none ahead of it."""

    async def story() -> None:
        garden = Garden()
        trees, _ = iterations(garden, depth=depth)
        await garden.end(*"abcdef")
        for iteration in range(3):
            [chunk] = [chunk async for chunk in trees.groups(iteration)]
            assert names(chunk) == "abcdef"[2 * iteration : 2 * iteration + 2]
            await settle()  # the trainer learns
            assert len(garden.begun) == min(iteration + 1 + depth, 3)
        assert garden.begun == [(0, "ab"), (1, "cd"), (2, "ef")]
        assert garden.most_at_once == 1

    run(story())


def test_after_idle_nothing_grows() -> None:
    """While iteration 0 trains, 1 grows; once it has ended nothing begins before 1 is asked for."""

    async def story() -> None:
        garden = Garden()
        trees, _ = iterations(garden, depth=1)
        await garden.end("a", "b")
        assert [names(chunk) async for chunk in trees.groups(0)] == ["ab"]
        await settle()
        idle = asyncio.create_task(trees.idle())
        await garden.end("c")
        assert not idle.done()
        assert garden.at_once == 1
        await garden.end("d")
        assert idle.done()
        assert (garden.at_once, garden.begun) == (0, [(0, "ab"), (1, "cd")])

    run(story())


def test_prompts_of_an_iteration_that_was_not_trained_are_taken_again() -> None:
    """`order_state` says what to save: a run that goes on from there trains every prompt once."""

    async def story() -> None:
        garden = Garden()
        trees, order = iterations(garden, depth=1)
        await garden.end("a", "b")
        async for _ in trees.groups(0):
            assert trees.order_state(0)["position"] == 0
        await settle()
        assert order.state_dict()["position"] == 4  # c and d are on the way
        saved = trees.order_state(1)
        assert saved["position"] == 2
        await trees.drop(1)
        assert (garden.at_once, order.state_dict()["position"]) == (0, 2)
        await garden.end("c", "d")
        assert [names(chunk) async for chunk in trees.groups(1)] == ["cd"]

        later = Garden()
        resumed, order = iterations(later, depth=1)
        order.load_state_dict(saved)
        await later.end("c", "d")
        assert [names(chunk) async for chunk in resumed.groups(1)] == ["cd"]
        await trees.drop(0)
        await resumed.drop(0)
        assert (garden.at_once, later.at_once) == (0, 0)

    run(story())


def test_a_growth_that_fails_ahead_is_raised_when_it_is_asked_for() -> None:
    async def story() -> None:
        garden = Garden()
        trees, order = iterations(garden, depth=1)
        await garden.end("a", "b")
        async for _ in trees.groups(0):
            pass
        await settle()
        garden.failure = ValueError("no server")
        await garden.end("c")
        await trees.idle()
        assert len(garden.begun) == 2
        with pytest.raises(ValueError, match=r"^no server$"):
            [chunk async for chunk in trees.groups(1)]
        await trees.drop(1)
        assert order.state_dict()["position"] == 2

    run(story())
