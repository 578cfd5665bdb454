"""The way of a version from trainer ranks to engine workers, bucket by bucket.

A wire joins one rank and workers of one engine. Two kinds:

- `Wire` carries the bytes, between any hosts: NCCL between GPUs, gloo between CPUs. The sending rank of a
  stage has one to every engine, and an engine takes the segments of a version in layer order, each from its
  stage's wire.
- `LendingWire` carries a handle to the bytes, on one device (`ipc`): every rank has each bucket of the whole
  version in turn and lends it to the workers on its own GPU; without GPUs the first rank of a host lends to
  all workers there.

Engines have wires of their own, so that one that dies costs the others nothing; one that hangs holds up the
bucket that it does not take, and those that wait with it. The price: a bucket leaves its sender once per
engine.

Not here: what is sent (`source`), what a worker does with it (`receive`), what happens to a failed engine
(`engine.pool`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tree.reshard import ipc
from megatron_tree.reshard.source import SliceSource
from megatron_tree.types import Stream

LENDERS = "lenders"  # of the trainers' store: the memories (`ipc.memory`) that a rank lends


class Sent(Protocol):
    def wait(self) -> object:
        """Until the other ends have it. RuntimeError once one is gone or the time is over."""


class Wire:
    """A process group of its own, beside the processes' default ones. Rank 0 sends. `broadcast` is what
    vLLM's receiver calls of its communicator."""

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, timeout: timedelta) -> None:
        store = dist.PrefixStore(name, store)
        self._group: Any  # torch's stubs of the two lack what they do
        if torch.cuda.is_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def post(self, tensor: Tensor) -> Sent:
        """Begins to send, or to receive into, a tensor of bytes."""
        return self._group.broadcast([tensor], dist.BroadcastOptions())

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        assert src == 0, "rank 0 sends"
        self.post(tensor).wait()


class LendingWire:
    """The same for memory that both ends can map. What passes through the group, gloo in any case, is a
    handle and, once every worker has copied, that it may be used again."""

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, timeout: timedelta) -> None:
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)

    def post(self, tensor: Tensor) -> Sent:
        return _Lent(ipc.Loan(tensor), self._group)

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        assert src == 0, "rank 0 lends"
        handle = torch.empty(ipc.HANDLE_BYTES, dtype=torch.uint8)
        self._group.broadcast([handle], dist.BroadcastOptions()).wait()
        ipc.copy(handle.numpy().tobytes(), tensor)
        self._group.barrier(dist.BarrierOptions()).wait()


class _Lent:
    def __init__(self, loan: ipc.Loan, group: Any) -> None:
        self._loan = loan
        handle = torch.frombuffer(bytearray(loan.handle), dtype=torch.uint8)
        self._works = [
            group.broadcast([handle], dist.BroadcastOptions()),
            group.barrier(dist.BarrierOptions()),
        ]

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        finally:
            self._loan.close()


class Sender:
    """The wires of one rank, kept from version to version. Collective: every rank of the default group makes
    one, and sends when the others do."""

    def __init__(self, store: dist.Store, source: SliceSource, device: str, *, lends: bool) -> None:
        self._store, self._source, self._lends = store, source, lends
        self._wires: dict[str, Wire | LendingWire] = {}
        self._memory: str | None = None  # that this rank lends
        if lends:
            memories: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(memories, mine := ipc.memory(device))
            if memories.index(mine) == dist.get_rank():
                self._memory = mine
            store.set(LENDERS, " ".join(memories))

    def send(self, stream: Stream, names: Sequence[str]) -> None:
        """Sends the kept version to the engines that these wires lead to. A wire that fails is dropped, and
        its engine with it: the pool sees it fail to load."""
        for name in names:
            if name not in self._wires:
                with self._or_dropped(name):
                    self._open(name, stream)
        for flat in self._buckets():
            sending = {}
            for name in self._wires.keys() & names:
                with self._or_dropped(name):
                    sending[name] = self._wires[name].post(flat.view(torch.uint8))
            for name, work in sending.items():
                with self._or_dropped(name):
                    work.wait()
            del flat, sending  # before the next bucket is gathered

    def _buckets(self) -> Iterator[Tensor]:
        if self._lends:
            yield from self._source.relayed()
            return
        for _, flat in self._source.packed():
            yield flat
            del flat

    def _open(self, name: str, stream: Stream) -> None:
        timeout = timedelta(seconds=stream.timeout_s)
        if not self._lends:
            if self._source.sends:
                stage = f"{name}/stage {self._source.stage}"
                self._wires[name] = Wire(self._store, stage, 0, 1 + stream.num_workers, timeout)
        elif self._memory is not None and (
            near := _near(self._store, name, stream.num_workers, self._memory, timeout)
        ):
            at = f"{name}/{self._memory}"
            self._wires[name] = LendingWire(self._store, at, 0, 1 + len(near), timeout)

    @contextmanager
    def _or_dropped(self, name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._wires.pop(name, None)
            logging.getLogger(__name__).warning("wire to engine %s: %s", name, error)


def borrow(
    store: dist.Store, name: str, worker: int, num_workers: int, device: torch.device, timeout: timedelta
) -> LendingWire:
    """A worker's end of the wire to the rank that lends it memory. RuntimeError where none does."""
    memory = ipc.memory(device)
    store.set(f"{name}/memory of {worker}", memory)
    lenders = store.get(LENDERS).decode().split()
    if memory not in lenders:
        raise RuntimeError(f"worker {worker}: no trainer rank is on its device {memory}")
    near = _near(store, name, num_workers, memory, timeout)
    return LendingWire(store, f"{name}/{memory}", 1 + near.index(worker), 1 + len(near), timeout)


def _near(store: dist.Store, name: str, num_workers: int, memory: str, timeout: timedelta) -> list[int]:
    """The engine's workers that can map this memory; waits until all have said which theirs is."""
    said = [f"{name}/memory of {worker}" for worker in range(num_workers)]
    store.wait(said, timeout)
    return [worker for worker, key in enumerate(said) if store.get(key).decode() == memory]
