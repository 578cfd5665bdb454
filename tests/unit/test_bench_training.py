"""What `tools/bench_training.py` compares: the trees, their copied form, the FLOPs, the dense baseline."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_tree.algo.batch import PackingSpec, step_batch
from megatron_tree.config import AlgoConfig
from megatron_tree.train import backends
from megatron_tree.train.tree_mask import TreeMask
from megatron_tree.types import Group, MicroBatch
from tests.unit.shapes import small_shape
from tools.bench_training_ranks import dense_attention, matmul_flops
from tools.bench_trees import TreeShape, copied_batch, grow, trained_tokens

ALGO = AlgoConfig()
SPEC = PackingSpec(dp=1, micro_batch_tokens=4096, pad_to=1, hidden_size=384)


@pytest.fixture
def group() -> Group:
    group = grow(TreeShape(2, 6, 1), 100, np.random.default_rng(0), "p")
    for node in (node for tree in group.trees for node in tree.nodes):
        node.old_logprobs = node.ref_logprobs = node.engine_logprobs
    return group


def test_trees_have_the_lengths_of_the_facts(group: Group) -> None:
    """A path is 200 + 2 (120 + 300) + 60 = 1,100 tokens; a branch of turn 1 adds 480, of turn 2 adds 60."""
    assert [len(tree.leaves) for tree in group.trees] == [7, 7]
    assert sum(tree.num_copied_tokens for tree in group.trees) == 15_400
    assert [tree.num_unique_tokens for tree in group.trees] == [1100 + 3 * 480 + 3 * 60] * 2
    assert trained_tokens([group]) == 2 * (300 + 3 * 180 + 3 * 60)


def test_copied_step_holds_every_path_under_the_same_weights(group: Group) -> None:
    (copied,), (packed,) = copied_batch([group], ALGO, SPEC), step_batch([group], ALGO, SPEC)[0]
    assert sorted(batch.num_tokens for batch in copied) == [2200, 3300, 3300, 3300, 3300]
    assert sum(batch.num_trained for batch in copied) == 14 * 300
    for name in ("adv_pos", "adv_neg", "leaf_weight"):
        sums = [sum(float(getattr(b, name).sum()) for b in form) for form in (copied, packed)]
        assert sums[0] == pytest.approx(sums[1], rel=1e-5)
        assert abs(sums[0]) > 0.01


def test_flops_by_hand() -> None:
    """One chain of 3 tokens, 1 trained: a layer has 3 (2·8 + 2·4 + 3·8) = 144 weights and 1 + 2 + 3 visible
    keys of 4 heads of 2; forward and backward are three times 2 layers and a head of 3 by 10."""
    empty, one = np.zeros(3, dtype=np.int64), np.zeros(1, dtype=np.int64)
    batch = MicroBatch(empty, empty, np.full(3, 3), one, one, *[one.astype(np.float32)] * 6)
    expected = 3 * (2 * (2 * 144 * 3 + 2 * 2 * 4 * 2 * 6) + 2 * 3 * 10)
    assert matmul_flops(small_shape(), [batch]) == expected


def test_dense_baseline_is_the_same_attention(group: Group) -> None:
    (packed,) = step_batch([group], ALGO, SPEC)[0]
    mask = TreeMask.of(packed[0].subtree_end[:600].clip(max=600), "cpu")
    query, key, value = (torch.randn(600, heads, 16) for heads in (4, 2, 2))
    got, expected = (attend(query, key, value, mask) for attend in (dense_attention, backends.node))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
