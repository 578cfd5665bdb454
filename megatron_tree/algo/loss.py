"""The losses over the unique tokens of packed trees (DESIGN 5.3), and SFT's, from log-probs [T].

    Loss = -sum_t w_t [ a+_t min(r_t, 1 + eps_high) + a-_t min(max(r_t, 1 - eps_low), c_dual) ]
           + beta sum_t k_t KL3_t

with r_t = exp(logprob - old). It equals the clipped, dual-clipped loss summed over all root-to-leaf copies:
for A > 0 the PPO minimum of r A and clip(r) A is A min(r, 1 + eps_high), for A < 0 it is A max(r, 1 -
eps_low), and dual clipping bounds the latter by A c_dual; all copies of a token share r, so only the sums of
c_i A_i by sign remain. KL3 = exp(ref - logprob) - (ref - logprob) - 1. w_t = min(exp(old - engine),
importance_cap), or 1 where that is null: a constant that corrects for tokens sampled by the engine's and
trained by the trainer's arithmetic.

The sum is not divided by anything: the weights carry the normaliser (`advantage.leaf_weights`). Not here: the
log-probs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_tree.config import AlgoConfig
from megatron_tree.metrics import Max, Mean, Metrics
from megatron_tree.types import MicroBatch

_LARGEST = 80.0  # a log-ratio whose exp float32 still holds


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the loss needs of a micro-batch, on the device of the log-probs; all [T] float32."""

    adv_pos: Tensor
    adv_neg: Tensor
    leaf_weight: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    engine_logprobs: Tensor

    @classmethod
    def from_micro_batch(cls, micro_batch: MicroBatch, device: torch.device | str) -> LossInputs:
        # torch.tensor copies: arrays from Ray are read-only
        return cls(*(torch.tensor(getattr(micro_batch, name), device=device) for name in cls.__slots__))


def policy_loss(logprobs: Tensor, inputs: LossInputs, config: AlgoConfig) -> tuple[Tensor, Metrics]:
    """The loss summed over the T trained tokens; an exact 0 in the graph where T is 0."""
    log_ratio = logprobs - inputs.old_logprobs
    low, high = math.log1p(-config.clip_low), math.log1p(config.clip_high)
    dual = _LARGEST if config.clip_dual is None else math.log(config.clip_dual)
    # Clamping the logarithm equals clamping r, and r cannot overflow (inf * 0 would be nan).
    raised = inputs.adv_pos * log_ratio.clamp(max=high).exp()
    lowered = inputs.adv_neg * log_ratio.clamp(min=low, max=dual).exp()
    trust = _trust(inputs, config.importance_cap)
    loss = -(trust * (raised + lowered)).sum()
    kl = None
    if config.kl_coef > 0:
        distance = inputs.ref_logprobs - logprobs
        kl = (inputs.leaf_weight * (torch.expm1(distance) - distance)).sum()
        loss = loss + config.kl_coef * kl
    with torch.no_grad():
        return loss, _metrics(loss, kl, log_ratio, inputs, trust, config)


def nll_loss(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """SFT: the negative log-likelihood, weighted by k."""
    loss = -(inputs.leaf_weight * logprobs).sum()
    with torch.no_grad():
        total, weight = torch.stack([loss, inputs.leaf_weight.sum()]).tolist()
    return loss, {"sft/nll": Mean(total, weight)}


def _trust(inputs: LossInputs, cap: float | None) -> Tensor:
    if cap is None:
        return torch.ones_like(inputs.old_logprobs)
    return (inputs.old_logprobs - inputs.engine_logprobs).clamp(max=math.log(cap)).exp()


def _metrics(
    loss: Tensor, kl: Tensor | None, log_ratio: Tensor, inputs: LossInputs, trust: Tensor, config: AlgoConfig
) -> Metrics:
    """One copy from the device. Three weightings:

    loss and KL by k, as in the loss: the weights of a whole step sum to 1, so their mean is the loss and the
    KL over root-to-leaf copies; clip shares by |a|: how much of the advantage gets no gradient, the same
    packed or copied; the engine gap and the importance weight by unique token.
    """
    gap = inputs.old_logprobs - inputs.engine_logprobs
    ratio = log_ratio.exp()
    negative = -inputs.adv_neg
    sums = [
        loss,
        loss.new_zeros(()) if kl is None else kl,
        inputs.leaf_weight.sum(),
        (inputs.adv_pos * (ratio > 1 + config.clip_high)).sum(),
        (negative * (ratio < 1 - config.clip_low)).sum(),
        (negative * (ratio > (config.clip_dual or math.inf))).sum(),
        (inputs.adv_pos + negative).sum(),
        gap.abs().sum(),
        trust.sum(),
        (gap > math.log(config.importance_cap or math.inf)).sum(),
        _max(ratio),
        _max(gap.abs()),
    ]
    total, kl_sum, k, high, low, dual, a, gap_sum, trust_sum, truncated, ratio_max, gap_max = torch.stack(
        [value.double() for value in sums]
    ).tolist()
    tokens = float(len(log_ratio))
    metrics: Metrics = {
        "policy/loss": Mean(total, k),
        "policy/clip_high_share": Mean(high, a),
        "policy/clip_low_share": Mean(low, a),
        "policy/clip_dual_share": Mean(dual, a),
        "policy/ratio_max": Max(ratio_max),
        "policy/logprob_gap": Mean(gap_sum, tokens),
        "policy/logprob_gap_max": Max(gap_max),
    }
    if kl is not None:
        metrics["policy/kl"] = Mean(kl_sum, k)
    if config.importance_cap is not None:
        metrics["policy/importance_weight"] = Mean(trust_sum, tokens)
        metrics["policy/importance_truncated_share"] = Mean(truncated, tokens)
    return metrics


def _max(values: Tensor) -> Tensor:
    """The maximum, -inf of none."""
    return values.amax() if len(values) else values.new_tensor(-math.inf)
