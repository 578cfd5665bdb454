"""Advantages and the normaliser against numbers computed by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree import metrics
from megatron_tree.algo import advantage
from megatron_tree.config import AlgoConfig
from megatron_tree.types import Group, Leaf, Node, Row, Tree
from tests.toy_trees import random_group


def tree_of(parents: list[int], rewards: dict[int, float], actions: list[int] | None = None) -> Tree:
    """Node i+1 hangs under parents[i] and acts `actions[i]` tokens (default 1); `rewards` names the
    leaves."""
    counts = [0, *(actions or [1] * len(parents))]
    nodes = [
        Node(
            parent, np.zeros(n, np.int32), np.zeros(int(i == 0), np.int32), np.zeros(n, np.float32), "tool", 0
        )
        for i, (parent, n) in enumerate(zip([-1, *parents], counts, strict=True))
    ]
    return Tree("g", 0, nodes, [Leaf(node, reward, 0.0, None) for node, reward in rewards.items()])


def group_of(*trees: Tree) -> Group:
    return Group(Row("g", "toy", (), np.zeros(1, np.int32), ()), list(trees))


# Two trees: prompt -> 1 -> {2: 1, 3: 0} with 4: 0.5 from the prompt; and a lone chain with reward 1.
TREES = (tree_of([0, 1, 1, 0], {2: 1.0, 3: 0.0, 4: 0.5}), tree_of([0], {1: 1.0}))

# By hand. All four rewards: 1, 0, .5, 1: mean .625, squared deviations .140625 .390625 .015625 .140625 =
# .6875, unbiased std sqrt(.6875/3). The first tree: mean .5, squares .25 + .25 + 0, unbiased std sqrt(.25) =
# .5.
STD = math.sqrt(0.6875 / 3) + 1e-6
TABLE = {
    "zscore": (
        [[0.375 / STD, -0.625 / STD, -0.125 / STD], [0.375 / STD]],
        [[0.5 / 0.500001, -0.5 / 0.500001, 0.0], [0.0]],
    ),
    "mean": ([[0.375, -0.625, -0.125], [0.375]], [[0.5, -0.5, 0.0], [0.0]]),
    # 1 - mean(0, .5, 1) = .5; 0 - mean(1, .5, 1) = -5/6; .5 - mean(1, 0, 1) = -1/6
    # inside the tree 1 - .25, 0 - .75, .5 - .5
    "leave_one_out": ([[0.5, -5 / 6, -1 / 6], [0.5]], [[0.75, -0.75, 0.0], [0.0]]),
    # leaves 2 and 3 branch at node 1: 1 - 0, 0 - 1; leaf 4 at the prompt: .5 - mean(1, 0)
    "sibling": ([[0.5, -5 / 6, -1 / 6], [0.5]], [[1.0, -1.0, 0.0], [0.0]]),
}


@pytest.mark.parametrize("credit", TABLE)
def test_credit_rules(credit: str) -> None:
    inter, intra = TABLE[credit]
    got = advantage.advantages(
        group_of(*TREES), AlgoConfig(credit=credit, inter_weight=2.0, intra_weight=0.5)
    )
    for tree in range(2):
        np.testing.assert_allclose(got.inter[tree], inter[tree], atol=1e-12)
        np.testing.assert_allclose(got.intra[tree], intra[tree], atol=1e-12)
        want = 2.0 * np.array(inter[tree]) + 0.5 * np.array(intra[tree])
        np.testing.assert_allclose(got.total[tree], want, atol=1e-12)


@pytest.mark.parametrize("rule", [advantage.zscore, advantage.centred, advantage.leave_one_out])
@pytest.mark.parametrize("rewards", [[0.3], [0.1, 0.1, 0.1]], ids=["lone leaf", "equal rewards"])
def test_nothing_to_compare_with_gives_zero(rule, rewards: list[float]) -> None:
    """Three times 0.1 has a floating-point mean other than 0.1: exact zeros all the same."""
    assert rule(np.array(rewards)).tolist() == [0.0] * len(rewards)


@given(st.integers(0, 10**6), st.sampled_from(["zscore", "mean", "leave_one_out"]))
@settings(max_examples=50, deadline=None)
def test_the_parts_sum_to_zero_over_their_sets(seed: int, credit: str) -> None:
    group = random_group(np.random.default_rng(seed), trees=3, branches=2)
    got = advantage.advantages(group, AlgoConfig(credit=credit))
    assert abs(np.concatenate(got.inter).sum()) < 1e-9
    assert all(abs(tree.sum()) < 1e-9 for tree in got.intra)


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(
        ValueError, match="reward: must be a finite number, got nan for leaf 1 of tree 0 of prompt g"
    ):
        advantage.advantages(group_of(tree_of([0], {1: math.nan})), AlgoConfig())


def test_metrics_count_what_teaches_nothing() -> None:
    """Second prompt: a tree of equal rewards and a lone leaf, all 1: no advantage anywhere in it.

    Credit `mean`: inter of the first prompt .375 .625 .125 .375, of the second 4 x 0; intra .5 .5 0 | 0 | 0 0
    | 0.
    """
    flat = group_of(tree_of([0, 0], {1: 1.0, 2: 1.0}), tree_of([0], {1: 1.0}))
    config = AlgoConfig(credit="mean")
    parts = [advantage.advantages(group, config) for group in (group_of(*TREES), flat)]
    got = metrics.values(advantage.metrics(parts))
    assert got == pytest.approx(
        {
            "advantage/inter_abs": 1.5 / 7,
            "advantage/intra_abs": 1.0 / 7,
            "advantage/total_abs": (0.875 + 1.125 + 0.125 + 0.375) / 7,
            "advantage/inter_zero_share": 1 / 2,
            "advantage/intra_zero_share": 3 / 4,
            "advantage/total_zero_share": 3 / 7,
        }
    )


def test_leaf_weights_by_hand() -> None:
    """Prompt x: leaves with 2+3 and 2+1 trained tokens and one with 4; prompt y: one leaf with 6, one without
    any.

    P = 2, G_x = 3, G_y = 2: 1/(2*3*5), 1/(2*3*3), 1/(2*3*4); 1/(2*2*6), 0. All tokens: 5 + 3 + 4 + 6 = 18.
    """
    x = [tree_of([0, 1, 1], {2: 0, 3: 0}, [2, 3, 1]), tree_of([0], {1: 0}, [4])]
    y = [tree_of([0, 0], {1: 0, 2: 0}, [6, 0])]
    by_sequence = advantage.leaf_weights([x, y], "sequence_mean")
    np.testing.assert_allclose(by_sequence[0][0], [1 / 30, 1 / 18])
    np.testing.assert_allclose(by_sequence[0][1], [1 / 24])
    np.testing.assert_allclose(by_sequence[1][0], [1 / 24, 0])
    by_token = advantage.leaf_weights([x, y], "token_mean")
    assert [tree.tolist() for trees in by_token for tree in trees] == [[1 / 18] * 2, [1 / 18], [1 / 18, 0.0]]


def test_no_trained_token_at_all_weighs_nothing() -> None:
    empty = [[tree_of([0], {1: 0}, [0])]]
    assert advantage.leaf_weights(empty, "token_mean")[0][0].tolist() == [0.0]
    assert advantage.leaf_weights(empty, "sequence_mean")[0][0].tolist() == [0.0]
