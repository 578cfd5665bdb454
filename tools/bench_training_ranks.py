"""The Megatron side of `bench_training`: real ranks, each a process with one torch thread pinned to a core.

Three forms of one step take turns, from the first rank's start to the last one's end: packed trees with our
attention (`ours`), every leaf's whole path with the same attention (`copied`), packed trees with one dense
mask (`dense`). Nothing else differs: model, schedule, optimizer, token budget, head on trained tokens only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from megatron_tree.algo.batch import PackingSpec, scoring_batch, step_batch
from megatron_tree.algo.packing import scatter
from megatron_tree.config import AlgoConfig, OptimizerConfig
from megatron_tree.planner.work import layer_parameters
from megatron_tree.reshard.names import ModelShape
from megatron_tree.train.group import RankSetup
from megatron_tree.types import Group, MicroBatch
from tools import bench_ranks
from tools.bench_reshard_engine import Figures
from tools.bench_trees import TreeShape, copied_batch, grow, trained_tokens

if TYPE_CHECKING:
    from megatron_tree.train.backends import Attend
    from megatron_tree.train.rank import TrainRank
    from megatron_tree.train.tree_mask import TreeMask

ALGO = AlgoConfig()
GEMM_SIZE = 1024
FORMS = ("ours", "copied", "dense")


@dataclass(frozen=True, slots=True)
class Plan:
    """What the ranks are to measure."""

    shapes: tuple[TreeShape, ...]
    prompts: int
    micro_batch_tokens: int
    steps: int  # timed ones of each form, behind one that is not
    profile: bool


def run_ranks(setup: RankSetup, plan: Plan) -> list[Figures]:
    """Figures of each shape."""
    return bench_ranks.run_ranks(setup.layout.world_size, partial(_rank, setup, plan), pinned=True)


def _rank(setup: RankSetup, plan: Plan, rank: int, store: dist.Store) -> list[Figures]:
    from megatron_tree.train.rank import TrainRank, stop_megatron

    trainer = TrainRank(rank, setup)
    trainer._store = store
    trainer.start(("", 0), setup.model_path)
    # the weights stay as they are: fp32 does not see such a step
    trainer.begin(OptimizerConfig(lr=1e-30, weight_decay=0.0), 1000)
    figures = [Bench(trainer, plan, shape).run() for shape in plan.shapes]
    stop_megatron()
    return figures


class Bench:
    """One rank's part of one shape."""

    def __init__(self, trainer: TrainRank, plan: Plan, shape: TreeShape) -> None:
        self._trainer, self._plan = trainer, plan
        self._spec = PackingSpec(1, plan.micro_batch_tokens, 1, trainer.shape.hidden)
        vocab, generator = trainer.shape.vocab, np.random.default_rng(1)
        self._groups = [grow(shape, vocab, generator, f"prompt{i}") for i in range(plan.prompts)]
        score(trainer, self._groups, self._spec)
        (packed,), metrics = step_batch(self._groups, ALGO, self._spec)
        self._token_ratio = metrics["packing/copied_over_unique"].value
        copied = copied_batch(self._groups, ALGO, self._spec)[0]
        self._batches = {"ours": packed, "copied": copied, "dense": packed}

    def run(self) -> Figures:
        gradients = {form: self._gradients(form) for form in FORMS}  # also the steps that are not timed
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        busy: dict[str, list[float]] = {form: [] for form in FORMS}
        rates = []
        for _ in range(self._plan.steps):
            rates.append(self._gemm_rate())
            for form in FORMS:
                wall, cpu = self._time(lambda form=form: self._step(form))
                times[form].append(wall)
                busy[form].append(cpu)
        if self._plan.profile:
            self._profile()
        seconds, cpu_seconds = ({form: median(x) for form, x in of.items()} for of in (times, busy))
        flops = {form: matmul_flops(self._trainer.shape, self._batches[form]) for form in FORMS}
        return {
            "token_ratio": self._token_ratio,
            "flop_ratio": flops["copied"] / flops["ours"],
            "speedup_over_copied": seconds["copied"] / seconds["ours"],
            "speedup_over_dense_mask": seconds["dense"] / seconds["ours"],
            "cpu_speedup_over_copied": cpu_seconds["copied"] / cpu_seconds["ours"],
            "cpu_speedup_over_dense_mask": cpu_seconds["dense"] / cpu_seconds["ours"],
            "max_rel_grad_diff": self._difference(gradients["copied"], gradients["ours"]),
            "max_rel_grad_diff_dense": self._difference(gradients["copied"], gradients["dense"]),
            "lm_head_rows_over_trained_tokens": self._head_rows() / trained_tokens(self._groups),
            "matmul_efficiency": flops["ours"] / cpu_seconds["ours"] / max(rates),
            "tokens": {form: sum(batch.num_tokens for batch in self._batches[form]) for form in FORMS},
            "micro_batches": {form: len(self._batches[form]) for form in FORMS},
            "gemm_gflops_of_a_rank": max(rates) / 1e9,
            "wall_seconds": {form: sorted(found) for form, found in times.items()},
            "cpu_seconds": {form: sorted(found) for form, found in busy.items()},
        }

    def _step(self, form: str) -> None:
        with self._attention(form):
            self._trainer.train(self._batches[form], "policy")

    def _gradients(self, form: str) -> list[Tensor]:
        with self._attention(form):
            return gradients(self._trainer, self._batches[form])

    def _attention(self, form: str) -> AbstractContextManager[None]:
        return attending(self._trainer, dense_attention) if form == "dense" else nullcontext()

    def _difference(self, expected: list[Tensor], got: list[Tensor]) -> float:
        """The largest of any parameter's gradient, over all ranks."""
        told = torch.tensor(max(differences(expected, got)))
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return float(told)

    def _head_rows(self) -> int:
        """Rows that enter the output layer in one step of ours."""
        rows = torch.zeros((), dtype=torch.int64)

        def count(_: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            rows.add_(len(args[0]))

        heads = [chunk.output_layer for chunk in self._trainer.actor if chunk.post_process]
        hooks = [head.register_forward_pre_hook(count) for head in heads]
        self._step("ours")
        for hook in hooks:
            hook.remove()
        dist.all_reduce(rows, op=dist.ReduceOp.MAX)
        return int(rows)

    def _gemm_rate(self) -> float:
        """FLOP/s of square fp32 products while all ranks compute, by processor time; the best of any rank."""
        a, b, out = (torch.ones(GEMM_SIZE, GEMM_SIZE) for _ in range(3))
        times = []
        dist.barrier()
        for _ in range(10):
            began = time.process_time()
            torch.mm(a, b, out=out)
            times.append(time.process_time() - began)
        rate = torch.tensor(2 * GEMM_SIZE**3 / min(times), dtype=torch.float64)
        dist.all_reduce(rate, op=dist.ReduceOp.MAX)
        return float(rate)

    def _time(self, act: Callable[[], None]) -> tuple[float, float]:
        """Seconds from the first rank's start to the last one's end (a host's processes share the clock), and
        processor seconds of all ranks together, which other work on the machine does not lengthen."""
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        act()
        spans: list[Any] = [None] * self._trainer.layout.world_size
        dist.all_gather_object(spans, (began, time.perf_counter(), time.process_time() - busy))
        starts, ends, busy_seconds = zip(*spans, strict=True)
        return max(ends) - min(starts), sum(busy_seconds)

    def _profile(self) -> None:
        """Prints rank 0's operators of one step of each packed form."""
        for form in ("ours", "dense"):
            with torch.profiler.profile() as profile:
                self._step(form)
            if self._trainer.rank == 0:
                table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20)
                print(f"{form}, rank 0:\n{table}", file=sys.stderr)


def score(trainer: TrainRank, groups: Sequence[Group], spec: PackingSpec) -> None:
    """Old log-probs by the trainer, as in an iteration; reference ones a little off."""
    trees = [tree for group in groups for tree in group.trees]
    (batch,), spans = scoring_batch(trees, spec)
    told = [trainer.score(batch, "actor")]
    dist.broadcast_object_list(told, src=trainer.layout.output_ranks()[0])
    assert told[0] is not None
    generator = np.random.default_rng(2)
    noisy = [scored + generator.normal(0, 0.1, len(scored)) for scored in told[0]]
    scatter(spans, [told[0]], "old_logprobs")
    scatter(spans, [noisy], "ref_logprobs")


@contextmanager
def attending(trainer: TrainRank, attend: Attend) -> Iterator[None]:
    """Inside, every layer of the actor attends by `attend`."""
    from megatron_tree.train.attention import TreeAttention

    layers = [m for chunk in trainer.actor for m in chunk.modules() if isinstance(m, TreeAttention)]
    kept = [layer.attend for layer in layers]
    for layer in layers:
        layer.attend = attend
    yield
    for layer, before in zip(layers, kept, strict=True):
        layer.attend = before


def gradients(trainer: TrainRank, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """A rank's own of one step, not applied, in the order of its parameters."""
    with trainer._in("bench"):
        trainer.accumulate(batches, "policy")
    return [p.main_grad.clone() for chunk in trainer.actor for p in chunk.parameters()]


def differences(expected: Sequence[Tensor], got: Sequence[Tensor]) -> list[float]:
    """Of each parameter's gradient, relative to its norm."""
    return [float((a - b).norm() / a.norm()) for a, b in zip(expected, got, strict=True) if a.norm() > 0]


def matmul_flops(shape: ModelShape, batches: Sequence[MicroBatch]) -> float:
    """Of one step's forward and backward products over what is packed, recomputed scores left out."""
    tokens = sum(batch.num_tokens for batch in batches)
    trained = sum(batch.num_trained for batch in batches)
    keys = sum(int((batch.subtree_end - np.arange(batch.num_tokens)).sum()) for batch in batches)
    layer = 2 * layer_parameters(shape) * tokens + 4 * shape.heads * shape.head_dim * keys
    return 3 * (shape.num_layers * layer + 2 * shape.hidden * shape.vocab * trained)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask) -> Tensor:
    """The baseline: torch's fused attention under one S x S mask, made once per micro-batch. It is additive,
    since torch would turn a boolean one into that in every call."""
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    bias = _bias(mask.subtree_end.tobytes(), query.device, query.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)[0].transpose(0, 1)


@lru_cache(maxsize=16)
def _bias(subtree_end: bytes, device: torch.device, dtype: torch.dtype) -> Tensor:
    end = torch.from_numpy(np.frombuffer(subtree_end, dtype=np.int64).copy()).to(device)
    index = torch.arange(len(end), device=device)
    visible = (index <= index[:, None]) & (index[:, None] < end)
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, float("-inf"))
