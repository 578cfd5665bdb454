"""The Megatron side of `bench_pipeline`: two stages, each a process with one torch thread pinned to a core.

Every pass that Megatron's schedules run is timed where they call it, so that what is between two passes is
waiting, sending and the schedule itself. For each number of virtual stages the ranks start anew in the same
processes. Left out: tensor and data parallelism.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from megatron_tree.algo.batch import PackingSpec, sft_batch
from megatron_tree.config import AlgoConfig, OptimizerConfig, ParallelConfig
from megatron_tree.planner.schedule import Pass, passes
from megatron_tree.train.group import RankSetup
from megatron_tree.types import MicroBatch
from tools import bench_ranks
from tools.bench_trees import TreeShape, grow

if TYPE_CHECKING:
    from megatron_tree.train.rank import TrainRank

Span = tuple[float, float]  # seconds of the clock that a host's processes share
Clocked = tuple[Span, float]  # and the processor seconds in it
TREE = TreeShape(
    1, 2, 1, depth=3, prompt_tokens=48, action_tokens=32, observation_tokens=48, answer_tokens=16
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the ranks are to measure."""

    model: str
    sizes: dict[int, tuple[int, ...]]  # of each vpp: micro-batches of a step, each the same one
    steps: int  # timed ones of each size, behind one that is not


@dataclass(frozen=True, slots=True)
class Timed:
    """A pass as it was run."""

    one: Pass
    span: Span
    processor_s: float  # of it; less than the span where others used the core


@dataclass(frozen=True, slots=True)
class Run:
    """One optimizer step, on all stages."""

    step: Span  # from the first rank's start to the last one's end
    pipeline: Span  # of it, forward and backward passes and what is between them
    passes: tuple[tuple[Timed, ...], ...]  # of each stage, in the order it ran them

    @property
    def seconds(self) -> float:
        return self.step[1] - self.step[0]

    @property
    def wall(self) -> float:
        return self.pipeline[1] - self.pipeline[0]

    @property
    def busy(self) -> tuple[float, ...]:
        """Of each stage."""
        return tuple(sum(ran.span[1] - ran.span[0] for ran in stage) for stage in self.passes)

    @property
    def bubble(self) -> float:
        return 1 - sum(self.busy) / (len(self.busy) * self.wall)


Runs = dict[int, dict[int, list[Run]]]  # by vpp, then by the number of micro-batches


def run_ranks(plan: Plan, pp: int) -> tuple[Runs, int]:
    """The steps, and the tokens of a micro-batch."""
    return bench_ranks.run_ranks(pp, partial(_rank, pp, plan), pinned=True)


def _rank(pp: int, plan: Plan, rank: int, store: dist.Store) -> tuple[Runs, int]:
    from megatron_tree.train.rank import TrainRank, stop_megatron

    found: Runs = {}
    for vpp, sizes in plan.sizes.items():
        setup = RankSetup(plan.model, ParallelConfig(pp=pp, vpp=vpp), "fp32", 1.0, AlgoConfig(), 600.0, 1)
        trainer = TrainRank(rank, setup)
        trainer._store = dist.PrefixStore(f"vpp{vpp}", store)
        trainer.start(("", 0), plan.model)
        # the weights stay as they are: fp32 does not see such a step
        trainer.begin(OptimizerConfig(lr=1e-30, weight_decay=0.0), 1000)
        bench = Bench(trainer)
        found[vpp] = {size: bench.runs(size, plan.steps) for size in sizes}
        stop_megatron()
    return found, bench.batch.num_tokens


class Bench:
    """One rank's part of one number of virtual stages."""

    def __init__(self, trainer: TrainRank) -> None:
        self._trainer = trainer
        trees = grow(TREE, trainer.shape.vocab, np.random.default_rng(1), "prompt").trees
        spec = PackingSpec(1, 10**6, 1, trainer.shape.hidden)
        self.batch: MicroBatch = sft_batch(trees, spec)[0][0][0]

    def runs(self, size: int, steps: int) -> list[Run]:
        self._run(size)
        return [self._run(size) for _ in range(steps)]

    def _run(self, size: int) -> Run:
        """What this rank and the others saw of one step."""
        pipeline: list[Clocked] = []
        forward: list[Clocked] = []
        backward: list[Clocked] = []
        accumulate = self._trainer.accumulate
        self._trainer.accumulate = _clocked(accumulate, pipeline)  # type: ignore[method-assign]
        dist.barrier()
        began = time.perf_counter()
        with _PassTimes(forward, backward):
            self._trainer.train([self.batch] * size, "sft")
        step = (began, time.perf_counter())
        self._trainer.accumulate = accumulate  # type: ignore[method-assign]
        layout = self._trainer.layout
        order = passes(layout, layout.coordinates(self._trainer.rank).pp, size)
        mine = (step, pipeline[0][0], _in_order(order, forward, backward))
        seen: list[Any] = [None] * layout.world_size
        dist.all_gather_object(seen, mine)
        steps, pipelines, ran = zip(*seen, strict=True)
        return Run(_around(steps), _around(pipelines), tuple(ran))


class _PassTimes:
    """Inside, each pass of Megatron's schedules leaves its times."""

    def __init__(self, forward: list[Clocked], backward: list[Clocked]) -> None:
        from megatron.core.pipeline_parallel import schedules

        self._module = schedules
        self._kept = (schedules.forward_step, schedules.backward_step)
        self._times = (forward, backward)

    def __enter__(self) -> None:
        self._module.forward_step, self._module.backward_step = map(_clocked, self._kept, self._times)

    def __exit__(self, *_: object) -> None:
        self._module.forward_step, self._module.backward_step = self._kept


def _clocked(function: Callable[..., Any], times: list[Clocked]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        used, began = time.thread_time(), time.perf_counter()
        result = function(*args, **kwargs)
        times.append(((began, time.perf_counter()), time.thread_time() - used))
        return result

    return call


def _in_order(order: list[Pass], forward: list[Clocked], backward: list[Clocked]) -> tuple[Timed, ...]:
    """Times beside the passes of our own schedule, whose turns of forward and backward must be Megatron's."""
    ran = sorted([(*times, True) for times in forward] + [(*times, False) for times in backward])
    assert [way for *_, way in ran] == [one.forward for one in order], "Megatron runs another schedule"
    return tuple(Timed(one, span, used) for one, (span, used, _) in zip(order, ran, strict=True))


def _around(spans: tuple[Span, ...]) -> Span:
    return min(start for start, _ in spans), max(stop for _, stop in spans)
