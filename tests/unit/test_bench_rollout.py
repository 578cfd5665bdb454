"""The counters of `tools/bench_rollout.py`, on a tree counted by hand, and its latencies."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_tree.types import Group, Leaf, Node, Tree
from tests.unit.rollout_fakes import row
from tools.bench_rollout import Tools, hit_rate_by_depth, next_turn, prefill, steps_of


def test_what_a_lockstep_driver_asks_at_once() -> None:
    """A chain of three turns; a branch from its second node, one from its first: their first turns travel
    together, whatever their depth."""
    chain = [f"0/0/train/7/1/0/0/{turn}" for turn in range(3)]
    branches = ["0/0/train/7/1/1/0/2", "0/0/train/7/1/1/1/1", "0/0/train/7/1/1/1/2"]
    assert steps_of([*chain, *branches]) == {
        (0, 0): chain[:1],
        (0, 1): chain[1:2],
        (0, 2): chain[2:],
        (1, 0): branches[:2],
        (1, 1): branches[2:],
    }
    assert next_turn(branches[1]) == branches[2]


def test_prefill_and_hits_by_depth() -> None:
    """Prompt 3; turn 1 observes 4; two answers follow it, which find 4 and 6 of their 9 tokens."""

    def node(parent: int, action: int, observed: int, prefill: int, cached: int) -> Node:
        ids = np.zeros(action, np.int32), np.zeros(observed, np.int32)
        counts = {"prefill_tokens": prefill, "cached_tokens": cached}
        return Node(parent, *ids, np.zeros(action, np.float32), "tool", 0, **counts)

    nodes = [node(-1, 0, 3, 0, 0), node(0, 2, 4, 3, 0), node(1, 5, 0, 9, 4), node(1, 1, 0, 9, 6)]
    group = Group(row(), [Tree("g", 0, nodes, [Leaf(2, 0.0, 0.0, None), Leaf(3, 0.0, 0.0, None)])])
    assert prefill([group]) == (3 + 5 + 3, 3 + 4)
    assert hit_rate_by_depth([group]) == [0.0, round(10 / 18, 4)]


def test_latencies_follow_the_law_that_is_stated() -> None:
    """Pareto of shape 1.5 and scale 0.15: the median is 0.15 * 2 ** (1 / 1.5), the 99th percentile 3.23."""
    factors = [Tools.draws("latency", f"w{i}").paretovariate(1.5) for i in range(20000)]
    quantiles = np.quantile(np.minimum(0.15 * np.array(factors), 10.0), [0.5, 0.99])
    assert quantiles == pytest.approx([0.238, 3.23], rel=0.05)
