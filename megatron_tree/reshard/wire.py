"""The way of a version to engines that share no memory with the trainers: NCCL between GPUs, gloo between
CPUs, everything else the same.

A wire joins the sending rank of one pipeline stage and the workers of one engine. Stages need no lock to
send one after another: an engine takes the segments of a version in layer order, each from its stage's wire.
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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tree.reshard.source import SliceSource
from megatron_tree.types import Stream


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

    def post(self, tensor: Tensor) -> dist.Work:
        """Begins to send, or to receive into, a tensor of bytes. Waiting raises RuntimeError once the other
        end is gone or the time is over."""
        return self._group.broadcast([tensor], dist.BroadcastOptions())

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        assert src == 0, "rank 0 sends"
        self.post(tensor).wait()


class Sender:
    """The wires of one rank, kept from version to version."""

    def __init__(self, store: dist.Store, stage: int) -> None:
        self._store, self._stage = store, stage
        self._wires: dict[str, Wire] = {}

    def send(self, source: SliceSource, stream: Stream, names: Sequence[str]) -> None:
        """Sends what the source yields to the engines that these wires lead to. A wire that fails is dropped,
        and its engine with it: the pool sees it fail to load."""
        size, timeout = 1 + stream.num_workers, timedelta(seconds=stream.timeout_s)
        for name in names:
            if source.sends and name not in self._wires:
                with self._or_dropped(name):
                    self._wires[name] = Wire(self._store, f"{name}/stage {self._stage}", 0, size, timeout)
        for _, flat in source.packed():
            sending = {}
            for name in self._wires.keys() & names:
                with self._or_dropped(name):
                    sending[name] = self._wires[name].post(flat.view(torch.uint8))
            for name, work in sending.items():
                with self._or_dropped(name):
                    work.wait()
            del flat, sending  # before the next bucket is gathered

    @contextmanager
    def _or_dropped(self, name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._wires.pop(name, None)
            logging.getLogger(__name__).warning("wire to engine %s: %s", name, error)
