"""What gradients are compared with: every leaf's whole path as a sequence of its own, and transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from megatron_tree.algo import advantage
from megatron_tree.algo.packing import cut, join, node_weights, pack
from megatron_tree.config import AlgoConfig
from megatron_tree.types import Group, StepBatch, Tree
from tests.toy_trees import chain_copies


def copied(groups: list[Group], algo: AlgoConfig) -> StepBatch:
    """Each leaf a sequence of its own, with the advantages and weights of the trees it comes from."""
    weights = advantage.leaf_weights([group.trees for group in groups], algo.normaliser)
    batches = []
    for group, prompt_weights in zip(groups, weights, strict=True):
        totals = advantage.advantages(group, algo).total
        for tree, a, c in zip(group.trees, totals, prompt_weights, strict=True):
            for index, copy in enumerate(chain_copies(tree)):
                node = node_weights(copy, a[index : index + 1], c[index : index + 1])
                batches.append(pack(cut(join([(copy, node)]), 10_000), pad_to=1).micro_batch)
    return [batches]


def node_logprobs(model: torch.nn.Module, tree: Tree, temperature: float = 1.0) -> dict[int, torch.Tensor]:
    """Log-probs of each node's actions of a chain, by transformers."""
    ids = np.concatenate([np.concatenate([n.action_ids, n.observation_ids]) for n in tree.nodes])
    logits = model(torch.tensor(ids, dtype=torch.long)[None]).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)
    found, start = {}, 0
    for index, node in enumerate(tree.nodes):
        count = len(node.action_ids)
        if count:
            rows = torch.arange(start - 1, start - 1 + count)
            found[index] = logprobs[rows, torch.tensor(node.action_ids, dtype=torch.long)]
        start += node.num_tokens
    return found


def path_logprobs(model: torch.nn.Module, tree: Tree, node: int, temperature: float) -> np.ndarray:
    path = tree.path(node)
    chain = Tree(tree.group_id, 0, [tree.nodes[i] for i in path], [])
    with torch.no_grad():
        return node_logprobs(model, chain, temperature)[len(path) - 1].numpy()


def score(model: torch.nn.Module, tree: Tree, rng: np.random.Generator) -> None:
    """Old and reference log-probs near the model's, far enough to clip some tokens on both sides."""
    for index, node in enumerate(tree.nodes):
        if len(node.action_ids):
            now = path_logprobs(model, tree, index, 1.0)
            node.old_logprobs = (now + rng.normal(0, 0.3, len(now))).astype(np.float32)
            node.ref_logprobs = (now + rng.normal(0, 0.3, len(now))).astype(np.float32)


def compare(expected: dict, got: dict, tolerance: float = 1e-5) -> float:
    """Each tensor within `tolerance` by its norm, and no entry off by more than 3 tolerances of the largest.

    Tensors that are all but zero are measured against the model's largest entry. Returns the largest
    difference by norm.
    """
    assert set(expected) >= set(got)
    scale = max(float(t.abs().max()) for t in expected.values())
    assert scale > 0
    largest = 0.0
    for name, tensor in got.items():
        difference, size = expected[name] - tensor, max(float(expected[name].abs().max()), 1e-2 * scale)
        by_norm = float(difference.norm()) / max(float(expected[name].norm()), size)
        by_entry = float(difference.abs().max()) / size
        assert by_norm <= tolerance, f"{name}: {by_norm:.2e} of its norm"
        assert by_entry <= 3 * tolerance, f"{name}: {by_entry:.2e} of its largest entry"
        largest = max(largest, by_norm)
    return largest


def load_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """As `harness` writes them: gathered through the slice plan."""
    return load_file(folder / "gradients.safetensors")
