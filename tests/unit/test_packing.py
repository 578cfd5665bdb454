"""The packed format, cuts and the way back. The invariants are those of the module, in its words."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree.algo.packing import (
    NodeWeights,
    Piece,
    cut,
    join,
    node_weights,
    pack,
    scatter,
    visible_keys,
)
from megatron_tree.types import Leaf, Node, Tree
from tests.toy_trees import chain_copies, random_tree

SEEDS = st.integers(0, 10**6)
ANY = settings(max_examples=60, deadline=None)


def node(parent: int, action: list[int], observation: list[int]) -> Node:
    return Node(
        parent,
        np.array(action, np.int32),
        np.array(observation, np.int32),
        -0.125 * np.array(action, np.float32),
        "tool",
        0,
    )


def weightless(tree: Tree) -> NodeWeights:
    return NodeWeights(*np.zeros((3, len(tree.nodes))))


def whole(tree: Tree) -> list[Piece]:
    return cut(join([(tree, weightless(tree))]), 10**9)


P, Q, A, B, C = 1, 2, 3, 4, 5
EXAMPLE = Tree(
    "g",
    0,
    [node(-1, [], [P, Q]), node(0, [A, B], []), node(0, [C], [])],
    [Leaf(1, 1, 1, None), Leaf(2, 0, 0, None)],
)


def test_the_worked_example_of_micro_batch() -> None:
    """Every number stands in MicroBatch's docstring; weights by hand: leaf a b has c A = .5 * 2, leaf c .25 *
    -2."""
    weights = node_weights(EXAMPLE, np.array([2.0, -2.0]), np.array([0.5, 0.25]))
    packed = pack(cut(join([(EXAMPLE, weights)]), 5), pad_to=4, pad_id=9)
    got = packed.micro_batch
    assert got.input_ids.tolist() == [P, Q, A, B, C, 9, 9, 9]
    assert got.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 0, 0]
    assert got.subtree_end.tolist() == [5, 5, 4, 4, 5, 6, 7, 8]
    assert got.predict_from.tolist() == [1, 2, 1]
    assert got.target_ids.tolist() == [A, B, C]
    assert got.adv_pos.tolist() == [1.0, 1.0, 0.0]
    assert got.adv_neg.tolist() == [0.0, 0.0, -0.5]
    assert got.leaf_weight.tolist() == [0.5, 0.5, 0.25]
    assert got.engine_logprobs.tolist() == [-0.375, -0.5, -0.625]
    assert got.old_logprobs.tolist() == got.ref_logprobs.tolist() == [0.0, 0.0, 0.0]
    assert [(span.start, span.stop) for span in packed.spans] == [(0, 2), (2, 3)]
    assert visible_keys(whole(EXAMPLE)[0]) == 1 + 2 + 3 + 4 + 3


def test_node_weights_sum_over_the_leaves_below_by_sign() -> None:
    """prompt -> 1 -> {2, 3}, 4 from the prompt; c A = .5 * 1, .5 * -3, .25 * 2."""
    nodes = [node(-1, [], [P]), node(0, [A], []), node(1, [A], []), node(1, [B], []), node(0, [C], [])]
    tree = Tree("g", 0, nodes, [Leaf(i, 0, 0, None) for i in (2, 3, 4)])
    got = node_weights(tree, np.array([1.0, -3.0, 2.0]), np.array([0.5, 0.5, 0.25]))
    assert got.adv_pos.tolist() == [1.0, 0.5, 0.5, 0.0, 0.5]
    assert got.adv_neg.tolist() == [-1.5, -1.5, 0.0, -1.5, 0.0]
    assert got.leaf.tolist() == [1.25, 1.0, 0.5, 0.5, 0.25]


def test_the_trees_of_a_prompt_share_it() -> None:
    """The worked example twice: p q once, then a b and c of both trees; every first action comes from q."""
    first = node_weights(EXAMPLE, np.array([2.0, -2.0]), np.array([0.5, 0.25]))
    second = node_weights(EXAMPLE, np.array([-4.0, 4.0]), np.array([0.5, 0.25]))
    tree = join([(EXAMPLE, first), (EXAMPLE, second)])
    assert tree.parents == [-1, 0, 0, 0, 0]
    assert (tree.weights.adv_pos[0], tree.weights.adv_neg[0], tree.weights.leaf[0]) == (2.0, -2.5, 1.5)
    (piece,) = cut(tree, 8)
    got = pack([piece], pad_to=1).micro_batch
    assert got.input_ids.tolist() == [P, Q, A, B, C, A, B, C]
    assert got.position_ids.tolist() == [0, 1, 2, 3, 2, 2, 3, 2]
    assert got.subtree_end.tolist() == [8, 8, 4, 4, 5, 7, 7, 8]
    assert got.predict_from.tolist() == [1, 2, 1, 1, 5, 1]
    assert got.adv_pos.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert got.adv_neg.tolist() == [0.0, 0.0, -0.5, -2.0, -2.0, 0.0]


def test_a_filler_trains_nothing_and_sees_nothing() -> None:
    got = pack([], pad_to=3).micro_batch
    assert (got.num_tokens, got.num_trained) == (3, 0)
    assert got.subtree_end.tolist() == [1, 2, 3]
    assert got.adv_pos.dtype == np.float32
    assert got.predict_from.dtype == np.int64


def test_a_branch_below_a_node_without_tokens_is_predicted_from_the_last_token_before_it() -> None:
    nodes = [node(-1, [], [P, Q]), node(0, [], []), node(1, [A], [])]
    got = pack(whole(Tree("g", 0, nodes, [Leaf(2, 0, 0, None)])), 1).micro_batch
    assert got.predict_from.tolist() == [1]
    assert got.subtree_end.tolist() == [3, 3, 3]


@given(SEEDS)
@ANY
def test_every_token_sees_its_path_and_nothing_else(seed: int) -> None:
    """Second source: the copied chains, written out plainly. Two trees in one micro-batch, padding after
    them."""
    rng = np.random.default_rng(seed)
    trees = [
        random_tree(rng, depth=4, branches=4, observation_tokens=(0, 2), action_tokens=(0, 3))
        for _ in range(2)
    ]
    got = pack([piece for tree in trees for piece in whole(tree)], 8).micro_batch
    i = np.arange(got.num_tokens)
    visible = (i[None, :] <= i[:, None]) & (i[:, None] < got.subtree_end[None, :])
    seen, depths = [], []
    for token in i:
        path = np.flatnonzero(visible[token])
        seen.append(tuple(got.input_ids[path].tolist()))
        depths.append(got.position_ids[path].tolist())
    real = sum(tree.num_unique_tokens for tree in trees)
    assert all(depth == list(range(len(depth))) for depth in depths)
    assert all(len(path) == 1 for path in seen[real:])
    contexts = {
        seen[where] + (target,)
        for where, target in zip(got.predict_from, got.target_ids.tolist(), strict=True)
    }
    want_seen, want_contexts = set(), set()
    for chain in (chain for tree in trees for chain in chain_copies(tree)):
        tokens: list[int] = []
        for part in chain.nodes:
            for k, token in enumerate([*part.action_ids.tolist(), *part.observation_ids.tolist()]):
                tokens.append(token)
                want_seen.add(tuple(tokens))
                if k < len(part.action_ids):
                    want_contexts.add(tuple(tokens))
    assert set(seen[:real]) == want_seen
    assert contexts == want_contexts
    assert got.num_trained == sum(len(n.action_ids) for tree in trees for n in tree.nodes)


@given(SEEDS, st.integers(0, 25))
@ANY
def test_cuts_keep_the_invariants(seed: int, slack: int) -> None:
    """1: closed under parents. 2: each node is trained exactly once. 4: at most `budget` tokens."""
    tree = random_tree(np.random.default_rng(seed), depth=4, branches=5)
    budget = max(sum(tree.nodes[i].num_tokens for i in tree.path(leaf.node)) for leaf in tree.leaves) + slack
    pieces = cut(join([(tree, weightless(tree))]), budget)
    for piece in pieces:
        assert all(tree.nodes[i].parent in (-1, *piece.nodes[:k]) for k, i in enumerate(piece.nodes))
        assert piece.num_tokens <= budget
        assert piece.trained <= set(piece.nodes)
    assert sorted(i for piece in pieces for i in piece.trained) == list(range(len(tree.nodes)))


@given(SEEDS, st.integers(0, 15))
@ANY
def test_the_chosen_cut_recomputes_least(seed: int, slack: int) -> None:
    """Second source: every way to cut the depth-first leaves, tried."""
    tree = random_tree(np.random.default_rng(seed), depth=3, branches=4)
    paths = sorted(tree.path(leaf.node) for leaf in tree.leaves)
    size = lambda some: sum(tree.nodes[i].num_tokens for i in set().union(*some))  # noqa: E731
    budget = max(size([path]) for path in paths) + slack
    totals = []
    for chosen in itertools.product([False, True], repeat=len(paths) - 1):
        bounds = [0, *(i + 1 for i, here in enumerate(chosen) if here), len(paths)]
        sizes = [size(paths[a:b]) for a, b in itertools.pairwise(bounds)]
        if max(sizes) <= budget:
            totals.append(sum(sizes))
    assert sum(piece.num_tokens for piece in cut(join([(tree, weightless(tree))]), budget)) == min(totals)


def test_a_path_over_the_budget_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"train.micro_batch_tokens: must hold the longest root-to-leaf path, 4 tokens of prompt g, "
        r"got 3",
    ):
        cut(join([(EXAMPLE, weightless(EXAMPLE))]), 3)


def test_a_cut_tree_by_hand() -> None:
    """Budget 4 holds p q a b or p q c: two pieces, the second recomputes p q and trains c alone."""
    first, second = cut(join([(EXAMPLE, weightless(EXAMPLE))]), 4)
    assert (first.nodes, first.trained) == ((0, 1), {0, 1})
    assert (second.nodes, second.trained) == ((0, 2), {2})
    got = pack([second], 1).micro_batch
    assert (got.input_ids.tolist(), got.target_ids.tolist(), got.predict_from.tolist()) == (
        [P, Q, C],
        [C],
        [1],
    )


@given(SEEDS)
@ANY
def test_scattered_logprobs_come_back_in_the_next_packing(seed: int) -> None:
    """Scored in one packing (cut small), packed in another: each token keeps its own number, here its
    engine's."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, depth=4, branches=4)
    longest = max(sum(tree.nodes[i].num_tokens for i in tree.path(leaf.node)) for leaf in tree.leaves)
    packed = [pack([piece], 4) for piece in reversed(cut(join([(tree, weightless(tree))]), longest))]
    scored = [item.micro_batch.engine_logprobs for item in packed]
    scatter([[item.spans for item in packed]], [scored], "old_logprobs")
    scatter([[item.spans for item in packed]], [[2 * part for part in scored]], "ref_logprobs")
    again = pack(whole(tree), 1).micro_batch
    np.testing.assert_array_equal(again.old_logprobs, again.engine_logprobs)
    np.testing.assert_array_equal(again.ref_logprobs, 2 * again.engine_logprobs)
