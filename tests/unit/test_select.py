"""Candidates and draws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatron_tree.rollout.select import candidates, draw
from megatron_tree.types import Finish, Node, Tree


def tree(*nodes: tuple[int, Finish]) -> Tree:
    empty = np.empty(0, np.int32)
    return Tree("g", 0, [Node(p, empty, empty, np.empty(0, np.float32), f, 0) for p, f in nodes], [])


CHAIN = tree((-1, "prompt"), (0, "tool"), (1, "invalid"), (2, "answer"))
AT_ONCE = tree((-1, "prompt"), (0, "answer"))
BRANCHED = tree((-1, "prompt"), (0, "tool"), (1, "max_turns"), (1, "tool"), (3, "max_tokens"))


@pytest.mark.parametrize(
    ("grown", "root", "found"),
    [
        (CHAIN, "fallback", [1, 2]),
        (CHAIN, "always", [0, 1, 2]),
        (CHAIN, "never", [1, 2]),
        (AT_ONCE, "fallback", [0]),
        (AT_ONCE, "always", [0]),
        (AT_ONCE, "never", []),
        (BRANCHED, "fallback", [1, 3]),
    ],
)
def test_candidates(grown, root, found) -> None:
    assert candidates(grown, root) == found


def test_draws_are_without_replacement_while_candidates_last() -> None:
    for seed in range(50):
        generator = np.random.default_rng(seed)
        assert len(set(draw([1, 4, 6], 2, generator))) == 2
        assert sorted(draw([1, 4, 6], 3, generator)) == [1, 4, 6]
        assert sorted(Counter(draw([1, 4, 6], 8, generator)).values()) == [2, 3, 3]  # refilled twice
        assert draw([], 3, generator) == []


def test_draws_are_uniform_and_seeded() -> None:
    """6000 first draws among 3: 2000 each, standard deviation sqrt(6000 · 1/3 · 2/3) = 36.5; 4 of them is
    146."""
    generator = np.random.default_rng(0)
    counts = Counter(draw([2, 5, 9], 1, generator)[0] for _ in range(6000))
    assert set(counts) == {2, 5, 9}
    assert all(abs(count - 2000) < 146 for count in counts.values())
    assert draw([1, 2, 3, 4], 9, np.random.default_rng(3)) == draw([1, 2, 3, 4], 9, np.random.default_rng(3))
    assert all(type(i) is int for i in draw([1, 2], 2, generator))
