"""Trees for people: outcome metrics, a readable text, and the record of `trees.jsonl`. Budgets are in
`budget`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from megatron_tree.metrics import Max, Metrics, mean
from megatron_tree.rollout.tokens import Codec
from megatron_tree.types import Finish, Group, Tree


def metrics(groups: Sequence[Group]) -> Metrics:
    """Means over leaves."""
    trees = [tree for group in groups for tree in group.trees]
    paths = [[tree.nodes[i] for i in tree.path(leaf.node)[1:]] for tree in trees for leaf in tree.leaves]
    leaves = [leaf for tree in trees for leaf in tree.leaves]
    found: Metrics = {
        "rollout/reward": mean(leaf.reward for leaf in leaves),
        "rollout/success": mean(leaf.success for leaf in leaves),
        "rollout/turns": mean(len(path) for path in paths),
        "rollout/tool_calls": mean(sum(node.num_tool_calls for node in path) for path in paths),
        "rollout/action_tokens": mean(sum(len(node.action_ids) for node in path) for path in paths),
        "rollout/observation_tokens": mean(sum(len(node.observation_ids) for node in path) for path in paths),
        "rollout/invalid_actions": mean(sum(node.finish == "invalid" for node in path) for path in paths),
    }
    for finish in get_args(Finish):
        if finish in ("answer", "max_tokens", "max_turns"):
            found[f"rollout/finish_{finish}"] = mean(path[-1].finish == finish for path in paths)
    for name in sorted({name for leaf in leaves for name in leaf.metrics}):
        found[f"reward/{name}"] = mean(leaf.metrics[name] for leaf in leaves if name in leaf.metrics)
    return found


def version_metrics(groups: Sequence[Group], version: int) -> Metrics:
    """How many versions the oldest node is behind `version`, and the most versions that one tree spans."""
    versions = [[node.policy_version for node in tree.nodes[1:]] for group in groups for tree in group.trees]
    return {
        "rollout/version_lag": Max(float(version - min(min(tree) for tree in versions))),
        "rollout/version_spread": Max(float(max(max(tree) - min(tree) for tree in versions))),
    }


def describe(tree: Tree, tokens: Codec) -> str:
    """The tree as indented text, a node below its parent, leaves with their reward."""
    leaves = {leaf.node: leaf for leaf in tree.leaves}
    children: dict[int, list[int]] = {}
    for index, node in enumerate(tree.nodes):
        children.setdefault(node.parent, []).append(index)
    lines = [f"tree {tree.group_id} / {tree.index}: {len(tree.nodes)} nodes, {len(tree.leaves)} leaves"]
    waiting = [(0, 0)]
    while waiting:
        index, depth = waiting.pop()
        node, margin = tree.nodes[index], "    " * depth
        lines.append(f"{margin}[{index}] {node.finish}")
        for name, ids in (("action", node.action_ids), ("observation", node.observation_ids)):
            if len(ids):
                text = tokens.decode(ids).strip().replace("\n", f"\n{margin}  | ")
                lines.append(f"{margin}  {name}: {text}")
        if index in leaves:
            leaf = leaves[index]
            lines.append(
                f"{margin}  reward {leaf.reward:g}, success {leaf.success:g}, answer {leaf.answer!r}"
            )
        waiting += [(child, depth + 1) for child in reversed(children.get(index, []))]
    return "\n".join(lines)


def record(tree: Tree, tokens: Codec) -> dict[str, object]:
    """One line of `trees.jsonl`: texts, parents and rewards; ids stay out."""
    return {
        "group_id": tree.group_id,
        "tree": tree.index,
        "nodes": [
            {
                "parent": node.parent,
                "action": tokens.decode(node.action_ids),
                "observation": tokens.decode(node.observation_ids),
                "finish": node.finish,
                "num_tool_calls": node.num_tool_calls,
                "num_action_tokens": len(node.action_ids),
                "num_observation_tokens": len(node.observation_ids),
                "policy_version": node.policy_version,
            }
            for node in tree.nodes
        ],
        "leaves": [
            {
                "node": leaf.node,
                "reward": leaf.reward,
                "success": leaf.success,
                "answer": leaf.answer,
                **leaf.metrics,
            }
            for leaf in tree.leaves
        ],
    }
