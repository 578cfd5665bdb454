"""Buckets on the way from a rank to the two workers of an engine: sent through gloo, or lent as CUDA IPC does
it on a GPU. About 10 s: two processes a test."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch
import torch.distributed as dist

from megatron_tree.reshard import ipc, wire

TIMEOUT = timedelta(seconds=60)
BUCKETS = [torch.arange(n, dtype=torch.float32).sqrt() for n in (1, 1000, 250_000)]


def work(port: int, way: str, worker: int, num_workers: int, pipe: Connection) -> None:
    """A worker's side: takes buckets of the sizes that it is told until there are no more."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    try:
        end = (
            wire.borrow(store, "engine", worker, num_workers, torch.device("cpu"), TIMEOUT)
            if way == "lent"
            else wire.Wire(store, "engine", 1 + worker, 1 + num_workers, TIMEOUT)
        )
    except RuntimeError as error:
        pipe.send(str(error))
        return
    while num_bytes := pipe.recv():
        got = torch.empty(num_bytes, dtype=torch.uint8)
        end.broadcast(got, src=0)
        pipe.send(got.numpy().tobytes())


class Engine:
    """Workers in processes of their own, and the store that they meet the lender in."""

    def __init__(self, way: str, num_workers: int, lenders: str) -> None:
        self.way = way
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self.store.set(wire.LENDERS, lenders)
        spawn = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.workers: list[BaseProcess] = []
        for worker in range(num_workers):
            mine, theirs = spawn.Pipe()
            child = spawn.Process(target=work, args=(self.store.port, way, worker, num_workers, theirs))
            child.start()
            self.pipes.append(mine)
            self.workers.append(child)

    def meet(self) -> wire.Wire | wire.LendingWire:
        if self.way == "sent":
            return wire.Wire(self.store, "engine", 0, 1 + len(self.workers), TIMEOUT)
        memory = ipc.memory("cpu")
        assert wire._near(self.store, "engine", len(self.workers), memory, TIMEOUT) == [
            *range(len(self.workers))
        ]
        return wire.LendingWire(self.store, f"engine/{memory}", 0, 1 + len(self.workers), TIMEOUT)

    def got(self, sender: wire.Wire | wire.LendingWire, bucket: torch.Tensor) -> list[bytes]:
        """What the workers have of a bucket that is overwritten once it is let go."""
        raw = bucket.clone().view(torch.uint8)
        posted = sender.post(raw)
        for pipe in self.pipes:
            pipe.send(raw.nbytes)
        posted.wait()
        raw.zero_()
        return [pipe.recv() for pipe in self.pipes]


@pytest.mark.parametrize("way", ["sent", "lent"])
def test_every_worker_has_it_before_it_is_let_go(way: str) -> None:
    engine = Engine(way, 2, f"elsewhere {ipc.memory('cpu')}")
    sender, files = engine.meet(), len(os.listdir("/proc/self/fd"))
    for bucket in BUCKETS:
        assert engine.got(sender, bucket) == [bucket.numpy().tobytes()] * 2
    assert len(os.listdir("/proc/self/fd")) == files
    for pipe, worker in zip(engine.pipes, engine.workers, strict=True):
        pipe.send(0)
        worker.join()


def test_a_borrower_that_dies_costs_the_wire_at_once() -> None:
    """Not its time-out of a minute: the lender has other engines to serve."""
    engine = Engine("lent", 2, ipc.memory("cpu"))
    lending, raw = engine.meet(), BUCKETS[1].view(torch.uint8)
    engine.got(lending, BUCKETS[0])  # both workers are there
    posted = lending.post(raw)
    engine.pipes[0].send(raw.nbytes)
    assert engine.workers[1].pid is not None
    os.kill(engine.workers[1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer"):
        posted.wait()
    engine.workers[0].join()


def test_a_worker_without_a_rank_on_its_device_says_so() -> None:
    engine = Engine("lent", 1, "GPU-1 GPU-2")
    here = ipc.memory("cpu")
    assert engine.pipes[0].recv() == f"worker 0: no trainer rank is on its device {here}"
    engine.workers[0].join()
