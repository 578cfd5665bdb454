"""One gradient, whatever the layout: loss, gradient norm and every gradient of packed trees.

Over tp, pp, vpp, dp, cp, uneven stages, sequence parallelism, the distributed optimizer, recomputation,
micro-batch split, vocabulary padding and tied embeddings. Second source: one rank without sharing (every
leaf's whole path a sequence of its own), itself held against transformers in test_gradients.
`make test-layouts` runs every way and prints the table; `make test` runs those of BRIEF.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from megatron_tree.algo.batch import PackingSpec, step_batch
from megatron_tree.config import AlgoConfig, RecomputeConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.types import Group
from tests.dist.harness import Case, run
from tests.dist.reference import compare, copied, load_gradients, score
from tests.tiny_models import make_model
from tests.toy_trees import random_group

TOLERANCE = 1e-5  # relative, fp32
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

    def __str__(self) -> str:
        at, words = self.layout, [self.model]
        sizes = {axis: getattr(at, axis) for axis in ("tp", "pp", "vpp", "cp", "dp")}
        words += [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        words += [f"split{'-'.join(map(str, at.stage_split))}"] if at.stage_split else []
        words += ["sp"] * self.sequence_parallel + ["dopt"] * self.distributed_optimizer
        words += RECOMPUTED[self.recompute]
        words += [f"mb{self.micro_batch_tokens}"] if self.micro_batch_tokens != 80 else []
        return "_".join(words)


BRIEF = (
    Way(ParallelLayout(tp=2, pp=2, vpp=2), sequence_parallel=True),
    Way(ParallelLayout(pp=2, vpp=2), "untied", recompute=FULL),
    Way(ParallelLayout(cp=2, dp=2), distributed_optimizer=True),
    Way(ParallelLayout(tp=2, cp=2), "untied", sequence_parallel=True, recompute=MLP),
    Way(ParallelLayout(pp=2, stage_split=(1, 3)), micro_batch_tokens=160),
)
ALL = (
    *BRIEF,
    Way(),
    Way(micro_batch_tokens=1000),
    Way(recompute=PAIRS),
    Way(ParallelLayout(tp=2)),
    Way(ParallelLayout(tp=2), sequence_parallel=True),
    Way(ParallelLayout(tp=2), "untied", sequence_parallel=True, recompute=FULL),
    Way(ParallelLayout(tp=4), "untied"),  # more ranks than KV heads
    Way(ParallelLayout(tp=4), sequence_parallel=True),
    Way(ParallelLayout(pp=2)),
    Way(ParallelLayout(pp=4), "untied", recompute=CORE),
    Way(ParallelLayout(pp=3, stage_split=(1, 2, 1))),
    Way(ParallelLayout(pp=2, vpp=2)),
    Way(ParallelLayout(pp=2, vpp=2, stage_split=(0, 2, 1, 1)), recompute=CORE),
    Way(ParallelLayout(pp=4, vpp=1, dp=2), "untied", distributed_optimizer=True),
    Way(ParallelLayout(cp=2)),
    Way(ParallelLayout(cp=4), "untied", recompute=FULL),
    Way(ParallelLayout(dp=2)),
    Way(ParallelLayout(dp=2), "untied", distributed_optimizer=True),
    Way(ParallelLayout(dp=4), distributed_optimizer=True, micro_batch_tokens=160),
    Way(ParallelLayout(tp=2, pp=2), "untied"),
    Way(ParallelLayout(pp=2, vpp=2, dp=2), "untied", distributed_optimizer=True),
    Way(ParallelLayout(pp=2, vpp=2, cp=2), recompute=MLP),
    Way(ParallelLayout(tp=2, pp=2, cp=2), "untied", sequence_parallel=True, recompute=FULL),
    Way(ParallelLayout(tp=2, pp=2, dp=2), sequence_parallel=True, distributed_optimizer=True),
    Way(ParallelLayout(pp=2, cp=2, dp=2), distributed_optimizer=True),
)


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch for the ways that were asked for."""
    root = tmp_path_factory.mktemp("layouts")
    wanted = {item.callspec.params["way"] for item in request.session.items if item.fspath == request.fspath}
    cases = []
    for name, kind in MODELS.items():
        rng = np.random.default_rng(7)
        model = make_model(root / name, vocab_size=VOCAB, seed=3, spread=1.0, **kind)
        groups = [random_group(rng, vocab=VOCAB, depth=4, branches=3, group_id=f"g{i}") for i in range(4)]
        for tree in (tree for group in groups for tree in group.trees):
            score(model, tree, rng)
        cases.append(
            Case(f"{name}_copied", root / name, ParallelLayout(), copied(groups, ALGO), "policy", ALGO)
        )
        cases += [_case(way, root, groups) for way in ALL if way in wanted and way.model == name]
    run(cases, root, timeout_s=900)
    return root


def _case(way: Way, root: Path, groups: list[Group]) -> Case:
    case = Case(
        str(way),
        root / way.model,
        way.layout,
        [],
        "policy",
        ALGO,
        sequence_parallel=way.sequence_parallel,
        distributed_optimizer=way.distributed_optimizer,
        recompute=way.recompute,
    )
    spec = PackingSpec(
        dp=way.layout.dp,
        micro_batch_tokens=way.micro_batch_tokens,
        pad_to=case.setup.parallel.token_multiple,
        hidden_size=128,
        count_multiple=way.layout.pp if way.layout.vpp > 1 else 1,
    )
    case.batch.extend(step_batch(groups, ALGO, spec)[0])
    return case


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in BRIEF else pytest.mark.full, id=str(way)) for way in ALL]
)
def test_gradients_do_not_depend_on_the_layout(
    root: Path, way: Way, record_property: Callable[[str, object], None]
) -> None:
    expected, loss = load_gradients(root / f"{way.model}_copied"), _loss(root / f"{way.model}_copied")
    norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in expected.values()))
    here = root / str(way)
    norms = {float(file.read_text()) for file in here.glob("norm_*.txt")}
    norm_off = max(abs(found / norm - 1) for found in norms)
    worst = compare(expected, load_gradients(here), TOLERANCE)
    row = (str(way), way.layout.world_size, _loss(here) - loss, norm_off, worst)
    record_property("layout", row)
    assert norm_off <= TOLERANCE
    assert _loss(here) == pytest.approx(loss, abs=1e-6)  # its terms are of order 1 and cancel


def _loss(folder: Path) -> float:
    return sum(float(file.read_text()) for file in folder.glob("loss_*.txt"))
