"""A step's micro-batches over context-parallel ranks, and what they scored back together (DESIGN 6).

A rank's share of a micro-batch is itself a micro-batch: its own tokens, and the trained tokens that these
predict, so that model, loss and metrics need not know. Only `subtree_end` stays whole, because a token may
see any token before it. Invariants, asserted in the test under these words:

1. Every token, and every trained token, is in exactly one share.
2. All shares of a micro-batch have the same number of tokens.

Not here: which tokens a rank holds (`layout.context_ranges`), the exchange of keys and values
(`train.attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from megatron_tree.layout import ParallelLayout
from megatron_tree.types import FloatArray, IndexArray, MicroBatch, StepBatch

PER_TRAINED_TOKEN = {field.name for field in fields(MicroBatch)} - {
    "input_ids",
    "position_ids",
    "subtree_end",
}


def split(batch: StepBatch, layout: ParallelLayout) -> list[list[list[MicroBatch]]]:
    """`[dp][cp][num_microbatches]`."""
    if layout.cp == 1:
        return [[micro_batches] for micro_batches in batch]
    return [
        [[share(item, layout, cp) for item in micro_batches] for cp in range(layout.cp)]
        for micro_batches in batch
    ]


def share(batch: MicroBatch, layout: ParallelLayout, cp_rank: int) -> MicroBatch:
    """What one context-parallel rank gets. `predict_from` counts its own tokens.

    Worked example, cp=2, 8 tokens, predict_from 1 2 6: rank 0 has tokens 0 1 6 7 and predict_from 1 2 (of
    the first and the third), rank 1 has tokens 2 3 4 5 and predict_from 0.
    """
    ranges = layout.context_ranges(batch.num_tokens, cp_rank)
    tokens = np.concatenate([np.arange(start, stop) for start, stop in ranges])
    trained = _trained(batch, layout, cp_rank)
    return replace(
        batch,
        input_ids=batch.input_ids[tokens],
        position_ids=batch.position_ids[tokens],
        **{name: getattr(batch, name)[trained] for name in PER_TRAINED_TOKEN}
        | {"predict_from": np.searchsorted(tokens, batch.predict_from[trained])},
    )


def join(
    batch: StepBatch, scored: Sequence[Sequence[FloatArray]], layout: ParallelLayout
) -> list[list[FloatArray]]:
    """Log-probs `[dp][num_microbatches]` of `[T]` from those of each dp and in it each cp rank."""
    if layout.cp == 1:
        return [list(micro_batches) for micro_batches in scored]
    joined: list[list[FloatArray]] = []
    for dp, micro_batches in enumerate(batch):
        shares = scored[dp * layout.cp : (dp + 1) * layout.cp]
        joined.append(
            [_joined(item, parts, layout) for item, *parts in zip(micro_batches, *shares, strict=True)]
        )
    return joined


def _joined(batch: MicroBatch, parts: Sequence[FloatArray], layout: ParallelLayout) -> FloatArray:
    whole = np.empty(batch.num_trained, dtype=np.float32)
    for cp, part in enumerate(parts):
        whole[_trained(batch, layout, cp)] = part
    return whole


def _trained(batch: MicroBatch, layout: ParallelLayout, cp_rank: int) -> IndexArray:
    """Indices into the trained tokens whose predicting token the rank holds."""
    here = np.zeros(batch.num_trained, dtype=bool)
    for start, stop in layout.context_ranges(batch.num_tokens, cp_rank):
        here |= (batch.predict_from >= start) & (batch.predict_from < stop)
    return np.flatnonzero(here)
