"""Ways of computing one step: layouts and options over the same models and trees, each a case of `harness`,
and how far a way is off from one rank without sharing (every leaf's whole path a sequence of its own)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tree.algo.batch import PackingSpec, step_batch
from megatron_tree.config import AlgoConfig, RecomputeConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.types import Group
from tests.dist.harness import Case
from tests.dist.reference import compare, copied, load_gradients, score
from tests.tiny_models import make_model
from tests.toy_trees import random_group

ALGO = AlgoConfig(kl_coef=0.1)
VOCAB = 125  # not a multiple of 2: tensor parallelism pads it
FULL = RecomputeConfig(granularity="full")
PAIRS = RecomputeConfig(granularity="full", layers=2)
CORE = RecomputeConfig(granularity="selective")
MLP = RecomputeConfig(granularity="selective", modules=("core_attn", "mlp"))
RECOMPUTED = {RecomputeConfig(): [], FULL: ["full"], PAIRS: ["full-2"], CORE: ["core"], MLP: ["core-mlp"]}
MODELS = {
    "tied": {"family": "qwen2", "tied": True, "num_layers": 4},  # qkv biases
    "untied": {"family": "qwen3", "tied": False, "num_layers": 4, "head_dim": 48},  # q/k norms
}


@dataclass(frozen=True)
class Way:
    """One way of computing the same step."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    model: str = "tied"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    micro_batch_tokens: int = 80
    equal_lengths: bool = False  # every micro-batch is padded to micro_batch_tokens

    def __str__(self) -> str:
        at, words = self.layout, [self.model]
        sizes = {axis: getattr(at, axis) for axis in ("tp", "pp", "vpp", "cp", "dp")}
        words += [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        words += [f"split{'-'.join(map(str, at.stage_split))}"] if at.stage_split else []
        words += ["sp"] * self.sequence_parallel + ["dopt"] * self.distributed_optimizer
        words += RECOMPUTED[self.recompute]
        words += [f"mb{self.micro_batch_tokens}"] if self.micro_batch_tokens != 80 else []
        return "_".join(words)


def make_models(root: Path) -> dict[str, list[Group]]:
    """A folder of each model and scored trees for it."""
    found = {}
    for name, kind in MODELS.items():
        rng = np.random.default_rng(7)
        model = make_model(root / name, vocab_size=VOCAB, seed=3, spread=1.0, **kind)
        groups = [random_group(rng, vocab=VOCAB, depth=4, branches=3, group_id=f"g{i}") for i in range(4)]
        for tree in (tree for group in groups for tree in group.trees):
            score(model, tree, rng)
        found[name] = groups
    return found


def copied_case(model: str, root: Path, groups: list[Group]) -> Case:
    """The second source."""
    return Case(f"{model}_copied", root / model, ParallelLayout(), copied(groups, ALGO), "policy", ALGO)


def case_of(way: Way, root: Path, groups: list[Group], name: str | None = None, **options: Any) -> Case:
    case = Case(
        name or str(way),
        root / way.model,
        way.layout,
        [],
        "policy",
        ALGO,
        sequence_parallel=way.sequence_parallel,
        distributed_optimizer=way.distributed_optimizer,
        recompute=way.recompute,
        **options,
    )
    spec = PackingSpec(
        dp=way.layout.dp,
        micro_batch_tokens=way.micro_batch_tokens,
        pad_to=way.micro_batch_tokens if way.equal_lengths else case.setup.parallel.token_multiple,
        hidden_size=128,
        count_multiple=way.layout.pp if way.layout.vpp > 1 else 1,
    )
    case.batch.extend(step_batch(groups, ALGO, spec)[0])
    return case


def off(root: Path, name: str, model: str, tolerance: float) -> tuple[float, float, float]:
    """How far case `name` is from the copied paths: its loss, absolute (its terms are of order 1 and cancel);
    its gradient norm on the worst rank and the worst of its gradients, relative. AssertionError where a
    gradient exceeds the tolerance (`reference.compare`)."""
    here, there = root / name, root / f"{model}_copied"
    expected = load_gradients(there)
    norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in expected.values()))
    norms = [float(file.read_text()) for file in here.glob("norm_*.txt")]
    worst = compare(expected, load_gradients(here), tolerance)
    return _loss(here) - _loss(there), max(abs(found / norm - 1) for found in norms), worst


def _loss(folder: Path) -> float:
    return sum(float(file.read_text()) for file in folder.glob("loss_*.txt"))
