"""A shared prefix is trained once, exactly: packed trees against copied chains, through a small tree
transformer.

The copied side is a second source: PPO's clipped surrogate as the paper writes it, one chain at a time, no
packing.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree.algo import advantage
from megatron_tree.algo.batch import PackingSpec, scoring_batch, sft_batch, step_batch
from megatron_tree.algo.loss import LossInputs, nll_loss, policy_loss
from megatron_tree.algo.packing import scatter
from megatron_tree.config import AlgoConfig
from megatron_tree.types import Group, MicroBatch, StepBatch, Tree
from tests.toy_trees import chain_copies, random_group

VOCAB, WIDTH = 16, 8
LONGEST = 5 + 3 * 4 + 2 * 3  # tokens of a path: prompt, three actions, two observations; cuts larger trees
WHOLE = PackingSpec(1, 10**6, 1, WIDTH)


class TreeTransformer(torch.nn.Module):
    """Two attention layers with position embeddings, in float64. A token's log-prob depends on its whole
    path."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5)

        self.tokens, self.positions, self.head = weight(VOCAB, WIDTH), weight(64, WIDTH), weight(WIDTH, VOCAB)
        self.layers = torch.nn.ParameterList([weight(4, WIDTH, WIDTH) for _ in range(2)])

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probs [T]."""
        ids, positions, end, predict, target = (
            torch.tensor(x)
            for x in (
                batch.input_ids,
                batch.position_ids,
                batch.subtree_end,
                batch.predict_from,
                batch.target_ids,
            )
        )
        i = torch.arange(len(ids))
        visible = (i[None, :] <= i[:, None]) & (i[:, None] < end[None, :])
        hidden = self.tokens[ids] + self.positions[positions]
        for wq, wk, wv, wo in self.layers:
            scores = (hidden @ wq) @ (hidden @ wk).T / WIDTH**0.5
            hidden = hidden + torch.tanh(
                scores.masked_fill(~visible, -torch.inf).softmax(-1) @ hidden @ wv @ wo
            )
        return (hidden[predict] @ self.head).log_softmax(-1)[torch.arange(len(target)), target]


def scored_groups(seed: int, model: TreeTransformer, reference: TreeTransformer) -> list[Group]:
    """Old log-probs are the model's plus noise (so that ratios get clipped), reference ones another
    model's."""
    rng = np.random.default_rng(seed)
    groups = [
        random_group(rng, vocab=VOCAB, trees=2, depth=3, branches=b, action_tokens=(0, 4), group_id=f"p{b}")
        for b in (1, 3)
    ]
    batch, spans = scoring_batch(
        [tree for group in groups for tree in group.trees], PackingSpec(2, LONGEST, 3, WIDTH)
    )
    with torch.no_grad():
        own = [[model(mb).numpy() + rng.normal(0, 0.4, mb.num_trained) for mb in rank] for rank in batch]
        scatter(spans, own, "old_logprobs")
        scatter(spans, [[reference(mb).numpy() for mb in rank] for rank in batch], "ref_logprobs")
    for group in groups:
        for tree in group.trees:
            for node in tree.nodes[1:]:
                node.engine_logprobs = (
                    node.old_logprobs + rng.normal(0, 0.5, len(node.old_logprobs))
                ).astype("f4")
    return groups


def packed_loss(model: TreeTransformer, batch: StepBatch, algo: AlgoConfig) -> torch.Tensor:
    losses = [
        policy_loss(model(mb), LossInputs.from_micro_batch(mb, "cpu"), algo)[0]
        for rank in batch
        for mb in rank
    ]
    return torch.stack(losses).sum()


def copied_loss(model: TreeTransformer, groups: list[Group], algo: AlgoConfig) -> torch.Tensor:
    """Eq. 8 of the paper over root-to-leaf copies, leaf by leaf."""
    lengths = [[_trained(chain) for tree in g.trees for chain in chain_copies(tree)] for g in groups]
    total = torch.zeros((), dtype=torch.float64)
    for group, sizes in zip(groups, lengths, strict=True):
        earned = np.concatenate(advantage.advantages(group, algo).total)
        chains = [chain for tree in group.trees for chain in chain_copies(tree)]
        for a, size, chain in zip(earned, sizes, chains, strict=True):
            if size == 0:
                continue
            per_token = _ppo(model, chain, float(a), algo)
            if algo.normaliser == "sequence_mean":
                total = total + per_token.mean() / len(sizes) / len(groups)
            else:
                total = total + per_token.sum() / sum(sum(part) for part in lengths)
    return total


def _trained(chain: Tree) -> int:
    return sum(len(node.action_ids) for node in chain.nodes)


def _ppo(model: TreeTransformer, chain: Tree, a: float, algo: AlgoConfig) -> torch.Tensor:
    """Textbook: -min(r A, clip(r) A), bounded below by c A for A < 0, plus beta KL3. A causal mask, plain
    positions."""
    tokens = [int(t) for node in chain.nodes for t in (*node.action_ids, *node.observation_ids)]
    trained = [
        flag for n in chain.nodes for flag in [True] * len(n.action_ids) + [False] * len(n.observation_ids)
    ]
    where = np.flatnonzero(trained)
    size = len(tokens)
    weights = np.zeros((6, len(where)), np.float32)
    causal = MicroBatch(
        np.array(tokens), np.arange(size), np.full(size, size), where - 1, np.array(tokens)[where], *weights
    )
    lp = model(causal)
    old, ref, engine = (
        torch.tensor(np.concatenate([getattr(node, name) for node in chain.nodes[1:]]))
        for name in ("old_logprobs", "ref_logprobs", "engine_logprobs")
    )
    r = (lp - old).exp()
    surrogate = torch.minimum(r * a, r.clamp(1 - algo.clip_low, 1 + algo.clip_high) * a)
    if a < 0 and algo.clip_dual is not None:
        surrogate = torch.maximum(surrogate, torch.tensor(algo.clip_dual * a))
    if algo.importance_cap is not None:
        surrogate = surrogate * (old - engine).exp().clamp(max=algo.importance_cap)
    return -surrogate + algo.kl_coef * ((ref - lp).exp() - (ref - lp) - 1)


def gradients(loss: torch.Tensor, model: TreeTransformer) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """1e-6 of the largest entry: advantages and old log-probs are float32 in a MicroBatch."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(b.abs().max()))


ALGOS = [
    AlgoConfig(kl_coef=0.1),
    AlgoConfig(normaliser="token_mean", kl_coef=0.1, importance_cap=1.2),
    AlgoConfig(credit="sibling", clip_dual=None, kl_coef=0),
    AlgoConfig(credit="leave_one_out", clip_dual=1.3, clip_high=0.28, intra_weight=0),
]


@pytest.mark.parametrize("algo", ALGOS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_packed_trees_train_like_copied_chains(algo: AlgoConfig, seed: int) -> None:
    """Loss and every gradient; whole trees and cut ones, over ranks, with padding and fillers."""
    model, reference = TreeTransformer(seed), TreeTransformer(seed + 1)
    groups = scored_groups(seed, model, reference)
    want = copied_loss(model, groups, algo)
    wanted = gradients(want, model)
    for spec in (WHOLE, PackingSpec(3, LONGEST, 5, WIDTH)):
        batch, _ = step_batch(groups, algo, spec)
        got = packed_loss(model, batch, algo)
        assert got.item() == pytest.approx(want.item(), rel=1e-6, abs=1e-7)
        assert_same(gradients(got, model), wanted)


def test_the_gradient_does_not_depend_on_ranks_budgets_or_padding() -> None:
    model = TreeTransformer(0)
    groups = scored_groups(5, model, TreeTransformer(1))
    algo = ALGOS[0]
    wanted = gradients(packed_loss(model, step_batch(groups, algo, WHOLE)[0], algo), model)
    cut_prompts = 0.0
    for dp, tokens, pad_to in ((1, LONGEST, 1), (2, 64, 8), (5, LONGEST, 6)):
        batch, measured = step_batch(groups, algo, PackingSpec(dp, tokens, pad_to, WIDTH))
        cut_prompts += measured["packing/cut_prompts"].value
        assert_same(gradients(packed_loss(model, batch, algo), model), wanted)
    assert cut_prompts > 0  # else this test shows nothing about cuts


def test_the_noise_clips_both_signs() -> None:
    """The equality above would be cheap if nothing were clipped."""
    model = TreeTransformer(0)
    groups = scored_groups(5, model, TreeTransformer(1))
    [[micro_batch]], _ = step_batch(groups, ALGOS[3], WHOLE)
    _, measured = policy_loss(model(micro_batch), LossInputs.from_micro_batch(micro_batch, "cpu"), ALGOS[3])
    for name in ("high", "low", "dual"):
        assert measured[f"policy/clip_{name}_share"].value > 0.02


def test_sft_is_the_mean_over_copied_tokens() -> None:
    model = TreeTransformer(2)
    trees = [tree for group in scored_groups(7, model, model) for tree in group.trees]
    batch, _ = sft_batch(trees, PackingSpec(2, LONGEST, 3, WIDTH))
    got = torch.stack(
        [nll_loss(model(mb), LossInputs.from_micro_batch(mb, "cpu"))[0] for rank in batch for mb in rank]
    ).sum()
    chains = [chain for tree in trees for chain in chain_copies(tree)]
    want = -torch.cat([model(scoring_batch([chain], WHOLE)[0][0][0]) for chain in chains]).mean()
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    assert_same(gradients(got, model), gradients(want, model))
