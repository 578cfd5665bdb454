"""Runs Megatron ranks in processes of their own: one launch for all modules, many layouts.

A process costs seconds to import, so each case re-initialises the parallel state in the same processes; ranks
beyond a case's world size wait for the next case. A failure ends them all. Results come back as files:
log-probs as .npy, gradients as a model image written through the slice plan (each owner its slices), so that
a wrong plan shows as a wrong gradient.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_tree.algo import context
from megatron_tree.config import AlgoConfig, Fp8Config, OptimizerConfig, ParallelConfig, RecomputeConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.train.group import Objective, RankSetup
from megatron_tree.train.rank import TrainRank, by_chunk
from megatron_tree.types import MicroBatch, StepBatch


@dataclass(frozen=True)
class Case:
    name: str
    model: Path
    layout: ParallelLayout
    batch: StepBatch  # [dp][num_microbatches]
    objective: Objective | None = "policy"  # None: log-probs only
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    temperature: float = 1.0
    then: Callable[[TrainRank, Case, Path], None] | None = None  # what a rank does instead
    within: Callable[[], AbstractContextManager[object]] = nullcontext  # entered on every rank
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    fp8: Fp8Config | None = None

    def share(self, rank: int) -> list[MicroBatch]:
        at = self.layout.coordinates(rank)
        return context.split(self.batch, self.layout)[at.dp][at.cp]

    @property
    def setup(self) -> RankSetup:
        layout = {field.name: getattr(self.layout, field.name) for field in fields_of(self.layout)}
        parallel = ParallelConfig(
            **layout,
            sequence_parallel=self.sequence_parallel,
            distributed_optimizer=self.distributed_optimizer,
        )
        return RankSetup(
            str(self.model),
            parallel,
            "fp32",
            self.temperature,
            self.algo,
            120.0,
            1,
            self.recompute,
            fp8=self.fp8,
        )


_ranks: list[tuple[SpawnProcess, Connection]] = []  # until `stop`


def run(cases: list[Case], out: Path, timeout_s: float = 300) -> None:
    """Writes `out/<case>/…`. Raises where a rank fails."""
    world = max(case.layout.world_size for case in cases)
    while len(_ranks) < world:
        _ranks.append(_launch(len(_ranks)))
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    for _, pipe in _ranks[:world]:
        pipe.send((store.port, cases, out))
    if fault := _fault(timeout_s, [pipe for _, pipe in _ranks[:world]]):
        stop()  # the others may hang
        raise AssertionError(fault)


def _fault(timeout_s: float, pipes: list[Connection]) -> str | None:
    """Of the first rank that ends before its cases are done; what it raised is on its stderr."""
    deadline, waiting = time.monotonic() + timeout_s, dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), deadline - time.monotonic())
        if not ready:
            return f"ranks {sorted(waiting.values())} did not finish in {timeout_s} s"
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                pipe.recv()
            except EOFError:
                return f"rank {rank} failed: its traceback is on stderr"
    return None


def stop() -> None:
    while _ranks:
        process, _ = _ranks.pop()
        process.kill()
        process.join()


def _launch(rank: int) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_rank, args=(rank, theirs))
    process.start()
    theirs.close()
    return process, ours


def _rank(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        port, cases, out = pipe.recv()
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        for case in cases:
            if rank < case.layout.world_size:
                with case.within():
                    _run_case(rank, case, dist.PrefixStore(case.name, store), out / case.name)
        pipe.send("done")


def _run_case(rank: int, case: Case, store: dist.Store, out: Path) -> None:
    trainer = TrainRank(rank, case.setup)
    trainer._store = store
    trainer.start(("", 0), str(case.model))
    out.mkdir(parents=True, exist_ok=True)
    share = case.share(rank)
    if case.then is not None:
        with trainer._in("test"):
            case.then(trainer, case, out)
    elif case.objective is None:
        logprobs = trainer.score(share, "actor")
        for index, values in enumerate(logprobs or []):
            np.save(out / f"logprobs_{case.layout.coordinates(rank).dp}_{index}.npy", values)
    else:
        _save_gradients(trainer, case, share, out)
    trainer.stop()


def _save_gradients(trainer: TrainRank, case: Case, share: list[MicroBatch], out: Path) -> None:
    from megatron_tree.reshard import digest, image, plan

    trainer.begin(OptimizerConfig(), 1)
    with trainer._in("test"):
        metrics = trainer.accumulate(share, case.objective)
        trainer.optimizer.prepare_grads()
        (out / f"norm_{trainer.rank}.txt").write_text(repr(float(trainer.optimizer.get_grad_norm())))
        if case.distributed_optimizer:
            _gather_shards(trainer)
    if trainer._reports():
        (out / f"loss_{trainer.rank}.txt").write_text(
            repr(metrics["policy/loss" if case.objective == "policy" else "sft/nll"].total)
        )
    if trainer.rank == 0:
        image.create(out / "gradients.safetensors", trainer.shape, torch.float32)
    dist.barrier()
    views = image.writable(out / "gradients.safetensors")
    for params, copies in by_chunk(trainer.actor, plan.owned(trainer.shape, case.layout, trainer.rank)):
        digest.write_slices(views, {name: param.main_grad for name, param in params.items()}, copies)
    dist.barrier()


def _gather_shards(trainer: TrainRank) -> None:
    """Each rank's gradient buffers hold the sums of its own shard only: the shards of the others are put
    beside it."""
    for buffer in (buffer for chunk in trainer.wrapped for buffer in chunk.buffers):
        for bucket in buffer.buckets:
            group = buffer.data_parallel_group
            shards = list(bucket.grad_data.chunk(group.size()))
            dist.all_gather(shards, shards[group.rank()].clone(), group=group)


def export(trainer: TrainRank, out: Path) -> None:
    """The weights as `out/model.safetensors`."""
    from megatron_tree.reshard import image

    if trainer.rank == 0:
        image.create(out / "model.safetensors", trainer.shape, torch.float32)
    dist.barrier()
    trainer.write_slices(str(out / "model.safetensors"))
    dist.barrier()
