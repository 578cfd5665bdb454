"""Packed trees through Megatron, over layouts, against two second sources:

- Megatron on one rank with every leaf's path as a sequence of its own (no sharing);
- transformers and torch autograd on the same copies, with the PPO loss written per leaf as in the paper.

Every gradient of every Hugging Face tensor is compared, gathered through the slice plan.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_tree.algo.batch import PackingSpec, scoring_batch, sft_batch, step_batch
from megatron_tree.config import AlgoConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.types import Group, Tree
from tests.dist.harness import Case, run
from tests.dist.reference import compare, copied, load_gradients, node_logprobs, path_logprobs, score
from tests.tiny_models import make_model
from tests.toy_trees import chain_copies, random_group

ALGO = AlgoConfig(kl_coef=0.1)
VOCAB = 125  # not a multiple of 2: TP 2 pads it
LAYOUTS = {
    "tp1pp1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "dp2": ParallelLayout(dp=2),
    "tp4_above_kv_heads": ParallelLayout(tp=4),
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # short: every band is met
MODELS: dict[str, dict] = {
    "qwen2_tied": {"family": "qwen2", "tied": True},
    "qwen2_untied": {"family": "qwen2", "tied": False},
    "llama_tied": {"family": "llama", "tied": True},
    "llama_untied": {"family": "llama", "tied": False},
    "llama3": {"family": "llama", "tied": False, "rope_parameters": LLAMA3},
    "mistral": {"family": "mistral", "tied": False, "head_dim": 16, "sliding_window": None},
    "qwen3": {"family": "qwen3", "tied": True, "head_dim": 48},
}
FULL = ("qwen2_tied", "llama_untied", "qwen3")  # every gradient in every layout; the others: log-probs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One launch for everything below."""
    root = tmp_path_factory.mktemp("gradients")
    rng = np.random.default_rng(7)
    cases, found = [], {"root": root, "models": {}, "groups": {}}
    for name, kind in MODELS.items():
        model = make_model(root / name, vocab_size=VOCAB, seed=3, spread=1.0, **kind)
        model.get_input_embeddings().padding_idx = (
            None  # torch gives a padding row no gradient; ids here are any
        )
        groups = [random_group(rng, vocab=VOCAB, depth=4, branches=3, group_id=f"g{i}") for i in range(4)]
        for group in groups:
            for tree in group.trees:
                score(model, tree, rng)
        found["models"][name], found["groups"][name] = model, groups
        full = name in FULL
        for key, layout in LAYOUTS.items():
            if full:
                cases.append(
                    Case(f"{name}_{key}", root / name, layout, _packed(groups, layout), "policy", ALGO)
                )
            if key in ("tp1pp1", "tp2", "pp2"):
                scored, spans = scoring_batch([t for g in groups for t in g.trees], spec_of(layout))
                found[f"spans_{name}_{key}"] = spans
                cases.append(Case(f"{name}_{key}_score", root / name, layout, scored, None, temperature=0.7))
        if full:
            cases.append(
                Case(f"{name}_copied", root / name, LAYOUTS["tp1pp1"], copied(groups, ALGO), "policy", ALGO)
            )
            batch = sft_batch(_chains(groups), spec_of(LAYOUTS["tp2pp2"]))[0]
            cases.append(Case(f"{name}_sft", root / name, LAYOUTS["tp2pp2"], batch, "sft"))
    run(cases, root)
    return found


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_gradients_equal_the_copied_ones(results: dict, family: str, layout: str) -> None:
    root = results["root"]
    compare(load_gradients(root / f"{family}_copied"), load_gradients(root / f"{family}_{layout}"))
    copied, packed = _loss(root / f"{family}_copied"), _loss(root / f"{family}_{layout}")
    assert packed == pytest.approx(copied, abs=1e-6)  # its terms are of order 1 and cancel


@pytest.mark.parametrize("family", FULL)
def test_copied_gradients_equal_transformers(results: dict, family: str) -> None:
    model, groups = results["models"][family], results["groups"][family]
    model.zero_grad()
    loss = _paper_loss(model, groups)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    compare(expected, load_gradients(results["root"] / f"{family}_copied"), tolerance=3e-5)
    assert _loss(results["root"] / f"{family}_copied") == pytest.approx(float(loss), rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["tp1pp1", "tp2", "pp2"])
def test_logprobs_equal_transformers(results: dict, name: str, layout: str) -> None:
    model = results["models"][name]
    spans = results[f"spans_{name}_{layout}"]
    paths = {
        id(tree.nodes[i]): (tree, i)
        for group in results["groups"][name]
        for tree in group.trees
        for i in range(len(tree.nodes))
    }
    compared = 0
    for dp, rank in enumerate(spans):
        for index, nodes in enumerate(rank):
            got = np.load(results["root"] / f"{name}_{layout}_score" / f"logprobs_{dp}_{index}.npy")
            for span in nodes:
                expected = path_logprobs(model, *paths[id(span.node)], temperature=0.7)
                np.testing.assert_allclose(got[span.start : span.stop], expected, atol=1e-4)
                compared += span.stop - span.start
    assert compared > 100


@pytest.mark.parametrize("name", FULL)
def test_sft_gradients_equal_transformers(results: dict, name: str) -> None:
    """The warm-up's loss is the mean negative log-likelihood of the action tokens."""
    model = results["models"][name]
    model.zero_grad()
    parts = [node_logprobs(model, tree) for tree in _chains(results["groups"][name])]
    (-torch.cat([part for nodes in parts for part in nodes.values()]).mean()).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    compare(expected, load_gradients(results["root"] / f"{name}_sft"), tolerance=3e-5)


def _chains(groups: list[Group]) -> list[Tree]:
    return [copy for group in groups for tree in group.trees for copy in chain_copies(tree)]


def spec_of(layout: ParallelLayout) -> PackingSpec:
    return PackingSpec(dp=layout.dp, micro_batch_tokens=70, pad_to=4, hidden_size=64)


def _packed(groups: list[Group], layout: ParallelLayout) -> list:
    return step_batch(groups, ALGO, spec_of(layout))[0]


def _paper_loss(model: torch.nn.Module, groups: list[Group]) -> torch.Tensor:
    """Eq. 8 per leaf and token, without any sum over shared tokens: 1/(P G |H|) (dual-clipped PPO - beta
    KL)."""
    total = torch.zeros(())
    for group in groups:
        rewards = [np.array([leaf.reward for leaf in tree.leaves]) for tree in group.trees]
        everyone = np.concatenate(rewards)
        for tree, own in zip(group.trees, rewards, strict=True):
            for copy, reward in zip(chain_copies(tree), own, strict=True):
                a = _z(reward, everyone) + _z(reward, own)
                total = total + _leaf_loss(model, copy, a) / (len(groups) * len(everyone))
    return total


def _z(reward: float, rewards: np.ndarray) -> float:
    spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
    return float((reward - rewards.mean()) / (spread + 1e-6)) if spread > 0 else 0.0


def _leaf_loss(model: torch.nn.Module, chain: Tree, a: float) -> torch.Tensor:
    terms = []
    for index, logprobs in node_logprobs(model, chain).items():
        node = chain.nodes[index]
        ratio = (logprobs - torch.tensor(node.old_logprobs)).exp()
        surrogate = torch.minimum(ratio * a, ratio.clamp(1 - ALGO.clip_low, 1 + ALGO.clip_high) * a)
        if a < 0:
            surrogate = torch.maximum(surrogate, torch.tensor(ALGO.clip_dual * a))
        distance = torch.tensor(node.ref_logprobs) - logprobs
        terms.append(-surrogate + ALGO.kl_coef * (distance.exp() - distance - 1))
    return torch.cat(terms).mean() if terms else torch.zeros(())


def _loss(folder: Path) -> float:
    return sum(float(file.read_text()) for file in folder.glob("loss_*.txt"))
