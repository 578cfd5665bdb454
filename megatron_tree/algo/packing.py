"""Trees to packed micro-batches and back (DESIGN 5.3 and 6).

The M trees of a prompt are one tree here: they share the prompt, which is packed once. It is packed in
depth-first order, children in index order, so that a node's subtree is one range of tokens and one int per
token (`subtree_end`) is the whole mask. A tree too long for a micro-batch is cut into *pieces*: some leaves
with their whole paths. Invariants, each asserted in the test under these words:

1. A piece is closed under parents: every token sees its whole path.
2. Over the pieces of a prompt each node is trained exactly once; elsewhere it is context, recomputed.
3. All trained tokens of a node share one weight (a+, a-, k): the sums over *all* leaves of the tree below it.
4. A piece holds at most `budget` tokens; among cuts between depth-first neighbours the chosen one recomputes
least.

Not here: which piece goes to which micro-batch and rank (`batch`), advantages (`advantage`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_tree.types import FloatArray, IndexArray, IntArray, MicroBatch, Node, Tree

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NodeWeights:
    """What every trained token of a node is weighted with, one entry per node of the tree."""

    adv_pos: Array  # [nodes] a+
    adv_neg: Array  # [nodes] a-
    leaf: Array  # [nodes] k


@dataclass(frozen=True, slots=True)
class Joined:
    """The trees of one prompt as one: the prompt is node 0 of all, the others follow tree by tree.

    Worked example: trees with parents -1 0 1 and -1 0 0 have together -1 0 1 0 0.
    """

    group_id: str
    nodes: list[Node]
    parents: list[int]
    ends: list[int]  # the leaves
    weights: NodeWeights

    @property
    def num_tokens(self) -> int:
        return sum(node.num_tokens for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some leaves of a prompt's trees with their paths. Uncut, they are one piece that trains all it
    holds."""

    tree: Joined
    nodes: tuple[int, ...]  # depth-first
    trained: frozenset[int]  # of these, the nodes whose actions are trained here

    @property
    def num_tokens(self) -> int:
        return sum(self.tree.nodes[node].num_tokens for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Span:
    """Where the actions of a node lie among the T trained tokens of its micro-batch."""

    node: Node
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Packed:
    micro_batch: MicroBatch
    spans: tuple[Span, ...]


def node_weights(tree: Tree, advantages: Array, weights: Array) -> NodeWeights:
    """Sums c_i A_i (by sign) and c_i over the leaves below each node. `advantages`, `weights`: per leaf."""
    sums = np.zeros((3, len(tree.nodes)))
    weighted = advantages * weights
    ends = [leaf.node for leaf in tree.leaves]
    sums[:, ends] = np.maximum(weighted, 0), np.minimum(weighted, 0), weights
    for i in range(len(tree.nodes) - 1, 0, -1):
        sums[:, tree.nodes[i].parent] += sums[:, i]
    return NodeWeights(*sums)


def join(trees: Sequence[tuple[Tree, NodeWeights]]) -> Joined:
    """The trees of one prompt, whose ids must be the same in all."""
    first = trees[0][0]
    nodes, parents, ends = [first.nodes[0]], [-1], []
    for tree, _ in trees:
        assert np.array_equal(tree.nodes[0].observation_ids, nodes[0].observation_ids), "one prompt"
        before = len(nodes) - 1
        nodes += tree.nodes[1:]
        parents += [node.parent + before if node.parent else 0 for node in tree.nodes[1:]]
        ends += [leaf.node + before if leaf.node else 0 for leaf in tree.leaves]
    sums = (
        np.concatenate([[sum(x[0] for x in parts)], *(x[1:] for x in parts)])
        for parts in zip(*((w.adv_pos, w.adv_neg, w.leaf) for _, w in trees), strict=True)
    )
    return Joined(first.group_id, nodes, parents, ends, NodeWeights(*sums))


def cut(tree: Joined, budget: int) -> list[Piece]:
    """The pieces of a prompt's trees, one where they fit. Raises ValueError where a single path is over the
    budget.

    `best[j]` is the least number of tokens recomputed when the first j leaves (depth-first) are in whole
    pieces; a piece that starts at leaf i recomputes what that leaf shares with leaf i-1.
    """
    paths = sorted(_path(tree, end) for end in tree.ends)  # like words: a parent is a prefix
    leaves = [path[-1] for path in paths]
    length = _path_tokens(tree)
    shared = [0] + [length[_common(a, b)] for a, b in pairwise(paths)]
    best, start = [0], [0]
    for j in range(1, len(leaves) + 1):
        size, least = 0, (-1, -1)
        for i in range(j - 1, -1, -1):
            size += length[leaves[i]] - (shared[i + 1] if i + 1 < j else 0)
            if size > budget:
                break
            if least[1] < 0 or best[i] + shared[i] < least[0]:
                least = (best[i] + shared[i], i)
        if least[1] < 0:
            raise ValueError(
                "train.micro_batch_tokens: must hold the longest root-to-leaf path, "
                f"{length[leaves[j - 1]]} tokens of prompt {tree.group_id}, got {budget}"
            )
        best.append(least[0])
        start.append(least[1])
    return _pieces(tree, paths, start)


def pack(pieces: Sequence[Piece], pad_to: int, pad_id: int = 0) -> Packed:
    """One micro-batch, its length a multiple of `pad_to`. Without pieces a filler: `pad_to` tokens, none
    trained.

    Log-probs that a node does not have yet are 0.
    """
    parts = _Parts()
    for piece in pieces:
        parts.add(piece)
    return parts.packed(-parts.size % pad_to if parts.size else pad_to, pad_id)


def scatter(
    spans: Sequence[Sequence[Sequence[Span]]],
    logprobs: Sequence[Sequence[FloatArray]],
    name: Literal["old_logprobs", "ref_logprobs"],
) -> None:
    """Stores the log-probs of scored micro-batches, `[dp][num_microbatches]` of `[T]`, in their nodes."""
    for rank_spans, rank_logprobs in zip(spans, logprobs, strict=True):
        for nodes, scored in zip(rank_spans, rank_logprobs, strict=True):
            expected = nodes[-1].stop if nodes else 0
            assert scored.shape == (expected,), (
                f"{name}: {scored.shape} log-probs for {expected} trained tokens"
            )
            for span in nodes:
                setattr(span.node, name, np.array(scored[span.start : span.stop], dtype=np.float32))


def visible_keys(piece: Piece) -> int:
    """The attention's area: for each token of a piece, the tokens of its path up to itself, summed."""
    depth, area = {-1: 0}, 0
    for i in piece.nodes:
        before, count = depth[piece.tree.parents[i]], piece.tree.nodes[i].num_tokens
        depth[i] = before + count
        area += count * before + count * (count + 1) // 2
    return area


class _Parts:
    """A micro-batch while it is filled: numbers for each node. Its arrays are made once, at the end."""

    def __init__(self) -> None:
        self.size = 0  # tokens so far
        self.nodes: list[Node] = []
        self.depths: list[int] = []  # tokens of the path before each node
        self.ends: list[int] = []  # packed index past the subtree of each node
        self.trained: list[Node] = []
        self.first: list[int] = []  # packed index of the first action token of each trained node
        self.before: list[int] = []  # the one that predicts it
        self.weights: list[tuple[float, float, float]] = []  # a+, a-, k of each trained node

    def add(self, piece: Piece) -> None:
        """Appends the nodes of a piece in their order."""
        nodes, parents, sums = piece.tree.nodes, piece.tree.parents, piece.tree.weights
        first: dict[int, int] = {}
        at, depth, last = self.size, {-1: 0}, {-1: -1}
        for i in piece.nodes:
            first[i], count = at, nodes[i].num_tokens
            depth[i] = depth[parents[i]] + count
            at += count
            last[i] = at - 1 if count else last[parents[i]]
        ends = _subtree_ends(piece, first, at)
        for i in piece.nodes:
            node = nodes[i]
            self.nodes.append(node)
            self.depths.append(depth[parents[i]])
            self.ends.append(ends[i])
            if i in piece.trained and len(node.action_ids):
                assert last[parents[i]] >= 0, f"prompt {piece.tree.group_id}: no token comes before node {i}"
                self.trained.append(node)
                self.first.append(first[i])
                self.before.append(last[parents[i]])
                self.weights.append((sums.adv_pos[i], sums.adv_neg[i], sums.leaf[i]))
        self.size = at

    def packed(self, padding: int, pad_id: int) -> Packed:
        size, counts = self.size, [node.num_tokens for node in self.nodes]
        ids, positions = np.full(size + padding, pad_id), np.zeros(size + padding, np.int64)
        ends = 1 + np.arange(size + padding)
        _join([part for node in self.nodes for part in (node.action_ids, node.observation_ids)], ids[:size])
        positions[:size] = _runs(self.depths, counts)
        ends[:size] = np.repeat(np.array(self.ends, np.int64), counts)

        lengths = [len(node.action_ids) for node in self.trained]
        stops = np.cumsum(lengths, dtype=np.int64).tolist()
        starts = [stop - length for stop, length in zip(stops, lengths, strict=True)]
        predict_from = _runs([first - 1 for first in self.first], lengths)
        predict_from[starts] = self.before
        targets = _join([node.action_ids for node in self.trained], np.empty(sum(lengths), np.int64))
        floats = np.zeros((6, sum(lengths)), np.float32)
        weights = np.array(self.weights, np.float32).reshape(-1, 3)
        np.copyto(floats[:3], np.repeat(weights.T, lengths, axis=1))
        for row, name in zip(floats[3:], ("old_logprobs", "ref_logprobs", "engine_logprobs"), strict=True):
            for node, start, stop in zip(self.trained, starts, stops, strict=True):
                logprobs = getattr(node, name)
                if logprobs is not None:
                    row[start:stop] = logprobs
        spans = tuple(map(Span, self.trained, starts, stops))
        return Packed(MicroBatch(ids, positions, ends, predict_from, targets, *floats), spans)


def _runs(starts: Sequence[int], counts: Sequence[int]) -> IndexArray:
    """`start, start + 1, …` of each count, joined: starts 5, 2 and counts 2, 3 give 5 6 2 3 4."""
    lengths = np.array(counts, np.int64)
    shifts = np.array(starts, np.int64) - (lengths.cumsum() - lengths)
    return np.arange(lengths.sum()) + np.repeat(shifts, lengths)


def _join(parts: Sequence[IntArray], into: IndexArray) -> IndexArray:
    if parts:
        np.concatenate(parts, out=into)
    return into


def _subtree_ends(piece: Piece, first: dict[int, int], end: int) -> dict[int, int]:
    """Packed index just past the subtree of each node: where the next node that is no descendant starts."""
    ends: dict[int, int] = {}
    open_nodes: list[int] = []
    for i in piece.nodes:
        while open_nodes and open_nodes[-1] != piece.tree.parents[i]:
            ends[open_nodes.pop()] = first[i]
        open_nodes.append(i)
    return ends | dict.fromkeys(open_nodes, end)


def _pieces(tree: Joined, paths: list[list[int]], start: list[int]) -> list[Piece]:
    """`start[j]` is the first leaf of the best piece that ends before leaf j: walk back from the end."""
    bounds = [len(paths)]
    while bounds[-1] > 0:
        bounds.append(start[bounds[-1]])
    bounds.reverse()
    pieces, done = [], frozenset[int]()
    for i, j in pairwise(bounds):
        nodes = tuple(dict.fromkeys(node for path in paths[i:j] for node in path))
        pieces.append(Piece(tree, nodes, frozenset(nodes) - done))
        done |= frozenset(nodes)
    return pieces


def _path(tree: Joined, node: int) -> list[int]:
    found = []
    while node >= 0:
        found.append(node)
        node = tree.parents[node]
    return found[::-1]


def _path_tokens(tree: Joined) -> list[int]:
    """Tokens from the root to each node, both included."""
    through: list[int] = []
    for node, parent in zip(tree.nodes, tree.parents, strict=True):
        through.append(node.num_tokens + (through[parent] if parent >= 0 else 0))
    return through


def _common(a: list[int], b: list[int]) -> int:
    """The last node that both paths share."""
    return [x for x, y in zip(a, b, strict=False) if x == y][-1]
