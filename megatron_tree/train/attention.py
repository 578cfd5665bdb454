"""Core attention over packed trees: token i sees token j iff `j <= i < subtree_end[j]`.

The mask is one int per token and travels as Megatron's `attention_mask`, which hands it through unchanged,
also under recomputation. Backend `node`: the packed order is cut into runs of tokens that see the same
ancestors, and each run's queries meet the keys of its own root path only. Any device; no S x S mask exists.
Context parallelism is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens `[start, stop)` that see the same ancestors, and each other causally.

    `path` lists the ancestors' token ranges, adjacent ones joined, root first.
    """

    start: int
    stop: int
    path: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def runs(subtree_end: bytes) -> tuple[Run, ...]:
    """Cuts a packed order (int64 `subtree_end` as bytes) into runs. Pure, so one answer serves all layers.

    Worked example: subtree_end 5 5 4 4 5 (see MicroBatch) gives runs 0..2, 2..4 and 4..5, the last two with
    path (0, 2).
    """
    end = np.frombuffer(subtree_end, dtype=np.int64)
    starts = np.concatenate([[0], 1 + np.flatnonzero(end[1:] != end[:-1])])
    stops = np.append(starts[1:], len(end))
    found: list[Run] = []
    open_runs: list[tuple[int, int, int]] = []  # (start, stop, subtree end) of the ancestors
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        while open_runs and open_runs[-1][2] <= start:
            open_runs.pop()
        own_end = int(end[start])
        if own_end <= start + 1 < stop:
            raise AssertionError(
                f"tokens {start}..{stop} share subtree_end {own_end}, which is before their own end"
            )
        found.append(Run(start, stop, _joined(open_runs)))
        open_runs.append((start, stop, own_end))
    return tuple(found)


def _joined(ancestors: list[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    path: list[tuple[int, int]] = []
    for start, stop, _ in ancestors:
        if path and path[-1][1] == start:
            path[-1] = (path[-1][0], stop)
        else:
            path.append((start, stop))
    return tuple(path)


def node_attention(query: Tensor, key: Tensor, value: Tensor, subtree_end: Tensor) -> Tensor:
    """Attention of packed trees, run by run.

    query [S, heads, d]; key, value [S, kv_heads, d]; subtree_end [S] int64. Returns [S, heads, d].
    """
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = (t.repeat_interleave(repeat, dim=1) for t in (key, value))
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))  # [1, heads, S, d]
    pieces = []
    for run in runs(subtree_end.cpu().numpy().tobytes()):
        ranges = (*run.path, (run.start, run.stop))
        own_q = q[:, :, run.start : run.stop]
        if not run.path:
            own_k, own_v = k[:, :, run.start : run.stop], v[:, :, run.start : run.stop]
            pieces.append(F.scaled_dot_product_attention(own_q, own_k, own_v, is_causal=True))
            continue
        path_k = torch.cat([k[:, :, a:b] for a, b in ranges], dim=2)
        path_v = torch.cat([v[:, :, a:b] for a, b in ranges], dim=2)
        mask = _ancestors_then_causal(run.stop - run.start, path_k.shape[2], q.device)
        pieces.append(F.scaled_dot_product_attention(own_q, path_k, path_v, attn_mask=mask))
    return torch.cat(pieces, dim=2).squeeze(0).transpose(0, 1)


def _ancestors_then_causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[queries, keys] bool: all keys before the run, then its own causally."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


class TreeAttention(MegatronModule):
    """Megatron's core-attention interface around `node_attention`; micro-batch dim is 1 (trees are
    packed)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        **_: Any,
    ) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,  # [S, 1, heads / tp, d]
        key: Tensor,  # [S, 1, kv_heads / tp, d]
        value: Tensor,
        attention_mask: Tensor,  # [S] subtree_end
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> Tensor:
        out = node_attention(query.squeeze(1), key.squeeze(1), value.squeeze(1), attention_mask)
        return out.reshape(out.shape[0], 1, -1)
