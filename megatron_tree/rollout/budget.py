"""What a path may still spend, what trees spent, and what they were expected to spend.

Caps are hard and belong to the path: a branch inherits what its prefix spent of turns, tool calls and tokens.

Expectation. A branch from node v is taken to cost what lies between v and a leaf in the tree it is drawn
from, on the mean over the leaves below v. Every draw of a round is uniform over the round's candidates C
(also without replacement), hence, given the trees drawn from, exactly

    E = Σ_trees [ chain + Σ_rounds N · mean_{v ∈ C} mean_{leaves i below v} cost(v → i) ].

For D equal turns and round 1 this is B/2 a branch without the root among the candidates and B(D+1)/(2D) with
it. The paper states M·B + L·N·B/2 for M trees; each of the M trees is expanded, so the second term lacks a
factor M, which `paper_formula` puts in.

Limit: a branch may be longer than what it leaves behind. Where agents stop at random (every turn answers with
the same probability), short chains have few candidates and each is drawn more often, so more is spent than
expected: by 25 to 38 % for 30 % answers a turn, 4 to 8 turns, M, N, L = 2, 2, 1, `root: fallback`. The gap is
this, no fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

from megatron_tree.config import RolloutConfig
from megatron_tree.metrics import Mean, Metrics, Sum, mean
from megatron_tree.rollout.select import candidates
from megatron_tree.types import Group, Node, Tree


@dataclass(frozen=True, slots=True)
class PathBudget:
    """What one path has left."""

    turns: int
    tool_calls: int
    tokens: int  # sampled and observed

    def __post_init__(self) -> None:
        assert min(self.turns, self.tool_calls, self.tokens) >= 0, f"a path spent more than it had: {self}"

    def after(self, node: Node) -> PathBudget:
        return PathBudget(
            self.turns - 1, self.tool_calls - node.num_tool_calls, self.tokens - node.num_tokens
        )


def budget_at(tree: Tree, node: int, config: RolloutConfig) -> PathBudget:
    """What the path to `node` (included) has left. The prompt costs nothing."""
    left = PathBudget(config.max_turns, config.max_tool_calls, config.max_path_tokens)
    for index in tree.path(node)[1:]:
        left = left.after(tree.nodes[index])
    return left


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of some turns. Tokens are counted as the engine saw them: a context is prefilled again for every
    turn."""

    generated_tokens: float = 0
    prefill_tokens: float = 0  # of all requests' prompts
    cached_tokens: float = 0  # of these, found in the prefix cache
    tool_calls: float = 0
    turns: float = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Spent:
        return Spent(*(factor * value for value in astuple(self)))


def spent(nodes: Iterable[Node]) -> Spent:
    """The cost of the turns among `nodes` (a tree's, or a part of it)."""
    return _total(
        Spent(len(node.action_ids), node.prefill_tokens, node.cached_tokens, node.num_tool_calls, 1)
        for node in nodes
        if node.finish != "prompt"
    )


def chain_cost(tree: Tree) -> Spent:
    """B of this tree: its first chain."""
    return spent(tree.nodes[: tree.leaves[0].node + 1])


def expected(tree: Tree, config: RolloutConfig) -> Spent:
    """The expectation of the module's head for one tree, round by round as it was grown."""
    total = chain_cost(tree)
    for grown in range(1, len(tree.leaves), config.expand_nodes):
        before = Tree(
            tree.group_id, tree.index, tree.nodes[: tree.leaves[grown - 1].node + 1], tree.leaves[:grown]
        )
        found = candidates(before, config.root)
        branch = _total(_cost_below(before, node) for node in found) * (1 / len(found))
        total += branch * config.expand_nodes
    return total


def paper_formula(trees: Sequence[Tree], config: RolloutConfig) -> Spent:
    """M·B + M·L·N·B/2, with B the mean cost of the M first chains."""
    chains = _total(chain_cost(tree) for tree in trees)  # M·B
    return chains * (1 + config.expand_rounds * config.expand_nodes / 2)


def num_dropped(tree: Tree, config: RolloutConfig) -> int:
    """Expansions that found no candidate (only with `root: never`)."""
    return config.leaves_per_tree - len(tree.leaves)


def metrics(groups: Sequence[Group], config: RolloutConfig) -> Metrics:
    """Per prompt: spent, expected given the trees drawn from, and by the paper's formula; expansions
    dropped."""
    per_prompt = {
        "": [spent(node for tree in group.trees for node in tree.nodes) for group in groups],
        "expected_": [_total(expected(tree, config) for tree in group.trees) for group in groups],
        "paper_": [paper_formula(group.trees, config) for group in groups],
    }
    found: Metrics = {}
    for prefix, costs in per_prompt.items():
        for field in fields(Spent):
            if prefix and field.name.endswith(("prefill_tokens", "cached_tokens")):
                continue  # these depend on the cache and on other prompts, not on the draws alone
            found[f"budget/{prefix}{field.name}_per_prompt"] = mean(getattr(c, field.name) for c in costs)
    everything = _total(per_prompt[""])
    found["budget/prefix_cache_hits"] = Mean(everything.cached_tokens, everything.prefill_tokens)
    found["budget/dropped_expansions"] = Sum(
        float(sum(num_dropped(tree, config) for group in groups for tree in group.trees))
    )
    return found


def _cost_below(tree: Tree, node: int) -> Spent:
    """Mean over the leaves below `node` of what lies between."""
    paths = [path for leaf in tree.leaves if node in (path := tree.path(leaf.node))]
    tails = [spent(tree.nodes[i] for i in path[path.index(node) + 1 :]) for path in paths]
    return _total(tails) * (1 / len(tails))


def _total(parts: Iterable[Spent]) -> Spent:
    return sum(parts, start=Spent())
