"""The policy loss against numbers computed by hand: value, gradient, clipping boundaries, metrics."""

import math

import numpy as np
import pytest
import torch

from megatron_tree import metrics
from megatron_tree.algo.batch import PackingSpec, step_batch
from megatron_tree.algo.loss import LossInputs, nll_loss, policy_loss
from megatron_tree.config import AlgoConfig
from megatron_tree.types import Group, Leaf, Node, Row, Tree

CLIP = AlgoConfig(clip_low=0.2, clip_high=0.3, clip_dual=3.0, kl_coef=0)


def inputs(
    adv_pos: list[float],
    adv_neg: list[float],
    leaf_weight: list[float] | None = None,
    ref: list[float] | None = None,
    engine: list[float] | None = None,
) -> LossInputs:
    """Old log-probs are 0, so that r = exp(logprob)."""
    zero = [0.0] * len(adv_pos)
    parts = (adv_pos, adv_neg, leaf_weight or zero, zero, ref or zero, engine or zero)
    return LossInputs(*(torch.tensor(part, dtype=torch.float64) for part in parts))


def ratios(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log().requires_grad_()


# r, a+, a-, the loss -(a+ min(r, 1.3) + a- min(max(r, .8), 3)), its derivative by the log-prob (r times that
# by r)
CASES = [
    (1.0, 2.0, 0.0, -2.0, -2.0),
    (1.29, 2.0, 0.0, -2.58, -2.58),
    (1.31, 2.0, 0.0, -2.6, 0.0),
    (0.1, 2.0, 0.0, -0.2, -0.2),
    (0.81, 0.0, -2.0, 1.62, 1.62),
    (0.79, 0.0, -2.0, 1.6, 0.0),
    (2.99, 0.0, -2.0, 5.98, 5.98),
    (3.01, 0.0, -2.0, 6.0, 0.0),
    (
        1.5,
        2.0,
        -1.0,
        -2.6 + 1.5,
        1.5,
    ),  # both signs below one token: the good leaves are clipped, the bad one is not
    (0.5, 2.0, -1.0, -1.0 + 0.8, -1.0),
]


@pytest.mark.parametrize(("r", "pos", "neg", "value", "slope"), CASES)
def test_clipping_of_both_signs(r: float, pos: float, neg: float, value: float, slope: float) -> None:
    logprobs = ratios(r)
    loss, _ = policy_loss(logprobs, inputs([pos], [neg]), CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(value, abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)


def test_without_dual_clip_a_bad_token_is_never_bounded() -> None:
    logprobs = ratios(10.0)
    loss, _ = policy_loss(logprobs, inputs([0], [-2]), CLIP.model_copy(update={"clip_dual": None}))
    loss.backward()
    assert loss.item() == pytest.approx(20.0)
    assert logprobs.grad.item() == pytest.approx(20.0)


def test_a_ratio_beyond_float32_is_clipped_not_nan() -> None:
    for dual in (3.0, None):
        logprobs = torch.tensor([200.0], requires_grad=True)
        only_good = LossInputs(*(torch.tensor([x]) for x in (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))
        loss, _ = policy_loss(logprobs, only_good, CLIP.model_copy(update={"clip_dual": dual}))
        loss.backward()
        assert loss.item() == pytest.approx(-1.3)
        assert logprobs.grad.item() == 0.0


def test_k3_by_hand() -> None:
    """ref - logprob = ln 2: KL3 = 2 - ln 2 - 1 = 1 - ln 2, derivative 1 - 2 = -1. Weights k 3 and 1; the
    second is 0.

    beta = .5: loss .5 * 3 * (1 - ln 2), gradient -.5 * 3. The KL metric is the k-weighted mean,
    3 (1 - ln 2) / 4.
    """
    logprobs = ratios(0.5, 1.0)
    given = inputs([0, 0], [0, 0], leaf_weight=[3.0, 1.0])
    loss, measured = policy_loss(logprobs, given, CLIP.model_copy(update={"kl_coef": 0.5}))
    loss.backward()
    assert loss.item() == pytest.approx(1.5 * (1 - math.log(2)))
    assert logprobs.grad.tolist() == pytest.approx([-1.5, 0.0])
    assert measured["policy/kl"].value == pytest.approx(0.75 * (1 - math.log(2)))
    assert measured["policy/loss"].value == pytest.approx(1.5 * (1 - math.log(2)) / 4)


def test_importance_correction_is_truncated_and_constant() -> None:
    """old - engine = ln 1.5 and ln 8; cap 2: weights 1.5 and 2 on the policy term alone, not on the KL.

    ref = logprob for the first token, ln 2 above it for the second: KL3 0 and 1 - ln 2, its derivative 0, -1.
    """
    logprobs = ratios(1.0, 1.0)
    given = inputs(
        [1, 1], [0, 0], leaf_weight=[1, 1], ref=[0.0, math.log(2)], engine=[-math.log(1.5), -math.log(8)]
    )
    config = CLIP.model_copy(update={"importance_cap": 2.0, "kl_coef": 1.0})
    loss, measured = policy_loss(logprobs, given, config)
    loss.backward()
    assert loss.item() == pytest.approx(-3.5 + (1 - math.log(2)))
    assert logprobs.grad.tolist() == pytest.approx([-1.5, -2.0 - 1.0])
    assert measured["policy/importance_weight"].value == pytest.approx(1.75)
    assert measured["policy/importance_truncated_share"].value == 0.5
    assert measured["policy/logprob_gap"].value == pytest.approx((math.log(1.5) + math.log(8)) / 2)
    assert measured["policy/logprob_gap_max"].value == pytest.approx(math.log(8))


def test_metrics_by_hand_and_over_micro_batches() -> None:
    """|a| sums to 10: 2 of it clipped high, 1 low, 3 dual. Any split into micro-batches merges to the
    same."""
    r = [1.5, 1.0, 0.5, 4.0, 1.1]
    pos, neg, k = [2.0, 3.0, 0.0, 0.0, 0.5], [0.0, 0.0, -1.0, -3.0, -0.5], [0.1, 0.2, 0.3, 0.3, 0.1]
    _, whole = policy_loss(ratios(*r), inputs(pos, neg, k), CLIP)
    got = metrics.values(whole)
    assert got["policy/clip_high_share"] == pytest.approx(0.2)
    assert got["policy/clip_low_share"] == pytest.approx(0.1)
    assert got["policy/clip_dual_share"] == pytest.approx(0.3)
    assert got["policy/ratio_max"] == pytest.approx(4.0)
    cuts = [slice(0, 2), slice(2, 2), slice(2, 5)]
    parts = [policy_loss(ratios(*r[c]), inputs(pos[c], neg[c], k[c]), CLIP)[1] for c in cuts]
    assert metrics.values(metrics.merge(parts)) == pytest.approx(got)
    assert "policy/kl" not in got  # kl_coef 0: there is no reference model


def test_no_trained_token_gives_zero_in_the_graph() -> None:
    hidden = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for config in (CLIP, CLIP.model_copy(update={"kl_coef": 0.1, "importance_cap": 2.0})):
        loss, measured = policy_loss(hidden[:0] * 2, inputs([], []), config)
        (grad,) = torch.autograd.grad(loss, hidden)
        assert loss.item() == 0.0
        assert grad.tolist() == [0.0, 0.0, 0.0]
        assert set(metrics.values(measured).values()) == {0.0}
    assert nll_loss(hidden[:0], inputs([], []))[0].item() == 0.0


def test_nll_by_hand() -> None:
    logprobs = ratios(0.5, 0.25)
    loss, measured = nll_loss(logprobs, inputs([0, 0], [0, 0], leaf_weight=[0.25, 0.5]))
    loss.backward()
    assert loss.item() == pytest.approx((0.25 + 2 * 0.5) * math.log(2))
    assert logprobs.grad.tolist() == [-0.25, -0.5]
    assert measured["sft/nll"].value == pytest.approx(1.25 * math.log(2) / 0.75)


def test_a_nan_is_seen_in_loss_and_metrics() -> None:
    loss, measured = policy_loss(torch.tensor([math.nan], dtype=torch.float64), inputs([1], [0], [1]), CLIP)
    assert math.isnan(loss.item())
    assert math.isnan(measured["policy/ratio_max"].value)


def test_relation_to_step_level_dpo() -> None:
    """DESIGN 5.5: at a branching node with 1/0 rewards un-normalised intra-tree GRPO has the gradient p_win
    p_loss (grad log p_win - grad log p_loss); step-level DPO (beta 1, uniform reference) has the weight
    p_loss.

    Four children of the prompt, sampled as the policy would at p_win = 3/4: three take the winning token.
    Both sides are differentiated by torch with respect to the two logits.
    """
    win, lose = 0, 1
    logits = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    nothing = np.zeros(0, np.int32)
    nodes = [Node(-1, nothing, np.array([7], np.int32), nothing.astype(np.float32), "prompt", 0)]
    for token in (win, win, win, lose):
        old = np.array([logp[token].item()], np.float32)
        nodes.append(Node(0, np.array([token], np.int32), nothing, old, "answer", 0, old_logprobs=old))
    leaves = [Leaf(i, reward, reward, None) for i, reward in enumerate([1.0, 1.0, 1.0, 0.0], start=1)]
    group = Group(Row("g", "toy", (), nodes[0].observation_ids, ()), [Tree("g", 0, nodes, leaves)])
    algo = AlgoConfig(inter_weight=0, credit="mean", kl_coef=0)
    [[micro_batch]], _ = step_batch([group], algo, PackingSpec(1, 100, 1, 8))
    loss, _ = policy_loss(
        logp[torch.tensor(micro_batch.target_ids)], LossInputs.from_micro_batch(micro_batch, "cpu"), algo
    )
    (grpo,) = torch.autograd.grad(-loss, logits, retain_graph=True)
    (direction,) = torch.autograd.grad(logp[win] - logp[lose], logits, retain_graph=True)
    (dpo,) = torch.autograd.grad(torch.nn.functional.logsigmoid(logp[win] - logp[lose]), logits)
    torch.testing.assert_close(grpo, 0.75 * 0.25 * direction, rtol=1e-6, atol=0)
    torch.testing.assert_close(dpo, 0.25 * direction, rtol=1e-6, atol=0)
