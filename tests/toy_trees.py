"""Random rollout trees from a seeded generator, and the same as copied chains, for unit and dist tests."""

from __future__ import annotations

import numpy as np

from megatron_tree.types import Group, Leaf, Node, Row, Tree


def random_tree(
    rng: np.random.Generator,
    *,
    vocab: int = 64,
    prompt_tokens: int = 5,
    depth: int = 3,
    branches: int = 2,
    action_tokens: tuple[int, int] = (1, 4),
    observation_tokens: tuple[int, int] = (0, 3),
    group_id: str = "toy",
    index: int = 0,
) -> Tree:
    """A chain of at most `depth` turns and `branches` more chains, each from a random inner node.

    The token ranges are inclusive. Log-probs are random; old and reference ones lie close to the engine's.
    """
    prompt = Node(-1, _ids(rng, vocab, 0), _ids(rng, vocab, prompt_tokens), _floats([]), "prompt", 0)
    tree = Tree(group_id, index, [prompt], [])
    depths = [0]
    for _ in range(1 + branches):
        ends = {leaf.node for leaf in tree.leaves}
        open_nodes = [i for i in range(len(tree.nodes)) if i not in ends and depths[i] < depth]
        parent = int(rng.choice(open_nodes))
        turns = int(rng.integers(1, depth - depths[parent] + 1))
        for turn in range(turns):
            last = turn == turns - 1
            observed = 0 if last else int(rng.integers(observation_tokens[0], observation_tokens[1] + 1))
            acted = int(rng.integers(action_tokens[0], action_tokens[1] + 1))
            tree.nodes.append(_node(rng, vocab, parent, acted, observed, last=last))
            depths.append(depths[parent] + 1)
            parent = len(tree.nodes) - 1
        reward = float(rng.choice([0.0, 0.2, 0.8, 1.0]))
        tree.leaves.append(Leaf(parent, reward, float(reward >= 0.8), None))
    return tree


def random_group(
    rng: np.random.Generator,
    *,
    trees: int = 2,
    vocab: int = 64,
    prompt_tokens: int = 5,
    group_id: str = "toy",
    **shape: int | tuple[int, int],
) -> Group:
    """The trees of one prompt; they share its ids. `shape`: depth, branches and token ranges of each."""
    shape |= {"vocab": vocab, "prompt_tokens": prompt_tokens}
    grown = [random_tree(rng, group_id=group_id, index=i, **shape) for i in range(trees)]  # type: ignore[arg-type]
    for tree in grown:
        tree.nodes[0] = grown[0].nodes[0]
    return Group(Row(group_id, "toy", (), grown[0].nodes[0].observation_ids, ()), grown)


def chain_copies(tree: Tree) -> list[Tree]:
    """One tree per leaf with that leaf's path only, sharing the arrays: what a trainer of copies sees."""
    copies = []
    for leaf in tree.leaves:
        path = tree.path(leaf.node)
        nodes = [_with_parent(tree.nodes[node], depth - 1) for depth, node in enumerate(path)]
        end = Leaf(len(path) - 1, leaf.reward, leaf.success, leaf.answer, leaf.metrics)
        copies.append(Tree(tree.group_id, tree.index, nodes, [end]))
    return copies


def _node(
    rng: np.random.Generator, vocab: int, parent: int, acted: int, observed: int, *, last: bool
) -> Node:
    engine = -rng.exponential(1.0, acted)
    return Node(
        parent=parent,
        action_ids=_ids(rng, vocab, acted),
        observation_ids=_ids(rng, vocab, observed),
        engine_logprobs=_floats(engine),
        finish="answer" if last else "tool",
        policy_version=1,
        num_tool_calls=0 if last else 1,
        old_logprobs=_floats(engine + rng.normal(0.0, 0.05, acted)),
        ref_logprobs=_floats(engine + rng.normal(0.0, 0.3, acted)),
    )


def _with_parent(node: Node, parent: int) -> Node:
    return Node(
        parent=parent,
        action_ids=node.action_ids,
        observation_ids=node.observation_ids,
        engine_logprobs=node.engine_logprobs,
        finish=node.finish,
        policy_version=node.policy_version,
        num_tool_calls=node.num_tool_calls,
        old_logprobs=node.old_logprobs,
        ref_logprobs=node.ref_logprobs,
    )


def _ids(rng: np.random.Generator, vocab: int, count: int) -> np.ndarray:
    return rng.integers(0, vocab, count).astype(np.int32)


def _floats(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)
