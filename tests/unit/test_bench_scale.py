"""The synthetic trees and the counters of `tools/bench_scale.py`."""

from __future__ import annotations

import numpy as np

from megatron_tree.algo.batch import PackingSpec
from tools.bench_scale import one_size, synthetic_group


def test_synthetic_trees_have_the_shape_that_is_stated() -> None:
    """16 leaves; every path 8 turns of 300 +- 150 action and 700 +- 350 observation tokens behind 400."""
    group = synthetic_group(0, np.random.default_rng(0))
    assert [len(tree.leaves) for tree in group.trees] == [4] * 4
    for tree in group.trees:
        for leaf in tree.leaves:
            path = [tree.nodes[i] for i in tree.path(leaf.node)]
            assert len(path) == 1 + 8
            assert all(150 <= len(node.action_ids) <= 450 for node in path[1:])
            assert all(350 <= len(node.observation_ids) <= 1050 for node in path[1:-1])
            assert len(path[-1].observation_ids) == 0


def test_counters() -> None:
    """A prompt of 400 tokens is held once for its 4 trees. Bytes by hand: 3 int64 arrays a token, 2 int64 and
    6 float32 a trained one; the batch travels twice."""
    spec = PackingSpec(2, 100_000, pad_to=1, hidden_size=64)  # nothing is cut, hence nothing recomputed
    found = one_size(2, spec)
    rng = np.random.default_rng(0)
    trees = [tree for index in range(2) for tree in synthetic_group(index, rng).trees]
    tokens = 2 * 400 + sum(node.num_tokens for tree in trees for node in tree.nodes[1:])
    trained = sum(len(node.action_ids) for tree in trees for node in tree.nodes)
    assert (found["leaves"], found["unique_tokens"]) == (32, tokens)
    apart = one_size(2, spec, copies=True)  # nothing is shared: as many unique tokens as copied ones
    assert apart["unique_tokens"] == apart["copied_tokens"] == found["copied_tokens"] > 2 * tokens
    assert found["shared_bytes"] == 2 * (tokens * 3 * 8 + trained * (2 * 8 + 6 * 4))
