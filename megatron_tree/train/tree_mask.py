"""What token sees what in a packed micro-batch, prepared once for all layers. Pure but for the last step to a
device.

Token i sees token j iff `j <= i < subtree_end[j]`. A *chain* is a longest run of tokens each of which sees
the one before: a node and its first children down to a leaf. So a micro-batch has as many chains as leaves,
and a token sees a prefix of its own chain and of each chain that one hangs on. Every back end gets its own
view of that (`parts`, `sequences`, `blocks`), made at its first use and kept.

`TreeMask` travels as Megatron's `packed_seq_params`: unlike `attention_mask`, which recomputation saves as a
tensor, that is handed on by closure, so that it may be any object, and each of the micro-batches in flight
keeps its own. Not here: attention itself (`backends`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron_tree.layout import ParallelLayout
from megatron_tree.types import IndexArray

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Range = tuple[int, int]  # [start, stop)
BLOCK = 128  # tokens on a side of a block of FlexAttention


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive queries of one chain: a rank's index of them, and the global ranges of the keys they see.

    The last range ends at the last query: aligned to the bottom right, the mask over all keys is causal.
    """

    start: int
    stop: int
    keys: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """Attention without a mask, as rectangles: `own` (queries start, stop, first key) are causal squares that
    hold each query once; `ancestors` (queries start, stop, keys start, stop) are seen whole. Siblings and
    their subtrees share a rectangle."""

    own: tuple[tuple[int, int, int], ...]
    ancestors: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Flash attention's variable-length form: a sequence per piece, its keys gathered by `key_index`."""

    key_index: Tensor  # [K] int64
    cu_queries: Tensor  # [pieces + 1] int32
    cu_keys: Tensor  # [pieces + 1] int32
    max_queries: int
    max_keys: int


@dataclass(frozen=True, eq=False)
class TreeMask:
    subtree_end: IndexArray  # [S] of the whole micro-batch, also under context parallelism
    shares: tuple[tuple[Range, ...], ...]  # the token ranges of every context-parallel rank
    cp_rank: int
    device: torch.device

    qkv_format: ClassVar[str] = "sbhd"  # the one field that Megatron's attention reads: not `thd`

    @classmethod
    def of(
        cls, subtree_end: IndexArray, device: torch.device | str, *, cp: int = 1, cp_rank: int = 0
    ) -> TreeMask:
        """The mask of one micro-batch for the queries of one rank."""
        layout = ParallelLayout(cp=cp)
        shares = tuple(_joined(layout.context_ranges(len(subtree_end), rank)) for rank in range(cp))
        return cls(subtree_end, shares, cp_rank, torch.device(device))

    @property
    def num_queries(self) -> int:
        return sum(stop - start for start, stop in self.shares[self.cp_rank])

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The chains, cut where this rank's queries are.

        Worked example: subtree_end 5 5 4 4 5 (see MicroBatch) has the chains 0..4 and 4..5: pieces (0, 4)
        with keys 0..4 and (4, 5) with keys 0..2 and 4..5.
        """
        found, local, chains = [], 0, _chains(self.subtree_end)
        for first, last in self.shares[self.cp_rank]:
            for start, stop, path in chains:
                a, b = max(start, first), min(stop, last)
                if a < b:
                    found.append(Piece(local, local + b - a, (*path, (start, b))))
                    local += b - a
        return tuple(found)

    @cached_property
    def parts(self) -> Parts:
        own, ancestors = [], dict[Range, list[tuple[int, int]]]()
        for piece in self.pieces:
            *path, (start, stop) = piece.keys
            first = stop - (piece.stop - piece.start)
            own.append((piece.start, piece.stop, first))
            for keys in (*path, (start, first)) if first > start else path:
                queries = ancestors.setdefault(keys, [])
                if queries and queries[-1][1] == piece.start:
                    queries[-1] = (queries[-1][0], piece.stop)
                else:
                    queries.append((piece.start, piece.stop))
        return Parts(tuple(own), tuple((*q, *keys) for keys, queries in ancestors.items() for q in queries))

    @cached_property
    def sequences(self) -> Sequences:
        queries = [piece.stop - piece.start for piece in self.pieces]
        keys = [sum(stop - start for start, stop in piece.keys) for piece in self.pieces]
        ranges = chain.from_iterable(piece.keys for piece in self.pieces)
        index = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        cu_queries, cu_keys = (
            torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self.device)
            for lengths in (queries, keys)
        )
        return Sequences(
            torch.from_numpy(index).to(self.device), cu_queries, cu_keys, max(queries), max(keys)
        )

    @cached_property
    def blocks(self) -> BlockMask:
        """FlexAttention's block mask, from counts: no S x S mask exists."""
        from torch.nn.attention.flex_attention import BlockMask

        query = np.concatenate([np.arange(start, stop) for start, stop in self.shares[self.cp_rank]])
        visible = _visible_pairs(self.subtree_end, query)
        area = np.outer(_block_sizes(len(query)), _block_sizes(len(self.subtree_end)))
        partial, full = (
            _listed(chosen, self.device) for chosen in ((visible > 0) & (visible < area), visible == area)
        )
        query_index, end = (torch.from_numpy(x).to(self.device) for x in (query, self.subtree_end.copy()))

        def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= query_index[q]) & (query_index[q] < end[k])

        return BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(len(query), len(self.subtree_end))
        )


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Adjacent ranges as one."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _chains(end: IndexArray) -> list[tuple[int, int, tuple[Range, ...]]]:
    """(start, stop, ancestor ranges root first) of every chain in packed order."""
    index = np.arange(len(end))
    assert bool(((end > index) & (end <= len(end))).all()), "a subtree ends behind its token, inside the pack"
    starts = [0, *(1 + np.flatnonzero(end[:-1] == index[1:])).tolist()]
    stops = [*starts[1:], len(end)]
    found: list[tuple[int, int, tuple[Range, ...]]] = []
    open_chains: list[tuple[int, int, tuple[Range, ...]]] = []
    for start, stop in zip(starts, stops, strict=True):
        own = end[start:stop]
        assert bool((own[1:] <= own[:-1]).all()), f"subtrees overlap between tokens {start} and {stop}"
        while open_chains and end[open_chains[-1][0]] <= start:
            open_chains.pop()
        path: tuple[Range, ...] = ()
        if open_chains:
            first, last, above = open_chains[-1]
            # ends fall along a chain: a prefix of it is seen
            seen = first + int(np.searchsorted(-end[first:last], -start))
            assert end[start] <= end[seen - 1], f"the subtree of token {start} leaves that of {seen - 1}"
            path = (*above, (first, seen))
        found.append((start, stop, path))
        open_chains.append(found[-1])
    return found


def _visible_pairs(end: IndexArray, query: IndexArray) -> IndexArray:
    """[query blocks, key blocks]: how many of a block's pairs are visible. Key j is seen by the queries whose
    global index is in [j, end[j])."""
    first, last = np.searchsorted(query, np.arange(len(end))), np.searchsorted(query, end)
    starts = np.arange(0, len(query), BLOCK)[:, None]
    counts = np.minimum(last, starts + BLOCK) - np.maximum(first, starts)
    return np.add.reduceat(counts.clip(min=0), np.arange(0, len(end), BLOCK), axis=1)


def _block_sizes(length: int) -> IndexArray:
    return np.diff([*range(0, length, BLOCK), length])


def _listed(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """A [query blocks, key blocks] choice as FlexAttention lists it: counts [1, 1, q], indices [1, 1, q, k],
    the chosen first."""
    order = np.argsort(~chosen, axis=1, kind="stable")
    counts = chosen.sum(axis=1)
    number, listed = (torch.from_numpy(x.astype(np.int32))[None, None] for x in (counts, order))
    return number.to(device), listed.to(device)
