"""Caps of a path and expectations, against numbers computed by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megatron_tree.algo.batch import PackingSpec, sft_batch
from megatron_tree.config import RolloutConfig
from megatron_tree.metrics import values
from megatron_tree.rollout import budget, report
from megatron_tree.rollout.budget import PathBudget, Spent
from megatron_tree.rollout.select import candidates
from megatron_tree.types import Finish, Group, Leaf, Node, Row, Tree
from tests.unit.rollout_fakes import Letters


def node(
    parent: int, finish: Finish, action: int = 10, observed: int = 0, calls: int = 0, cached: int = 0
) -> Node:
    ids = np.full(action, ord("a"), np.int32), np.full(observed, ord("o"), np.int32)
    return Node(
        parent, *ids, np.zeros(action, np.float32), finish, 0, calls, prefill_tokens=100, cached_tokens=cached
    )


def chain(turns: int) -> Tree:
    """Equal turns of 10 action tokens; all but the last search."""
    nodes = [node(-1, "prompt", 0, 7)]
    nodes += [node(i, "tool", 10, 5, 1, 80) for i in range(turns - 1)]
    nodes.append(node(turns - 1, "answer", 10))
    return Tree("g", 0, nodes, [Leaf(turns, 1.0, 1.0, "x", {"em": 1.0})])


def branched() -> Tree:
    """Chain 1(10), 2(30), 3(20: answer); round 1, N = 1: from node 1 one turn 4(6: answer); round 2 from node
    2: 5(8)."""
    nodes = [
        node(-1, "prompt", 0, 7),
        node(0, "tool", 10, 5, 1),
        node(1, "tool", 30, 5, 1),
        node(2, "answer", 20),
        node(1, "answer", 6),
        node(2, "max_turns", 8),
    ]
    leaves = [
        Leaf(3, 1.0, 1.0, "x", {"em": 1.0}),
        Leaf(4, 0.2, 0.0, "y", {"em": 0.0}),
        Leaf(5, 0.0, 0.0, None),
    ]
    return Tree("g", 0, nodes, leaves)


def test_a_path_keeps_what_its_prefix_left() -> None:
    config = RolloutConfig(max_turns=4, max_tool_calls=3, max_path_tokens=100)
    tree = branched()
    assert budget.budget_at(tree, 0, config) == PathBudget(4, 3, 100)
    assert budget.budget_at(tree, 1, config) == PathBudget(3, 2, 85)
    assert budget.budget_at(tree, 2, config) == PathBudget(2, 1, 50)
    assert budget.budget_at(tree, 4, config) == PathBudget(2, 2, 79)  # below node 1, not below node 2
    with pytest.raises(AssertionError, match="spent more than it had"):
        PathBudget(1, 0, 100).after(tree.nodes[1])


def test_spent() -> None:
    assert budget.spent(chain(3).nodes) == Spent(30, 300, 160, 2, 3)
    assert budget.spent(branched().nodes) == Spent(74, 500, 0, 2, 5)
    assert budget.chain_cost(branched()) == Spent(60, 300, 0, 2, 3)


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("root", ["always", "fallback"])
def test_a_branch_of_equal_turns_costs_what_the_design_says(turns: int, root) -> None:
    """DESIGN 5.1: B/2 without the root, B(D+1)/(2D) with it; a chain of one turn falls back to the root, at
    cost B."""
    tree, config = chain(turns), RolloutConfig(trees=1, expand_nodes=3, expand_rounds=1, root=root)
    tree.nodes += [node(0, "answer") for _ in range(3)]  # what was drawn does not enter the expectation
    tree.leaves += [Leaf(turns + 1 + i, 0.0, 0.0, None) for i in range(3)]
    chain_tokens = 10 * turns
    branch = chain_tokens * (turns + 1) / (2 * turns) if root == "always" or turns == 1 else chain_tokens / 2
    assert budget.expected(tree, config).generated_tokens == pytest.approx(chain_tokens + 3 * branch)


def test_expectation_of_unequal_turns_by_hand() -> None:
    """Round 1 draws from {1, 2}: below 1 lie 30 + 20 = 50, below 2 lie 20; mean 35. Round 2 draws from {1, 2}
    again: below 1 lie the leaves 3 (50) and 4 (6), mean 28; below 2 still 20; mean 24. Chain 60: in all 119.
    Turns: (2 + 1)/2 = 1.5, then ((2 + 1)/2 + 1)/2 = 1.25, chain 3: 5.75. Calls below 1: 1, below 2: 0: 0.5,
    then ((1 + 0)/2 + 0)/2 = 0.25, chain 2: 2.75."""
    config = RolloutConfig(trees=1, expand_nodes=1, expand_rounds=2)
    found = budget.expected(branched(), config)
    assert (found.generated_tokens, found.turns, found.tool_calls) == (119.0, 5.75, 2.75)


def test_expectation_equals_the_mean_over_all_draws() -> None:
    """Second source: enumerate every draw of one round of N = 2 without replacement from a chain, replay its
    tail."""
    tree, config = branched(), RolloutConfig(trees=1, expand_nodes=2, expand_rounds=1)
    tree.nodes, tree.leaves = tree.nodes[:4], tree.leaves[:1]
    tail = {1: 50, 2: 20}
    draws = list(itertools.permutations(candidates(tree, "fallback"), 2))
    by_hand = 60 + np.mean([sum(tail[v] for v in drawn) for drawn in draws])
    tree.nodes += [node(1, "answer", 6), node(2, "answer", 9)]
    tree.leaves += [Leaf(4, 0.0, 0.0, None), Leaf(5, 0.0, 0.0, None)]
    assert budget.expected(tree, config).generated_tokens == by_hand == 130


def test_paper_formula_has_the_second_m() -> None:
    """M = 2 trees, N = 2, L = 1, chains of 20 and 40 tokens: B = 30, M·B + M·L·N·B/2 = 60 + 60."""
    config = RolloutConfig(trees=2, expand_nodes=2, expand_rounds=1)
    assert budget.paper_formula([chain(2), chain(4)], config).generated_tokens == 120


def group(*trees: Tree) -> Group:
    return Group(Row("g", "fake", (), np.arange(7, dtype=np.int32), ("x",)), list(trees))


def test_metrics() -> None:
    config = RolloutConfig(trees=1, expand_nodes=1, expand_rounds=2, root="never")
    found = values(budget.metrics([group(branched()), group(chain(1))], config))
    assert found == {
        "budget/generated_tokens_per_prompt": 42.0,  # (74 + 10) / 2
        "budget/prefill_tokens_per_prompt": 300.0,
        "budget/cached_tokens_per_prompt": 0.0,
        "budget/tool_calls_per_prompt": 1.0,
        "budget/turns_per_prompt": 3.0,
        "budget/expected_generated_tokens_per_prompt": 64.5,  # (119 + 10) / 2: one turn has no candidate
        "budget/expected_tool_calls_per_prompt": 1.375,
        "budget/expected_turns_per_prompt": 3.375,
        "budget/paper_generated_tokens_per_prompt": 70.0,  # (60·2 + 10·2) / 2
        "budget/paper_tool_calls_per_prompt": 2.0,
        "budget/paper_turns_per_prompt": 4.0,
        "budget/prefix_cache_hits": 0.0,
        "budget/dropped_expansions": 2.0,
    }
    hits = values(budget.metrics([group(chain(3))], RolloutConfig(expand_rounds=0)))[
        "budget/prefix_cache_hits"
    ]
    assert hits == pytest.approx(160 / 300)


def test_outcome_metrics() -> None:
    """Paths of `branched`: 3, 2 and 3 turns; 2, 1, 2 calls."""
    found = values(report.metrics([group(branched())]))
    assert found == pytest.approx(
        {
            "rollout/reward": 0.4,
            "rollout/success": 1 / 3,
            "rollout/turns": 8 / 3,
            "rollout/tool_calls": 5 / 3,
            "rollout/action_tokens": (60 + 16 + 48) / 3,
            "rollout/observation_tokens": (10 + 5 + 10) / 3,
            "rollout/invalid_actions": 0.0,
            "rollout/finish_answer": 2 / 3,
            "rollout/finish_max_tokens": 0.0,
            "rollout/finish_max_turns": 1 / 3,
            "reward/em": 0.5,
        }
    )


def test_what_sharing_prefixes_saves() -> None:
    """`branched`: unique tokens 7+15+35+20+6+8 = 91; copied (7+15+35+20) + (7+15+6) + (7+15+35+8) = 170."""
    _, found = sft_batch([branched()], PackingSpec(1, micro_batch_tokens=100, pad_to=1, hidden_size=64))
    assert found["packing/copied_over_unique"].value == 170 / 91


def test_version_metrics() -> None:
    """Under version 7: one tree of versions 5 and 6, one of 6."""
    mixed, even = chain(2), chain(3)
    for tree, versions in ((mixed, [5, 6]), (even, [6, 6, 6])):
        for node, version in zip(tree.nodes[1:], versions, strict=True):
            node.policy_version = version
    assert values(report.version_metrics([group(mixed), group(even)], 7)) == {
        "rollout/version_lag": 2.0,
        "rollout/version_spread": 1.0,
    }
    assert values(report.version_metrics([group(even)], 6)) == {
        "rollout/version_lag": 0.0,
        "rollout/version_spread": 0.0,
    }


def test_a_tree_as_text_and_as_record() -> None:
    tree = branched()
    text = report.describe(tree, Letters()).splitlines()
    assert text[0] == "tree g / 0: 6 nodes, 3 leaves"
    assert [line.lstrip() for line in text if line.lstrip().startswith("[")] == [
        "[0] prompt",
        "[1] tool",
        "[2] tool",
        "[3] answer",
        "[5] max_turns",
        "[4] answer",
    ]
    assert "              reward 1, success 1, answer 'x'" in text
    record = report.record(tree, Letters())
    assert [n["parent"] for n in record["nodes"]] == [-1, 0, 1, 2, 1, 2]
    assert record["nodes"][4] == {
        "parent": 1,
        "action": "aaaaaa",
        "observation": "",
        "finish": "answer",
        "num_tool_calls": 0,
        "num_action_tokens": 6,
        "num_observation_tokens": 0,
        "policy_version": 0,
    }
    assert record["leaves"][1] == {"node": 4, "reward": 0.2, "success": 0.0, "answer": "y", "em": 0.0}
