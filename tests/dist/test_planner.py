"""What `plan` predicts of a rank's memory, against the tensors that real ranks hold.

Second source: sizes of the storages themselves, and of those that autograd holds at any one time of a step
through Megatron's schedule: also what is in flight and what is computed again is measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron_tree.algo.batch import PackingSpec, sft_batch
from megatron_tree.config import OptimizerConfig, RecomputeConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.planner.activations import PackedTokens
from megatron_tree.planner.memory import TrainState, rank_memory
from megatron_tree.reshard.names import read_shape
from megatron_tree.train import step
from megatron_tree.train.rank import TrainRank
from tests.dist.harness import Case, run
from tests.tiny_models import make_model
from tests.toy_trees import random_tree

VOCAB = 125  # not a multiple of 2: TP 2 pads it
MODELS: dict[str, dict] = {
    "tied": {"family": "qwen2", "tied": True},
    "normed": {"family": "qwen3", "tied": False, "head_dim": 48},
    "no_groups": {"family": "llama", "tied": False, "num_kv_heads": 4},
}
FULL = RecomputeConfig(granularity="full", layers=2)
BOTH = RecomputeConfig(granularity="selective", modules=("core_attn", "mlp"))
DTYPES: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")


@dataclass(frozen=True)
class Way:
    model: str
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)


WAYS = {
    "one": Way("no_groups"),
    "one_full": Way("tied", recompute=FULL),
    "tp2_sp": Way("tied", ParallelLayout(tp=2), sequence_parallel=True),
    "tp4": Way("normed", ParallelLayout(tp=4)),  # more ranks than KV heads
    "cp2": Way("normed", ParallelLayout(cp=2), recompute=BOTH),
    "tp2_cp2_sp": Way("tied", ParallelLayout(tp=2, cp=2), sequence_parallel=True, distributed_optimizer=True),
    "pp2_uneven": Way("tied", ParallelLayout(pp=2, stage_split=(1, 3))),
    "pp2_vpp2_dp2": Way("tied", ParallelLayout(pp=2, vpp=2, dp=2), distributed_optimizer=True),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch; every rank leaves what it measured."""
    root = tmp_path_factory.mktemp("planner")
    for name, kind in MODELS.items():
        make_model(root / name, vocab_size=VOCAB, seed=3, **kind)
    run([_case(name, way, root) for name, way in WAYS.items()], root)
    return root


def _case(name: str, way: Way, root: Path) -> Case:
    """Every micro-batch is the same."""
    rng = np.random.default_rng(5)
    lengths = {"action_tokens": (10, 20), "observation_tokens": (10, 20)}
    trees = [
        random_tree(rng, vocab=VOCAB, prompt_tokens=30, depth=4, branches=3, group_id=str(i), **lengths)
        for i in range(2)
    ]
    case = Case(
        name,
        root / way.model,
        way.layout,
        [],
        then=_measure,
        sequence_parallel=way.sequence_parallel,
        distributed_optimizer=way.distributed_optimizer,
        recompute=way.recompute,
    )
    spec = PackingSpec(1, 2000, case.setup.parallel.token_multiple, hidden_size=128)
    one = sft_batch(trees, spec)[0][0][0]
    case.batch.extend([[one] * 2 * way.layout.pp] * way.layout.dp)
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WAYS)
def test_predicted_bytes_are_those_of_real_ranks(
    root: Path, name: str, dtype: Literal["fp32", "bf16"]
) -> None:
    """Weights and gradients exact; optimizer within 0.1 % (shards differ by padding). Activations within
    0.1 %, but in bf16 stages also hold what they received, which autograd does not save: up to 7 % here."""
    way, case = WAYS[name], _case(name, WAYS[name], root)
    shape = read_shape(root / way.model)
    for rank in way.layout.ranks():
        measured = json.loads((root / name / f"{dtype}_{rank}.json").read_text())
        one, *others = case.share(rank)
        packed = PackedTokens(len(one.subtree_end), one.num_trained * way.layout.cp, 0)
        state = TrainState(dtype, "node", packed, 1 + len(others), reference=False, recompute=way.recompute)
        stage = way.layout.coordinates(rank).pp
        predicted = rank_memory(shape, case.setup.parallel, stage, state)
        assert (predicted.weights, predicted.gradients) == (measured["weights"], measured["gradients"])
        assert predicted.optimizer == pytest.approx(measured["optimizer"], rel=1e-3)
        more = predicted.activations / measured["activations"] - 1
        assert -1e-3 <= more <= (0.07 if dtype == "bf16" and way.layout.pp > 1 else 1e-3), rank


def _measure(trainer: TrainRank, case: Case, out: Path) -> None:
    for dtype in DTYPES:
        rank = TrainRank(trainer.rank, replace(trainer.setup, dtype=dtype))
        rank.shape = trainer.shape
        rank.actor = rank._build()
        rank._load(rank.actor, str(case.model))
        rank.wrapped = step.wrap(rank.actor, distributed_optimizer=case.distributed_optimizer)
        rank.begin(OptimizerConfig(), 1)
        weights = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in _parameters(rank))}
        held = Held(frozenset(weights))
        with torch.autograd.graph.saved_tensors_hooks(partial(Saved, held), lambda saved: saved.tensor):
            rank.train(case.share(trainer.rank), "sft")
        buffers = [buffer for chunk in rank.wrapped for buffer in chunk.buffers]
        found = {
            "weights": sum(weights.values()),
            "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
            "optimizer": _optimizer_bytes(rank.optimizer),
            "activations": held.most,
        }
        (out / f"{dtype}_{trainer.rank}.json").write_text(json.dumps(found))


def _parameters(rank: TrainRank) -> list[torch.nn.Parameter]:
    return [param for chunk in rank.actor for param in chunk.parameters()]


class Held:
    """Bytes of the storages that autograd holds, each once, without the weights."""

    def __init__(self, weights: frozenset[int]) -> None:
        self.weights = weights
        self.counts: dict[int, int] = {}
        self.now = self.most = 0

    def add(self, storage: torch.UntypedStorage, count: int) -> None:
        key = storage.data_ptr()
        if key in self.weights:
            return
        before = self.counts.get(key, 0)
        self.counts[key] = before + count
        if before == 0 or self.counts[key] == 0:
            self.now += count * storage.nbytes()
            self.most = max(self.most, self.now)


class Saved:
    """What autograd keeps instead of a tensor until the backward pass drops it."""

    def __init__(self, held: Held, tensor: torch.Tensor) -> None:
        self.tensor, self.held = tensor.detach(), held  # attached it would keep the graph that keeps it
        held.add(self.tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.held.add(self.tensor.untyped_storage(), -1)


def _optimizer_bytes(optimizer: MegatronOptimizer) -> int:
    tensors = []
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            tensors += [value for value in state.values() if torch.is_tensor(value)]
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            for group in getattr(part, name, []):
                tensors += group
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
