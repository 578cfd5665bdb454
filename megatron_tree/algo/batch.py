"""One optimizer step as micro-batches: which trees go to which rank, and the three kinds of step.

`step_batch` trains, `scoring_batch` only reads log-probs, `sft_batch` imitates. Invariants, asserted in the
test under these words:

1. Every DP rank has the same number of micro-batches, a multiple of `count_multiple`; where pieces run out,
   fillers (T = 0) stand in.
2. No micro-batch holds more than `micro_batch_tokens` tokens, padding (fewer than `pad_to`) apart.
3. The split changes no weight: sums over all micro-batches do not depend on dp, the budget or the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_tree.algo import advantage
from megatron_tree.algo.packing import (
    NodeWeights,
    Packed,
    Piece,
    Span,
    cut,
    join,
    node_weights,
    pack,
    visible_keys,
)
from megatron_tree.config import AlgoConfig
from megatron_tree.metrics import Max, Mean, Metrics, Sum
from megatron_tree.types import Group, StepBatch, Tree

Assignment = list[list[list[Piece]]]  # [dp][num_microbatches][pieces]


@dataclass(frozen=True, slots=True)
class PackingSpec:
    """What the trainer's layout and the model ask of a packing."""

    dp: int
    micro_batch_tokens: int
    pad_to: int  # micro-batch lengths are multiples of it: `ParallelConfig.token_multiple`
    hidden_size: int  # weighs attention against linear layers
    count_multiple: int = 1  # so is the number of micro-batches of a rank: pp where stages are interleaved


def split(groups: Sequence[Group], mini_batches: int) -> list[list[Group]]:
    """Deals the prompts of an iteration, in order, to its optimizer steps; sizes differ by at most one."""
    if len(groups) < mini_batches:
        raise ValueError(
            f"train.mini_batches: must not exceed the {len(groups)} prompts grown, got {mini_batches}"
        )
    bounds = [len(groups) * i // mini_batches for i in range(mini_batches + 1)]
    return [list(groups[a:b]) for a, b in pairwise(bounds)]


def step_batch(groups: Sequence[Group], algo: AlgoConfig, spec: PackingSpec) -> tuple[StepBatch, Metrics]:
    """The Tree-GRPO step of these prompts. Nodes hold old log-probs, and reference ones if kl_coef > 0."""
    prompts = [group.trees for group in groups]
    earned = [advantage.advantages(group, algo) for group in groups]
    weights = advantage.leaf_weights(prompts, algo.normaliser)
    trees = [
        (tree, node_weights(tree, leaf_advantages, leaf_weights))
        for group, parts, prompt_weights in zip(groups, earned, weights, strict=True)
        for tree, leaf_advantages, leaf_weights in zip(group.trees, parts.total, prompt_weights, strict=True)
    ]
    for tree, _ in trees:
        _check_scored(tree, reference=algo.kl_coef > 0)
    packed, metrics = _batch(trees, spec)
    return _micro_batches(packed), advantage.metrics(earned) | metrics


def scoring_batch(trees: Sequence[Tree], spec: PackingSpec) -> tuple[StepBatch, list[list[tuple[Span, ...]]]]:
    """The same tokens with all weights 0, and the spans by which `packing.scatter` stores the log-probs."""
    weightless = [(tree, NodeWeights(*np.zeros((3, len(tree.nodes))))) for tree in trees]
    packed, _ = _batch(weightless, spec)
    return _micro_batches(packed), [[item.spans for item in rank] for rank in packed]


def sft_batch(trees: Sequence[Tree], spec: PackingSpec) -> tuple[StepBatch, Metrics]:
    """Demonstrations with advantage 1 and one weight for every token of the step, for `loss.nll_loss`."""
    weights = advantage.leaf_weights([[tree] for tree in trees], "token_mean")
    weighted = [
        (tree, node_weights(tree, np.ones(len(c)), c)) for tree, (c,) in zip(trees, weights, strict=True)
    ]
    packed, metrics = _batch(weighted, spec)
    return _micro_batches(packed), metrics


def partition(pieces: Sequence[Piece], spec: PackingSpec) -> Assignment:
    """Spreads pieces over ranks and micro-batches, longest processing time first.

    The number of micro-batches is that of first-fit-decreasing by tokens, rounded up to dp * count_multiple;
    where balancing by cost needs more, it grows by steps of a sixteenth, and it always ends: with one bin per
    piece everything fits.
    """
    sizes = np.array([piece.num_tokens for piece in pieces], dtype=np.int64)
    costs = np.array([cost(piece, spec.hidden_size) for piece in pieces])
    unit = spec.dp * spec.count_multiple
    bins = unit * max(1, -(-_first_fit(sizes, spec.micro_batch_tokens) // unit))
    while (chosen := _longest_first(sizes, costs, bins, spec.micro_batch_tokens)) is None:
        bins += unit * max(1, bins // (16 * unit))
    contents: list[list[Piece]] = [[] for _ in range(bins)]
    for piece, into in zip(pieces, chosen, strict=True):
        contents[into].append(piece)
    bin_costs = np.bincount(chosen, weights=costs, minlength=bins).astype(np.float64)
    ranks = _longest_first(np.ones(bins, dtype=np.int64), bin_costs, spec.dp, bins // spec.dp)
    assert ranks is not None, "bins are a multiple of dp"
    return [[contents[i] for i in np.flatnonzero(ranks == rank)] for rank in range(spec.dp)]


def cost(piece: Piece, hidden_size: int) -> float:
    """FLOPs in units of one token's linear layers.

    With h = hidden_size a layer's linear maps take about 12 h^2 multiply-adds a token and
    attention 2 h per visible key, so 6 h keys cost as much as one token.
    """
    return piece.num_tokens + visible_keys(piece) / (6 * hidden_size)


def _longest_first(
    sizes: NDArray[np.int64], costs: NDArray[np.float64], bins: int, capacity: int
) -> NDArray[np.int64] | None:
    """The bin of each item: dearest first, into the cheapest bin with room. None where one finds no room."""
    load, room = np.zeros(bins), np.full(bins, capacity)
    chosen = np.zeros(len(sizes), dtype=np.int64)
    for item in np.argsort(-costs, kind="stable"):
        into = int(np.argmin(np.where(room >= sizes[item], load, np.inf)))
        if room[into] < sizes[item]:
            return None
        chosen[item] = into
        load[into] += costs[item]
        room[into] -= sizes[item]
    return chosen


def _first_fit(sizes: NDArray[np.int64], capacity: int) -> int:
    """How many bins first-fit-decreasing opens."""
    room = np.full(len(sizes), capacity)
    used = 0
    for size in -np.sort(-sizes):
        into = int(np.argmax(room >= size))
        room[into] -= size
        used = max(used, into + 1)
    return used


def _batch(
    weighted: Sequence[tuple[Tree, NodeWeights]], spec: PackingSpec
) -> tuple[list[list[Packed]], Metrics]:
    by_prompt: dict[tuple[str, bytes], list[tuple[Tree, NodeWeights]]] = {}
    for tree, weights in weighted:
        prompt = (tree.group_id, tree.nodes[0].observation_ids.tobytes())
        by_prompt.setdefault(prompt, []).append((tree, weights))
    joined = [join(trees) for trees in by_prompt.values()]
    pieces = [cut(tree, spec.micro_batch_tokens) for tree in joined]
    assigned = partition([piece for parts in pieces for piece in parts], spec)
    packed = [[pack(parts, spec.pad_to) for parts in rank] for rank in assigned]
    unique, copied = (
        sum(tree.num_tokens for tree in joined),
        sum(tree.num_copied_tokens for tree, _ in weighted),
    )
    return packed, _metrics(unique, copied, pieces, assigned, packed, spec)


def _metrics(
    unique: int,
    copied: int,
    by_prompt: Sequence[Sequence[Piece]],
    assigned: Assignment,
    packed: Sequence[Sequence[Packed]],
    spec: PackingSpec,
) -> Metrics:
    """`copied` counts each leaf's path as a sequence of its own, `recomputed` what cuts repeat as context."""
    held = sum(piece.num_tokens for pieces in by_prompt for piece in pieces)
    batches = [item.micro_batch for rank in packed for item in rank]
    loads = [sum(cost(piece, spec.hidden_size) for pieces in rank for piece in pieces) for rank in assigned]
    return {
        "packing/unique_tokens": Sum(unique),
        "packing/copied_tokens": Sum(copied),
        "packing/copied_over_unique": Mean(copied, unique),
        "packing/trained_tokens": Sum(sum(batch.num_trained for batch in batches)),
        "packing/recomputed_tokens": Sum(held - unique),
        "packing/padding_tokens": Sum(sum(batch.num_tokens for batch in batches) - held),
        "packing/cut_prompts": Sum(sum(len(pieces) > 1 for pieces in by_prompt)),
        "packing/micro_batches": Sum(len(batches)),
        "packing/fillers": Sum(sum(not pieces for rank in assigned for pieces in rank)),
        "packing/imbalance": Max(max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0),
    }


def _micro_batches(packed: Sequence[Sequence[Packed]]) -> StepBatch:
    return [[item.micro_batch for item in rank] for rank in packed]


def _check_scored(tree: Tree, *, reference: bool) -> None:
    """A missing log-prob would train as log 1: refuse it. Our own bug, not the user's."""
    for node in tree.nodes[1:]:
        assert node.old_logprobs is not None, f"prompt {tree.group_id}: a node has no old log-probs"
        assert not reference or node.ref_logprobs is not None, (
            f"prompt {tree.group_id}: no reference log-probs"
        )
