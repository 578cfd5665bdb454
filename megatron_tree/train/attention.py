"""Megatron's core attention over packed trees. Not here: the mask (`tree_mask`), the arithmetic (`backends`),
the exchange between context-parallel ranks (`context`)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_tree.train.backends import BACKENDS
from megatron_tree.train.context import gather_tokens
from megatron_tree.train.tree_mask import TreeMask


class TreeAttention(MegatronModule):
    """One micro-batch at a time; its `TreeMask` comes as `packed_seq_params`. Under context parallelism a
    rank has its own queries, and keys and values are gathered."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        pg_collection: ProcessGroupCollection,
        backend: str = "node",
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.attend = BACKENDS[backend]
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,  # [S / cp, 1, heads / tp, d]
        key: Tensor,  # [S / cp, 1, kv_heads / tp, d]
        value: Tensor,
        attention_mask: None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: TreeMask | None = None,
    ) -> Tensor:
        mask = packed_seq_params
        assert mask is not None, "each micro-batch brings its TreeMask"
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        if len(mask.shares) > 1:
            key, value = gather_tokens(torch.stack([key, value], 1), mask.shares, self.cp_group).unbind(1)
        out = self.attend(query, key, value, mask)
        return out.reshape(len(out), 1, -1)
