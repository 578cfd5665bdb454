"""Runs Megatron ranks in processes of their own: one launch, many layouts.

A process costs seconds to import, so each case re-initialises the parallel state in the same processes; ranks
beyond a case's world size wait for the next case. Results come back as files: log-probs as .npy, gradients as
a model image written through the slice plan (each owner its slices), so that a wrong plan shows as a wrong
gradient.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_tree.config import AlgoConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.train.group import Objective, RankSetup
from megatron_tree.train.rank import TrainRank
from megatron_tree.types import StepBatch


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


def run(cases: list[Case], out: Path, timeout_s: float = 300) -> None:
    """Writes `out/<case>/…`. Raises with the first rank's traceback."""
    world = max(case.layout.world_size for case in cases)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    context = multiprocessing.get_context("spawn")
    errors = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, store.port, cases, out, errors)) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout_s)
    hanging = [process for process in ranks if process.is_alive()]
    for process in hanging:
        process.kill()
    if not errors.empty():
        raise AssertionError(errors.get())
    assert not hanging, f"{len(hanging)} ranks did not finish in {timeout_s} s"


def _rank(rank: int, port: int, cases: list[Case], out: Path, errors: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        for case in cases:
            if rank < case.layout.world_size:
                _run_case(rank, case, dist.PrefixStore(case.name, store), out / case.name)
    except BaseException:  # reported to the parent, then raised again
        errors.put(f"rank {rank}:\n{traceback.format_exc()}")
        raise


def _run_case(rank: int, case: Case, store: dist.Store, out: Path) -> None:
    setup = RankSetup(str(case.model), case.layout, "fp32", case.temperature, case.algo, 120.0, 1)
    trainer = TrainRank(rank, setup)
    trainer._store = store
    trainer.start(("", 0), str(case.model))
    out.mkdir(parents=True, exist_ok=True)
    dp = case.layout.coordinates(rank).dp
    if case.then is not None:
        with trainer._in("test"):
            case.then(trainer, case, out)
    elif case.objective is None:
        logprobs = trainer.score(case.batch[dp], "actor")
        for index, values in enumerate(logprobs or []):
            np.save(out / f"logprobs_{dp}_{index}.npy", values)
    else:
        _save_gradients(trainer, case, dp, out)
    trainer.stop()


def _save_gradients(trainer: TrainRank, case: Case, dp: int, out: Path) -> None:
    from megatron_tree.reshard import image, plan

    with trainer._in("test"):
        metrics = trainer.accumulate(case.batch[dp], case.objective)
    if trainer._reports():
        (out / f"loss_{dp}.txt").write_text(
            repr(metrics["policy/loss" if case.objective == "policy" else "sft/nll"].total)
        )
    if trainer.rank == 0:
        image.create(out / "gradients.safetensors", trainer.shape, torch.float32)
    dist.barrier()
    gradients = {name: param.main_grad for name, param in trainer.model.named_parameters()}
    owned = plan.owned(trainer.shape, case.layout, trainer.rank)
    image.write_slices(image.writable(out / "gradients.safetensors"), gradients, owned)
    dist.barrier()
