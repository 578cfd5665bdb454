"""Steps as micro-batches over ranks. The invariants are those of `algo.batch`, in its words."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree import metrics
from megatron_tree.algo.batch import PackingSpec, cost, partition, scoring_batch, sft_batch, split, step_batch
from megatron_tree.algo.packing import NodeWeights, Piece, cut, join
from megatron_tree.config import AlgoConfig
from megatron_tree.types import Group, MicroBatch
from tests.toy_trees import random_group, random_tree

SPECS = st.builds(
    PackingSpec,
    dp=st.integers(1, 4),
    micro_batch_tokens=st.integers(40, 200),
    pad_to=st.sampled_from([1, 3, 8]),
    hidden_size=st.just(8),
)


def groups_of(seed: int, count: int) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [random_group(rng, trees=2, depth=3, branches=3, group_id=f"p{i}") for i in range(count)]


def flat(batch: list[list[MicroBatch]]) -> list[MicroBatch]:
    return [micro_batch for rank in batch for micro_batch in rank]


@given(st.integers(0, 10**6), st.integers(1, 5), SPECS)
@settings(max_examples=60, deadline=None)
def test_invariants_of_a_step(seed: int, count: int, spec: PackingSpec) -> None:
    groups = groups_of(seed, count)
    batch, measured = step_batch(groups, AlgoConfig(), spec)
    # 1: the same number on every rank; where pieces run out, fillers
    assert len(batch) == spec.dp
    assert len({len(rank) for rank in batch}) == 1
    for micro_batch in flat(batch):
        # 2: at most micro_batch_tokens, padding apart
        assert micro_batch.num_tokens % spec.pad_to == 0
        assert micro_batch.num_tokens < spec.micro_batch_tokens + spec.pad_to
    # 3: the split changes no weight. The leaf weights sum to 1 over copies: sum_t k_t = sum_i c_i |H_i| = 1
    assert sum(float(mb.leaf_weight.sum()) for mb in flat(batch)) == pytest.approx(1.0, abs=1e-5)
    alone, _ = step_batch(groups, AlgoConfig(), PackingSpec(1, 10**6, 1, 8))
    for name in ("target_ids", "adv_pos", "adv_neg", "leaf_weight", "old_logprobs", "ref_logprobs"):
        here = np.concatenate([getattr(mb, name) for mb in flat(batch)])
        np.testing.assert_array_equal(np.sort(here), np.sort(getattr(alone[0][0], name)))
    trees = [tree for group in groups for tree in group.trees]
    got = metrics.values(measured)
    prompts = sum(group.trees[0].nodes[0].num_tokens for group in groups)  # each once, whatever M
    unique = prompts + sum(node.num_tokens for tree in trees for node in tree.nodes[1:])
    assert got["packing/unique_tokens"] == unique
    held = sum(mb.num_tokens for mb in flat(batch)) - got["packing/padding_tokens"]
    assert got["packing/recomputed_tokens"] == held - unique
    assert got["packing/trained_tokens"] == sum(len(node.action_ids) for tree in trees for node in tree.nodes)
    assert got["packing/fillers"] == sum(mb.num_trained == 0 for mb in flat(batch))


def test_weights_of_a_step_by_plain_sums() -> None:
    """The first turn of the first tree, by definition: R - mean below it by sign, over all copied tokens."""
    groups = groups_of(3, 2)
    algo = AlgoConfig(credit="mean", inter_weight=0, normaliser="token_mean")
    batch, _ = step_batch(groups, algo, PackingSpec(1, 10**6, 1, 8))
    root = groups[0].trees[0]
    paths = [(t, i) for g in groups for t in g.trees for leaf in t.leaves for i in t.path(leaf.node)]
    steps = sum(len(tree.nodes[i].action_ids) for tree, i in paths)
    rewards = np.array([leaf.reward for leaf in root.leaves])
    first = root.nodes[1]  # the first chain's first turn: its weight is the sum over the leaves below it
    below = [k for k, leaf in enumerate(root.leaves) if 1 in root.path(leaf.node)]
    shares = (rewards - rewards.mean())[below] / steps
    got, count = batch[0][0], len(first.action_ids)
    np.testing.assert_allclose(got.adv_pos[:count], shares[shares > 0].sum(), rtol=1e-6)
    np.testing.assert_allclose(got.adv_neg[:count], shares[shares < 0].sum(), rtol=1e-6)


def test_scoring_weighs_nothing_and_finds_every_action() -> None:
    trees = [tree for group in groups_of(1, 3) for tree in group.trees]
    batch, spans = scoring_batch(trees, PackingSpec(2, 60, 4, 8))
    assert all(
        not mb.leaf_weight.any() and not mb.adv_pos.any() and not mb.adv_neg.any() for mb in flat(batch)
    )
    for rank, rank_spans in zip(batch, spans, strict=True):
        for micro_batch, nodes in zip(rank, rank_spans, strict=True):
            assert sum(span.stop - span.start for span in nodes) == micro_batch.num_trained
            for span in nodes:
                np.testing.assert_array_equal(
                    micro_batch.target_ids[span.start : span.stop], span.node.action_ids
                )
    found = sorted(id(span.node) for rank in spans for nodes in rank for span in nodes)
    assert found == sorted(id(node) for tree in trees for node in tree.nodes if len(node.action_ids))


def test_sft_weighs_every_token_of_the_step_alike() -> None:
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, branches=0) for _ in range(5)]
    batch, _ = sft_batch(trees, PackingSpec(2, 100, 1, 8))
    tokens = sum(len(node.action_ids) for tree in trees for node in tree.nodes)
    weights = np.concatenate([mb.leaf_weight for mb in flat(batch)])
    np.testing.assert_allclose(weights, np.full(tokens, 1 / tokens), rtol=1e-6)
    np.testing.assert_array_equal(weights, np.concatenate([mb.adv_pos for mb in flat(batch)]))


def test_an_unscored_node_is_not_trained() -> None:
    groups = groups_of(0, 1)
    groups[0].trees[0].nodes[1].old_logprobs = None
    with pytest.raises(AssertionError, match="prompt p0: a node has no old log-probs"):
        step_batch(groups, AlgoConfig(), PackingSpec(1, 1000, 1, 8))


def test_split_deals_in_order() -> None:
    groups = groups_of(0, 5)
    assert [[g.row.group_id for g in part] for part in split(groups, 2)] == [["p0", "p1"], ["p2", "p3", "p4"]]
    with pytest.raises(ValueError, match=r"train.mini_batches: must not exceed the 5 prompts grown, got 6"):
        split(groups, 6)


def test_no_pieces_give_fillers_only() -> None:
    batch, _ = scoring_batch([], PackingSpec(3, 100, 4, 8))
    assert [[(mb.num_tokens, mb.num_trained) for mb in rank] for rank in batch] == [[(4, 0)]] * 3


def test_cost_by_hand() -> None:
    """A chain of 5 prompt tokens and 1..4 more: n tokens see n (n + 1) / 2 keys; 6 * 8 = 48 keys cost one
    token."""
    tree = random_tree(np.random.default_rng(0), depth=1, branches=0)
    (piece,) = cut(join([(tree, NodeWeights(*np.zeros((3, 2))))]), 100)
    n = tree.num_unique_tokens
    assert cost(piece, 8) == pytest.approx(n + n * (n + 1) / 2 / 48)


def test_thousands_of_trees_are_balanced() -> None:
    rng = np.random.default_rng(0)
    grown = [
        random_tree(rng, depth=4, branches=2, action_tokens=(5, 60), observation_tokens=(0, 60))
        for _ in range(200)
    ]
    pieces: list[Piece] = [
        p for tree in grown for p in cut(join([(tree, NodeWeights(*np.zeros((3, len(tree.nodes)))))]), 10**6)
    ]
    pieces *= 20  # 4,000
    spec = PackingSpec(8, 8192, 8, 256)
    assigned = partition(pieces, spec)
    loads = [sum(cost(p, 256) for pieces in rank for p in pieces) for rank in assigned]
    assert max(loads) / (sum(loads) / 8) < 1.01
    fewest = sum(p.num_tokens for p in pieces) / (8192 * 8)
    assert len(assigned[0]) <= 1.1 * fewest + 1
