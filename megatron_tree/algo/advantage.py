"""Leaf rewards to leaf advantages, and the one normaliser of the loss (DESIGN 5.2 and 5.4).

A_i = w_inter * credit(leaves of the prompt) + w_intra * credit(leaves of the tree). A credit rule is one
small function; all of them give 0 where there is nothing to compare with: a lone leaf, or equal rewards. (The
authors' code gives a lone leaf its raw reward: not copied.) Pure numpy. Not here: how advantages reach tokens
(`packing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_tree.config import AlgoConfig
from megatron_tree.metrics import Mean, Metrics, mean
from megatron_tree.types import Group, Tree

Array = NDArray[np.float64]
PerTree = list[Array]  # one array [leaves] for each tree of a prompt

EPS = 1e-6  # added to the standard deviation; the authors' value


@dataclass(frozen=True, slots=True)
class Advantages:
    """Of the leaves of one prompt, tree by tree. `total` holds the weights, `inter` and `intra` do not."""

    inter: PerTree
    intra: PerTree
    total: PerTree


def advantages(group: Group, config: AlgoConfig) -> Advantages:
    """Raises ValueError for a reward that is not a finite number."""
    rewards = [_rewards(tree) for tree in group.trees]
    ends = np.cumsum([len(part) for part in rewards])[:-1]
    inter = np.split(_ACROSS[config.credit](np.concatenate(rewards)), ends)
    if config.credit == "sibling":
        intra = [sibling(tree, part) for tree, part in zip(group.trees, rewards, strict=True)]
    else:
        intra = [_ACROSS[config.credit](part) for part in rewards]
    total = [
        config.inter_weight * across + config.intra_weight * inside
        for across, inside in zip(inter, intra, strict=True)
    ]
    return Advantages(inter, intra, total)


def zscore(rewards: Array) -> Array:
    """(R - mean) / (std + eps) with the unbiased standard deviation."""
    if not _spread(rewards):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPS)


def centred(rewards: Array) -> Array:
    """R - mean: no division, so that easy and hard prompts keep their scale (credit `mean`)."""
    if not _spread(rewards):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def leave_one_out(rewards: Array) -> Array:
    """R_i - mean of the others: the unbiased baseline; n / (n - 1) times `centred`."""
    count = len(rewards)
    return centred(rewards) * (count / (count - 1)) if count > 1 else np.zeros_like(rewards)


def sibling(tree: Tree, rewards: Array) -> Array:
    """R_i - mean of the other leaves below leaf i's nearest branching node: credit for the last choice.

    Inside a tree alone: across the trees of a prompt the branching node is the prompt, which is
    `leave_one_out`.
    """
    below = _leaves_below(tree)
    result = np.zeros_like(rewards)
    for i, leaf in enumerate(tree.leaves):
        for node in reversed(tree.path(leaf.node)):
            others = [j for j in below[node] if j != i]
            if others:
                result[i] = rewards[i] - rewards[others].mean()
                break
    return result


def leaf_weights(
    prompts: Sequence[Sequence[Tree]], normaliser: Literal["sequence_mean", "token_mean"]
) -> list[PerTree]:
    """c_i of every leaf of *one optimizer step* (all ranks and micro-batches): `[prompt][tree][leaf]`.

    The objective over root-to-leaf copies, with l_it the term of token t of leaf i and H_i the trained tokens
    of its path, is

    sequence_mean (paper, Eq. 8)    1/P sum_x 1/G_x sum_i 1/|H_i| sum_t l_it    =>  c_i = 1 / (P G_x |H_i|)
    token_mean (authors' code)      sum_i sum_t l_it / sum_j |H_j|             =>  c_i = 1 / sum_j |H_j|

    so it is sum_i c_i sum_t l_it. l_it depends on i only through A_i, and terms of A_i > 0 and A_i < 0 are
    each linear in A_i; swapping the sums gives, for each unique token, the weights a+, a- and k of DESIGN
    5.3. Nothing else may divide: no count of ranks, micro-batches or tokens. In both cases sum_i c_i |H_i| =
    1 when every leaf has tokens.

    P counts the prompts of the step, G_x all leaves of prompt x. A leaf without trained tokens has weight 0.
    """
    lengths = [[_trained_tokens(tree) for tree in trees] for trees in prompts]
    step_tokens = sum(float(tree.sum()) for trees in lengths for tree in trees)
    result = []
    for trees in lengths:
        if normaliser == "sequence_mean":
            scale = [len(prompts) * sum(len(tree) for tree in trees) * tree for tree in trees]
        else:
            scale = [np.where(tree > 0, step_tokens, 0.0) for tree in trees]
        result.append([np.divide(1.0, tree, out=np.zeros_like(tree), where=tree > 0) for tree in scale])
    return result


def metrics(step: Iterable[Advantages]) -> Metrics:
    """Mean sizes over leaves, and how many prompts, trees and leaves teach nothing."""
    step = list(step)
    prompts = [np.concatenate(part.inter) for part in step]
    trees = [tree for part in step for tree in part.intra]
    totals = [tree for part in step for tree in part.total]
    return {
        "advantage/inter_abs": _mean_abs(prompts),
        "advantage/intra_abs": _mean_abs(trees),
        "advantage/total_abs": _mean_abs(totals),
        "advantage/inter_zero_share": mean(float(not part.any()) for part in prompts),
        "advantage/intra_zero_share": mean(float(not part.any()) for part in trees),
        "advantage/total_zero_share": mean(float(value == 0) for part in totals for value in part),
    }


_ACROSS: dict[str, Callable[[Array], Array]] = {
    "zscore": zscore,
    "mean": centred,
    "leave_one_out": leave_one_out,
    "sibling": leave_one_out,
}


def _spread(rewards: Array) -> bool:
    return bool(len(rewards) > 1 and rewards.max() > rewards.min())


def _rewards(tree: Tree) -> Array:
    for leaf in tree.leaves:
        if not np.isfinite(leaf.reward):
            raise ValueError(
                f"reward: must be a finite number, got {leaf.reward} for leaf {leaf.node} "
                f"of tree {tree.index} of prompt {tree.group_id}"
            )
    return np.array([leaf.reward for leaf in tree.leaves], dtype=np.float64)


def _leaves_below(tree: Tree) -> list[list[int]]:
    """For each node, which leaves (positions in `tree.leaves`) lie in its subtree."""
    below: list[list[int]] = [[] for _ in tree.nodes]
    for i, leaf in enumerate(tree.leaves):
        for node in tree.path(leaf.node):
            below[node].append(i)
    return below


def _trained_tokens(tree: Tree) -> Array:
    """|H_i| of each leaf."""
    through = np.zeros(len(tree.nodes))
    for i, node in enumerate(tree.nodes):
        through[i] = len(node.action_ids) + (through[node.parent] if node.parent >= 0 else 0)
    return through[[leaf.node for leaf in tree.leaves]]


def _mean_abs(parts: list[Array]) -> Mean:
    return Mean(float(sum(np.abs(part).sum() for part in parts)), float(sum(len(part) for part in parts)))
