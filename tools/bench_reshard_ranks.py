"""The Megatron side of `bench_reshard`: TP 2 x PP 2 ranks, each a process with one torch thread.

Measured in turn, each between barriers, from the first rank's start to the last rank's end:
ours       every rank writes and digests its own slices into a slot whose pages exist
stream     every rank keeps its own slices aside, and the stages' senders send the model to one receiver, a
           thread of rank 1, which drops it
ipc        the same, but every rank gets every bucket, and rank 0 lends it to the receiver
memcpy     rank 0 alone copies as many bytes into /dev/shm, both buffers warm
gather     every parameter is gathered over its tensor-parallel group, made whole, and written whole by rank 0
megatron   Megatron-Core's own resharding with its gloo service into a TP 1 model on rank 0
All but ours compute no digest. What each leaves behind is compared with the model, element by
element.
"""

from __future__ import annotations

import cProfile
import math
import pstats
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tree.config import AlgoConfig, ParallelConfig
from megatron_tree.reshard import digest, image, plan
from megatron_tree.reshard.source import ParamMeta, buckets
from megatron_tree.reshard.wire import LendingWire, Wire, borrow
from megatron_tree.train.group import RankSetup
from megatron_tree.types import Stream, Update
from tools import bench_ranks
from tools.bench_reshard_engine import Figures

if TYPE_CHECKING:
    from megatron_tree.train.rank import TrainRank

PARALLEL = ParallelConfig(tp=2, pp=2)
LAYOUT = PARALLEL.layout
ALONE = ParallelConfig()
REPEATS = 5
RECEIVER = 1  # a rank that sends nothing to it
SCALE = 1.25  # published weights are the model's times this, exactly: nobody passes with the old ones


def run_ranks(model: Path, shared: Path, profile: bool) -> tuple[Figures, list[Update]]:
    """Figures, and the versions that now lie in the two slots."""
    return bench_ranks.run_ranks(LAYOUT.world_size, partial(_rank, model, shared, profile), pinned=False)


def _rank(
    model: Path, shared: Path, profile: bool, rank: int, store: dist.Store
) -> tuple[Figures, list[Update]]:
    from megatron_tree.train.rank import TrainRank, stop_megatron

    trainer = TrainRank(rank, RankSetup(str(model), PARALLEL, "fp32", 1.0, AlgoConfig(), 600.0, 1))
    trainer._store = store
    trainer.start(("", 0), str(model))
    with torch.no_grad(), trainer._in("bench"):
        for param in trainer.actor[0].parameters():
            param.mul_(SCALE)
        answer = Bench(trainer, model, shared, profile).run()
    stop_megatron()  # not trainer.stop: the images stay
    return answer


class Bench:
    """One rank's part."""

    def __init__(self, trainer: TrainRank, model: Path, shared: Path, profile: bool) -> None:
        self._trainer, self._rank, self._shared, self._profile = trainer, trainer.rank, shared, profile
        self._source = image.readable(model / "model.safetensors")
        self._params = dict(trainer.actor[0].named_parameters())
        self._version = 0
        self._wires: list[Wire | LendingWire] = []

    def run(self) -> tuple[Figures, list[Update]]:
        first, second = self.create(), self.create()
        for update in (first, second):  # pages of both slots come to be
            self.wall(lambda update=update: self._trainer.write_version(update))
        copy = self.buffers()
        times: dict[str, list[float]] = {"write": [], "memcpy": []}
        for _ in range(REPEATS):
            times["memcpy"].append(self.wall(copy))
            update = self.create()
            times["write"].append(self.wall(lambda update=update: self._trainer.write_version(update)))
        del copy
        figures: Figures = {"bytes_written": self.count_writes(), **self.streamed()}
        figures |= {**self.gathered(), **self.megatron()}
        figures |= {f"{name}_seconds": median(seconds) for name, seconds in times.items()}
        if self._profile:
            self.profile()
        updates = [self.create(), self.create()]
        for update in updates:
            self._trainer.write_version(update)
            self.compare(update.image)
        return figures, updates

    def create(self) -> Update:
        """The next version's slot, made by rank 0."""
        self._version += 1
        told: list[Any] = [None]
        if self._rank == 0:
            told = [self._trainer.create_image(str(self._shared), "bench", self._version, "fp32")]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def wall(self, act: Callable[[], None]) -> float:
        """Seconds from the first rank's start to the last rank's end; a host's processes share the clock."""
        dist.barrier()
        began = time.perf_counter()
        act()
        spans: list[Any] = [None] * LAYOUT.world_size
        dist.all_gather_object(spans, (began, time.perf_counter()))
        return max(end for _, end in spans) - min(start for start, _ in spans)

    def buffers(self) -> Callable[[], None]:
        """The yardstick: a copy of the model's bytes from private memory into /dev/shm, by rank 0 alone."""
        if self._rank:
            return lambda: None
        path = self._shared / "memcpy.safetensors"
        image.create(path, self._trainer.shape, torch.float32)
        source = torch.ones(sum(map(math.prod, self._trainer.shape.tensors().values())))
        target = torch.from_file(str(path), shared=True, size=source.numel(), dtype=torch.float32)
        target.copy_(source)
        path.unlink()
        return lambda: target.copy_(source)

    def count_writes(self) -> int:
        """Bytes that all ranks store for one version: slices, digests, and the file's header."""
        update = self.create()
        raw, CountedArray.num_bytes = digest._raw, 0
        digest._raw = lambda tensor: raw(tensor).view(CountedArray)
        self._trainer.write_version(update)
        digest._raw = raw
        stored = torch.tensor(CountedArray.num_bytes)
        dist.all_reduce(stored)
        digests = sum(
            path.stat().st_size for path in self._shared.glob("*.digests") if "-bench-" in path.name
        )
        header = image.size(self._trainer.shape, torch.float32) - self.model_bytes()
        return int(stored) + digests + header

    def model_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._source.values())

    def streamed(self) -> Figures:
        """Times both halves of a publish without an image, and compares what came last."""
        figures: Figures = {}
        for way, lends in (("stream", False), ("ipc", True)):
            self._trainer._source, self._wires = None, []
            times = [self.wall(partial(self.stream, lends)) for _ in range(REPEATS + 1)]
            if self._rank == RECEIVER:
                for name, tensor in self._received:
                    if not torch.equal(tensor, self._source[name] * SCALE):
                        raise AssertionError(f"{way}: {name} is not what the ranks hold")
            figures[f"{way}_seconds"] = median(times[1:])
        return figures

    def stream(self, lends: bool) -> None:
        self._version += 1
        told: list[Any] = [self._trainer.keep_version(self._version, "fp32", 1, 60.0, lends)]
        dist.broadcast_object_list(told, src=0)
        if self._rank == RECEIVER:
            receiver = Thread(target=self.receive, args=(told[0].stream,))
            receiver.start()
        self._trainer.send_version(told[0], ["bench"])
        if self._rank == RECEIVER:
            receiver.join()

    def receive(self, stream: Stream) -> None:
        """As an engine's worker: a buffer of its own for every bucket."""
        if not self._wires:
            self._wires = self.connect(stream)
        self._received = []
        for segment in stream.segments:
            pairs = zip(segment.names, segment.shapes, strict=True)
            for bucket in buckets([ParamMeta(n, torch.float32, s) for n, s in pairs], stream.bucket_bytes):
                flat = torch.empty(sum(meta.num_elements for meta in bucket))
                self._wires[segment.stage].broadcast(flat.view(torch.uint8), src=0)
                parts = flat.split([meta.num_elements for meta in bucket])
                self._received += [(m.name, p.view(m.shape)) for m, p in zip(bucket, parts, strict=True)]

    def connect(self, stream: Stream) -> list[Wire | LendingWire]:
        store, timeout = dist.TCPStore(*stream.address, is_master=False), timedelta(seconds=60)
        if stream.lends:
            return [borrow(store, "bench", 0, 1, torch.device("cpu"), timeout)] * LAYOUT.pp
        return [Wire(store, f"bench/stage {stage}", 1, 2, timeout) for stage in range(LAYOUT.pp)]

    def gathered(self) -> Figures:
        """Times the gather into slot pages that every mapping of rank 0 already holds."""
        update = self.create()
        target = image.writable(Path(update.image)) if self._rank == 0 else {}
        times = [self.wall(lambda: self.gather(target)) for _ in range(REPEATS + 1)]
        self.compare(update.image)
        return {"gather_seconds": median(times[1:])}

    def gather(self, target: dict[str, Tensor]) -> None:
        for param, stage in self.parameters():
            owners = [rank for rank in LAYOUT.ranks() if LAYOUT.coordinates(rank).pp == stage]
            if self._rank in owners:
                shard = self._params[param].data
                shards = [torch.empty_like(shard) for _ in owners] if self._rank == owners[0] else None
                dist.gather(shard, shards, dst=owners[0], group=self._trainer.actor[0].pg_collection.tp)
            if self._rank in (0, owners[0]):
                self.hand_over(param, owners, shards if self._rank == owners[0] else [], target)

    def parameters(self) -> Iterator[tuple[str, int]]:
        for stage in range(LAYOUT.pp):
            for param in plan.params(self._trainer.shape, LAYOUT, stage * LAYOUT.tp):
                yield param, stage

    def hand_over(
        self, param: str, owners: list[int], shards: list[Tensor], target: dict[str, Tensor]
    ) -> None:
        """Makes a parameter's Hugging Face tensors whole on its stage's first rank; rank 0 writes them."""
        copies = [[c for c in self.held(owner) if c.param == param] for owner in owners]
        for name in dict.fromkeys(copy.tensor for copy in copies[0]):
            whole = torch.empty(self._trainer.shape.tensors()[name])
            for shard, of_shard in zip(shards, copies, strict=False):
                for copy in of_shard:
                    if copy.tensor == name:
                        whole[copy.tensor_index].copy_(shard[copy.param_index])
            if owners[0] != 0:
                (dist.recv if self._rank == 0 else dist.send)(whole, owners[0] if self._rank == 0 else 0)
            if self._rank == 0:
                target[name].copy_(whole)

    def held(self, rank: int) -> list[plan.SliceCopy]:
        cache = self.__dict__.setdefault("_held", {})
        if rank not in cache:
            cache[rank] = plan.held(self._trainer.shape, LAYOUT, rank)
        return cache[rank]

    def megatron(self) -> Figures:
        """Megatron-Core's swap of weights from this model into one of TP 1 on rank 0, its plan cached."""
        try:
            from megatron.core.resharding.refit import reshard_model_weights
        except ImportError as error:
            return {"megatron_resharding_seconds": None, "notes": f"megatron.core.resharding: {error}"}
        target, service = self.whole_model(), _gloo_service()
        source = self._trainer.actor[0]
        for name, param in (*self._params.items(), *target.named_parameters()):
            if name.endswith("linear_fc1.weight"):
                param.partition_stride = 2  # gate and up are cut each: its planner must know
        times = [
            self.wall(lambda: reshard_model_weights(source, target, service)) for _ in range(REPEATS + 1)
        ]
        if self._rank == 0:
            found = dict(target.named_parameters())
            for copy in plan.held(self._trainer.shape, ALONE.layout, 0):
                wanted = self._source[copy.tensor][copy.tensor_index] * SCALE
                if not torch.equal(found[copy.param][copy.param_index], wanted):
                    raise AssertionError(f"Megatron's resharding: {copy.param} is not {copy.tensor}")
        dist.barrier()
        note = (
            "megatron's gloo service is made without the CUDA stream that it opens and does not use on a CPU"
        )
        return {"megatron_resharding_seconds": median(times[1:]), "notes": note}

    def whole_model(self) -> torch.nn.Module:
        """The TP 1 model on rank 0; elsewhere a module with its groups and nothing in it."""
        from megatron.core import parallel_state

        from megatron_tree.train.model import build

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()
        if self._rank == 0:
            return build(self._trainer.shape, replace(self._trainer.setup, parallel=ALONE), 0)[0]
        empty = torch.nn.Module()
        empty.pg_collection = self._trainer.actor[0].pg_collection
        return empty

    def compare(self, path: str) -> None:
        """AssertionError where an image is not the model times SCALE. Rank 0 compares."""
        dist.barrier()
        if self._rank == 0:
            for name, tensor in image.readable(Path(path)).items():
                if not torch.equal(tensor, self._source[name] * SCALE):
                    raise AssertionError(f"{path}: {name} is not what the ranks hold")
        dist.barrier()

    def profile(self) -> None:
        """Prints rank 0's profile of one more write, and every rank's processor time and page faults."""
        update = self.create()
        before = resource.getrusage(resource.RUSAGE_SELF)
        self.wall(lambda: self._trainer.write_version(update))
        after = resource.getrusage(resource.RUSAGE_SELF)
        print(
            f"write, rank {self._rank}: user {after.ru_utime - before.ru_utime:.3f} s, "
            f"system {after.ru_stime - before.ru_stime:.3f} s, "
            f"page faults {after.ru_minflt - before.ru_minflt}",
            file=sys.stderr,
        )
        dist.barrier()
        profile = cProfile.Profile()
        profile.runcall(self._trainer.write_version, update)
        if self._rank == 0:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(12)
        dist.barrier()


class CountedArray(np.ndarray):
    """Counts the bytes that are stored into any array of this class."""

    num_bytes = 0

    def __setitem__(self, index: Any, value: np.ndarray) -> None:
        super().__setitem__(index, value)
        CountedArray.num_bytes += np.ndarray.__getitem__(self, index).nbytes


def _gloo_service() -> Any:
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

    class Service(GlooCopyService):
        def __init__(self) -> None:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.gloo_pg = dist.new_group(backend="gloo")
            self.send_ops, self.recv_ops = [], []
            self._copy_stream = None

    return Service()
