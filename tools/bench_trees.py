"""Synthetic trees of fixed turn lengths for benches, and the same step in the copied form.

Nodes are chosen by the product's own growth policy (`rollout.select`); what a turn holds is random ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_tree.algo import advantage
from megatron_tree.algo.batch import PackingSpec, partition
from megatron_tree.algo.packing import Piece, cut, join, node_weights, pack
from megatron_tree.config import AlgoConfig
from megatron_tree.rollout.select import candidates, draw
from megatron_tree.types import Group, Leaf, Node, Row, StepBatch, Tree


@dataclass(frozen=True, slots=True)
class TreeShape:
    """M trees of a prompt, N expansions in each of L rounds; token lengths as in FACTS section 3."""

    trees: int
    expand_nodes: int
    expand_rounds: int
    depth: int = 3  # turns of a path, the answer included
    prompt_tokens: int = 200
    action_tokens: int = 120
    observation_tokens: int = 300
    answer_tokens: int = 60


def grow(shape: TreeShape, vocab: int, generator: np.random.Generator, group_id: str) -> Group:
    """The trees of one prompt, rewards at random."""
    prompt = generator.integers(0, vocab, shape.prompt_tokens, dtype=np.int32)
    trees = []
    for index in range(shape.trees):
        none = np.zeros(0, dtype=np.int32)
        root = Node(-1, none, prompt, none.astype(np.float32), "prompt", 0)
        tree = Tree(group_id, index, [root], [])
        _extend(tree, 0, shape, vocab, generator)
        for _ in range(shape.expand_rounds):
            for node in draw(candidates(tree, "fallback"), shape.expand_nodes, generator):
                _extend(tree, node, shape, vocab, generator)
        trees.append(tree)
    return Group(Row(group_id, "bench", (), prompt, ()), trees)


def _extend(tree: Tree, parent: int, shape: TreeShape, vocab: int, generator: np.random.Generator) -> None:
    """Continues the path of `parent` to a leaf."""
    for turn in range(len(tree.path(parent)), shape.depth + 1):
        last = turn == shape.depth
        acted = shape.answer_tokens if last else shape.action_tokens
        action, observation = (
            generator.integers(0, vocab, count, dtype=np.int32)
            for count in (acted, 0 if last else shape.observation_tokens)
        )
        finish = "answer" if last else "tool"
        tree.nodes.append(Node(parent, action, observation, np.zeros(acted, dtype=np.float32), finish, 0))
        parent = len(tree.nodes) - 1
    tree.leaves.append(Leaf(parent, float(generator.random() < 0.5), 0.0, None))


def trained_tokens(groups: Sequence[Group]) -> int:
    """Unique ones."""
    return sum(len(node.action_ids) for group in groups for tree in group.trees for node in tree.nodes)


def copied_batch(groups: Sequence[Group], algo: AlgoConfig, spec: PackingSpec) -> StepBatch:
    """The step of `algo.batch.step_batch` with each leaf's whole path a sequence of its own, under the same
    token budget and the same partition."""
    weights = advantage.leaf_weights([group.trees for group in groups], algo.normaliser)
    pieces: list[Piece] = []
    for group, prompt_weights in zip(groups, weights, strict=True):
        totals = advantage.advantages(group, algo).total
        for tree, a, c in zip(group.trees, totals, prompt_weights, strict=True):
            for i, copy in enumerate(_paths(tree)):
                own = node_weights(copy, a[i : i + 1], c[i : i + 1])
                pieces += cut(join([(copy, own)]), spec.micro_batch_tokens)
    return [[pack(held, spec.pad_to).micro_batch for held in rank] for rank in partition(pieces, spec)]


def _paths(tree: Tree) -> list[Tree]:
    paths = []
    for leaf in tree.leaves:
        nodes = [replace(tree.nodes[i], parent=at - 1) for at, i in enumerate(tree.path(leaf.node))]
        paths.append(Tree(tree.group_id, tree.index, nodes, [replace(leaf, node=len(nodes) - 1)]))
    return paths
