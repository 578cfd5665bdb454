"""Keys and values of all context-parallel ranks, in packed order. Queries stay where they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tree.train.tree_mask import Range


def gather_tokens(local: Tensor, shares: tuple[tuple[Range, ...], ...], group: dist.ProcessGroup) -> Tensor:
    """The tokens [S, ...] of a micro-batch from each rank's [S / cp, ...]; `shares[r]` says which rank r has.

    Backward: the gradients of all ranks are summed and each gets its own tokens'.
    """
    return _Gather.apply(local, shares, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, shares: tuple[tuple[Range, ...], ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.shares, ctx.group = shares, group
        by_rank = local.new_empty(len(shares) * len(local), *local.shape[1:])
        dist.all_gather_into_tensor(by_rank, local.contiguous(), group=group)
        pieces = by_rank.split([stop - start for ranges in shares for start, stop in ranges])
        starts = [start for ranges in shares for start, _ in ranges]
        return torch.cat([pieces[i] for i in sorted(range(len(starts)), key=starts.__getitem__)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        by_rank = torch.cat([grad[start:stop] for ranges in ctx.shares for start, stop in ranges])
        local = grad.new_empty(len(grad) // len(ctx.shares), *grad.shape[1:])
        dist.reduce_scatter_tensor(local, by_rank, group=ctx.group)
        return local, None, None
