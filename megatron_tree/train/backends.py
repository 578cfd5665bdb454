"""Attention over a packed micro-batch: three back ends, one signature, the same numbers.

    attend(query [Q, heads, d], key [S, kv_heads, d], value [S, kv_heads, d], mask) -> [Q, heads, d]

`node`    any device: unmasked and causal rectangles of `mask.parts`, merged by their log-sum-exps; keys are
          neither copied nor repeated. On a CPU each rectangle is torch's flash kernel, elsewhere plain
          products.
`flex`    one compiled FlexAttention over `mask.blocks`. On a CPU it has no backward.
`varlen`  one call of torch's variable-length flash attention, on a GPU in half precision; the keys of a path
          are copied for each of its leaves.

Which one a machine uses is decided once (`choose`). Not here: gathering keys over context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_tree.train.tree_mask import TreeMask

Attend = Callable[[Tensor, Tensor, Tensor, TreeMask], Tensor]


def choose(wanted: str, device: torch.device | str, dtype: torch.dtype) -> tuple[str, str]:
    """The back end of `train.attention` on this device, and why. ValueError where it cannot run."""
    cpu = torch.device(device).type == "cpu"
    if wanted == "auto":
        if cpu:
            return "node", "no GPU: torch's flash kernel for CPUs, rectangle by rectangle"
        return "flex", "a GPU is here: one kernel that skips blocks nobody sees, in any dtype"
    if cpu and wanted != "node":
        raise ValueError(
            f"train.attention: must be auto or node on a CPU, where {wanted} cannot train, got {wanted}"
        )
    if wanted == "varlen" and dtype not in (torch.bfloat16, torch.float16):
        raise ValueError("train.attention: varlen needs model.dtype bf16, got fp32")
    return wanted, "set by train.attention"


def node(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask) -> Tensor:
    return _Node.apply(query, key, value, mask)


def flex(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask) -> Tensor:
    q, k, v = (_heads_first(t) for t in (query, key, value))
    for tensor in (q, k, v):  # of the sizes only lengths may be symbols: Triton's kernel has heads by number
        torch._dynamo.mark_static(tensor, (0, 1, 3))
    return _compiled_flex()(q, k, v, block_mask=mask.blocks, enable_gqa=True)[0].transpose(0, 1)


def varlen(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    of = mask.sequences
    return varlen_attn(
        query,
        key.index_select(0, of.key_index),
        value.index_select(0, of.key_index),
        of.cu_queries,
        of.cu_keys,
        of.max_queries,
        of.max_keys,
        window_size=(-1, 0),  # causal, aligned to the bottom right
        enable_gqa=True,
    )


BACKENDS: dict[str, Attend] = {"node": node, "flex": flex, "varlen": varlen}


class _Node(torch.autograd.Function):
    """As in ring attention, each rectangle's backward takes the merged output and log-sum-exp: its
    probabilities are then those of the whole softmax."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: TreeMask) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:2], dtype=_wide(query))
        for a, b, k in mask.parts.own:
            keys = slice(k, k + b - a)
            out[a:b], lse[a:b] = _forward(query[a:b], key[keys], value[keys], causal=True)
        for a, b, k, stop in mask.parts.ancestors:
            more, more_lse = _forward(query[a:b], key[k:stop], value[k:stop], causal=False)
            total = torch.logaddexp(lse[a:b], more_lse)
            out[a:b].mul_(_weight(lse[a:b] - total, out)).addcmul_(more, _weight(more_lse - total, out))
            lse[a:b] = total
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mask = mask
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0]
        d_query = torch.empty_like(out)
        d_key, d_value = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (key, value))
        for a, b, k in ctx.mask.parts.own:
            keys = slice(k, k + b - a)
            d_query[a:b], dk, dv = _backward(
                grad[a:b], query[a:b], key[keys], value[keys], out[a:b], lse[a:b], causal=True
            )
            d_key[keys] += dk
            d_value[keys] += dv
        for a, b, k, stop in ctx.mask.parts.ancestors:
            dq, dk, dv = _backward(
                grad[a:b], query[a:b], key[k:stop], value[k:stop], out[a:b], lse[a:b], causal=False
            )
            d_query[a:b] += dq
            d_key[k:stop] += dk
            d_value[k:stop] += dv
        return d_query, d_key, d_value, None


def _forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """One rectangle: output [q, heads, d] and log-sum-exp [q, heads]."""
    if query.device.type == "cpu":
        q, k, v = (_heads_first(t) for t in (query, key, value))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out[0].transpose(0, 1), lse[0].T
    return _plain_forward(query, key, value, causal=causal)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if query.device.type == "cpu":
        grad, query, key, value, out = (_heads_first(t) for t in (grad, query, key, value, out))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse.T.unsqueeze(0), 0.0, causal
        )
        dq, dk, dv = (t[0].transpose(0, 1) for t in found)
        return dq, dk, dv
    return _plain_backward(grad, query, key, value, out, lse, causal=causal)


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, causal=causal)
    lse = scores.logsumexp(-1)  # [kv_heads, group, q]
    out = torch.einsum("hgqk,khd->qhgd", _weight_of(scores, lse, value), value)
    return out.flatten(1, 2), lse.flatten(0, 1).T


def _plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = (len(query), key.shape[1], -1)  # heads of one group are adjacent
    scores = _scores(query, key, causal=causal)
    weights = _weight_of(scores, lse.T.unflatten(0, scores.shape[:2]), value)
    row = (grad * out).sum(-1, dtype=scores.dtype).T.unflatten(0, scores.shape[:2]).unsqueeze(-1)
    grad = grad.view(*grouped, grad.shape[-1])
    d_weights = torch.einsum("qhgd,khd->hgqk", grad, value)
    d_scores = (weights * (d_weights - row)).to(query.dtype) * query.shape[-1] ** -0.5
    d_query = torch.einsum("hgqk,khd->qhgd", d_scores, key).flatten(1, 2)
    d_key = torch.einsum("hgqk,qhgd->khd", d_scores, query.view(*grouped, query.shape[-1]))
    return d_query, d_key, torch.einsum("hgqk,qhgd->khd", weights, grad)


def _scores(query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    """[kv_heads, group, q, k] in fp32 at least."""
    grouped = query.view(len(query), key.shape[1], -1, query.shape[-1])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, key).to(_wide(query)) * query.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _weight_of(scores: Tensor, lse: Tensor, like: Tensor) -> Tensor:
    return (scores - lse.unsqueeze(-1)).exp().to(like.dtype)


def _weight(log_weight: Tensor, like: Tensor) -> Tensor:
    return log_weight.exp().unsqueeze(-1).to(like.dtype)


def _heads_first(tensor: Tensor) -> Tensor:
    """[n, heads, d] as [1, heads, n, d], not copied."""
    return tensor.transpose(0, 1).unsqueeze(0)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: too many kernels are an error, not a fall back to S x S scores
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
