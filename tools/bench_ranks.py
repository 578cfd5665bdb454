"""Starts the processes of a bench and waits for the one that answers. A process that fails prints its own
traceback and ends the bench."""

from __future__ import annotations

import multiprocessing
import os
import queue
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[int, dist.Store], Any]  # of a rank, at its group's store; what it returns, or None


def run_processes(works: Sequence[Callable[[], Any]]) -> Any:
    """The first answer that is not None. RuntimeError where a process fails or none answers."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_answer, args=(work, answers)) for work in works]
    for process in processes:
        process.start()
    try:
        answer, codes = None, [None]
        while answer is None and None in codes and not any(codes):
            codes = [process.exitcode for process in processes]
            with suppress(queue.Empty):
                answer = answers.get(timeout=1)
        if answer is None:
            raise RuntimeError(f"processes of the bench ended with {codes}")
        for process in processes:
            process.join(60)
        return answer
    finally:
        for process in processes:
            process.kill()


def run_ranks(world_size: int, work: Work, *, pinned: bool) -> Any:
    """Rank 0's answer. Each rank is a process with one torch thread, `pinned` to a core of its own."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10)
    )
    return run_processes([partial(_rank, rank, store.port, work, pinned) for rank in range(world_size)])


def _answer(work: Callable[[], Any], answers: Any) -> None:
    if (answer := work()) is not None:
        answers.put(answer)


def _rank(rank: int, port: int, work: Work, pinned: bool) -> Any:
    if pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"megatron|torch\.distributed")
    answer = work(rank, dist.TCPStore("127.0.0.1", port, is_master=False))
    return answer if rank == 0 else None
