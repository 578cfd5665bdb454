"""Shares of context-parallel ranks: the invariants of `algo.context`, and its worked example by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tree.algo import context
from megatron_tree.algo.batch import PackingSpec, scoring_batch, step_batch
from megatron_tree.config import AlgoConfig
from megatron_tree.layout import ParallelLayout
from tests.toy_trees import random_group


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 4]), st.sampled_from([1, 2]))
def test_every_token_and_every_trained_token_is_in_exactly_one_share(seed: int, cp: int, dp: int) -> None:
    layout, rng = ParallelLayout(cp=cp, dp=dp), np.random.default_rng(seed)
    groups = [random_group(rng, depth=3, group_id=f"g{i}") for i in range(2)]
    batch, _ = step_batch(groups, AlgoConfig(), PackingSpec(dp, 60, 2 * cp, 8))
    for whole, shares in zip(batch, context.split(batch, layout), strict=True):
        for index, micro_batch in enumerate(whole):
            parts = [share[index] for share in shares]
            assert {part.num_tokens for part in parts} == {micro_batch.num_tokens // cp}
            for part in parts:
                np.testing.assert_array_equal(part.subtree_end, micro_batch.subtree_end)
            # a trained token is known by what it is predicted from, where, and to what
            expected = zip(
                micro_batch.input_ids[micro_batch.predict_from],
                micro_batch.position_ids[micro_batch.predict_from],
                micro_batch.target_ids,
                micro_batch.old_logprobs,
                strict=True,
            )
            got = [
                known
                for part in parts
                for known in zip(
                    part.input_ids[part.predict_from],
                    part.position_ids[part.predict_from],
                    part.target_ids,
                    part.old_logprobs,
                    strict=True,
                )
            ]
            assert sorted(got) == sorted(expected)


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4]))
def test_scores_join_in_the_order_of_the_whole(seed: int, cp: int) -> None:
    layout, rng = ParallelLayout(cp=cp, dp=2), np.random.default_rng(seed)
    batch, _ = scoring_batch(random_group(rng, trees=3, depth=3).trees, PackingSpec(2, 80, 2 * cp, 8))
    marked = [
        [replace(item, old_logprobs=rng.random(item.num_trained, dtype=np.float32)) for item in rank]
        for rank in batch
    ]
    shares = [share for by_context in context.split(marked, layout) for share in by_context]
    scored = [[item.old_logprobs for item in share] for share in shares]
    joined = context.join(marked, scored, layout)
    for whole, found in zip(marked, joined, strict=True):
        for item, logprobs in zip(whole, found, strict=True):
            np.testing.assert_array_equal(logprobs, item.old_logprobs)


def test_the_worked_example() -> None:
    layout = ParallelLayout(cp=2)
    group = random_group(np.random.default_rng(0), trees=1, depth=1, branches=0, prompt_tokens=5)
    batch, _ = scoring_batch(group.trees, PackingSpec(1, 8, 8, 8))
    micro_batch = replace(
        batch[0][0],
        predict_from=np.array([1, 2, 6]),
        **{name: np.arange(3) for name in context.PER_TRAINED_TOKEN - {"predict_from"}},
    )
    first, second = (context.share(micro_batch, layout, cp) for cp in (0, 1))
    assert first.input_ids.tolist() == micro_batch.input_ids[[0, 1, 6, 7]].tolist()
    assert (first.predict_from.tolist(), first.target_ids.tolist()) == ([1, 2], [0, 2])
    assert (second.predict_from.tolist(), second.target_ids.tolist()) == ([0], [1])


def test_lengths_that_do_not_divide_are_a_fault_of_the_packing() -> None:
    with pytest.raises(AssertionError, match="no multiple of 2"):
        ParallelLayout(cp=2).context_ranges(6, 0)
