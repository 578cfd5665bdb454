"""One Megatron rank: a plain class that `cluster` makes a Ray actor of, and tests run in a process.

Its methods are collective: the trainer group calls them on every rank with the same name, and each rank gets
its own share of the data. They are not re-entrant. `phase` alone may be called from another thread: it names
what a hanging rank is at.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer

from megatron_tree.algo.loss import LossInputs, nll_loss, policy_loss
from megatron_tree.config import OptimizerConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.metrics import Metrics
from megatron_tree.reshard import digest, image, plan
from megatron_tree.reshard.names import check_model, read_shape
from megatron_tree.reshard.plan import SliceCopy
from megatron_tree.reshard.publish import Slots
from megatron_tree.reshard.source import BUCKET_BYTES, SliceSource, segments
from megatron_tree.reshard.wire import Sender
from megatron_tree.train import adamw, checkpoint, fp8_layers, kernels, offload, on_cpu, precision, step
from megatron_tree.train.group import Objective, RankSetup, StepResult
from megatron_tree.train.model import TreeGPTModel, build
from megatron_tree.train.precision import DTYPES
from megatron_tree.types import MicroBatch, Stream, Update

WIRE_DTYPES: dict[str, Literal["float32", "bfloat16"]] = {"fp32": "float32", "bf16": "bfloat16"}


class TrainRank:
    def __init__(self, rank: int, setup: RankSetup, host: str = "127.0.0.1") -> None:
        """`host`: the address under which the other ranks reach this one's node."""
        self.rank = rank
        self.setup = setup
        self.host = host
        self.layout = setup.layout
        self._phase = "created"
        self._store: dist.Store | None = None
        self._slots: Slots | None = None
        self._source: SliceSource | None = None
        self._maps = image.Maps(writable=True)
        self._saver = checkpoint.Saver()
        self.reference: list[TreeGPTModel] | None = None
        self.optimizer: MegatronOptimizer | None = None
        self._released: offload.Released | None = None

    def phase(self) -> str:
        return self._phase

    def pid(self) -> int:
        return os.getpid()

    def bind(self) -> tuple[str, int]:
        """Rank 0 opens the group's store on a free port and says where."""
        self._store = dist.TCPStore(
            self.host,
            0,
            world_size=self.layout.world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
        )
        return self.host, self._store.port

    def start(self, address: tuple[str, int], weights: str) -> None:
        """Joins the process group, builds this rank's stage and loads its slices of a Hugging Face folder."""
        with self._in("start"):
            self._store = self._store or dist.TCPStore(*address, is_master=False, timeout=self._timeout)
            start_megatron(self.rank, self.layout, self._store, self._timeout, self.setup.num_threads)
            self.shape = read_shape(self.setup.model_path)
            check_model(self.shape, self.layout)
            precision.check(self.setup.fp8, kernels.here(), self.shape, self.layout)
            if kernels.of(self.setup).optimizer.name == "ours":
                adamw.install()
            self.actor = self._build()
            self._load(self.actor, weights)
            distributed = self.setup.parallel.distributed_optimizer
            self.wrapped = step.wrap(self.actor, distributed_optimizer=distributed)

    def stop(self) -> None:
        """Leaves the process group and removes this run's images."""
        if self._slots is not None:
            self._slots.close()
        stop_megatron()

    def take_reference(self, weights: str | None) -> None:
        """Freezes the actor as it is now, or the weights of a Hugging Face folder, as the reference model."""
        with self._in("take_reference"), torch.no_grad():
            if self.reference is None:
                self.reference = [chunk.requires_grad_(False) for chunk in self._build()]
            if weights is not None:
                self._load(self.reference, weights)
                return
            for mine, actor in zip(_parameters(self.reference), _parameters(self.actor), strict=True):
                mine.copy_(actor)

    def begin(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Starts a training phase: a fresh optimizer, its schedule at step 0."""
        with self._in("begin"):
            self.optimizer_config, self.total_steps, self.step_index = optimizer, total_steps, 0
            self.optimizer = None  # the old one's states go before the new one's are made
            self.optimizer = step.make_optimizer(self.wrapped, optimizer)

    def release(self) -> None:
        """Leaves the device to engines: this rank keeps the weights of the actor there and nothing else."""
        with self._in("release"), torch.no_grad():
            reference = _parameters(self.reference) if self.reference is not None else ()
            self._released = offload.release(self.wrapped, self.optimizer, reference)

    def take_back(self) -> None:
        """Makes `release` undone, with gradients of zero."""
        with self._in("take_back"), torch.no_grad():
            assert self._released is not None, "release comes first"
            self._released.take_back()
            self._released = None

    def score(
        self, batches: Sequence[MicroBatch], which: Literal["actor", "reference"]
    ) -> list[np.ndarray] | None:
        """Log-probs [T] of each micro-batch under the actor or the reference; None off the reporting
        ranks."""
        with self._in(f"score {which}"):
            chunks = self.actor if which == "actor" else self.reference
            assert chunks is not None, "the reference model was not taken"
            logprobs = step.forward_only(chunks, batches)
            return logprobs if self._reports() else None

    def train(self, batches: Sequence[MicroBatch], objective: Objective) -> StepResult:
        """One optimizer step on this rank's micro-batches."""
        with self._in(f"train {objective}"):
            assert self.optimizer is not None, "begin comes first"
            metrics = self.accumulate(batches, objective)
            rate = step.learning_rate(self.optimizer_config, self.step_index, self.total_steps)
            result = step.apply_gradients(self.optimizer, metrics, self.optimizer_config.clip_grad, rate)
            self.step_index += 1
            return result if self._reports() else StepResult({}, result.grad_norm, rate, result.skipped)

    def accumulate(self, batches: Sequence[MicroBatch], objective: Objective) -> Metrics:
        """Gradients of one step, reduced over ranks and left in the buffers."""
        return step.forward_backward(self.wrapped, batches, self._loss(objective))

    def create_image(
        self, image_dir: str, run_id: str, version: int, dtype: Literal["fp32", "bf16"]
    ) -> Update:
        """Rank 0 makes the slot of a version, before all ranks write."""
        with self._in("create_image"):
            if self._slots is None:
                self._slots = Slots(image_dir, run_id)
            path = self._slots.create(version, self.shape, DTYPES[dtype])
            return Update(image=str(path), version=version, names=tuple(self.shape.tensors()))

    def write_version(self, update: Update) -> None:
        """Writes this rank's own slices of a version into its slot, and their digests beside it."""
        with self._in("write_version"), torch.no_grad():
            owned = plan.owned(self.shape, self.layout, self.rank)
            path = Path(update.image)
            slot = self._maps.tensors(path)
            written = [
                piece
                for params, copies in by_chunk(self.actor, owned)
                for piece in digest.write_slices(slot, params, copies)
            ]
            digest.save(path, update.version, self.rank, written)

    def keep_version(
        self, version: int, dtype: Literal["fp32", "bf16"], num_workers: int, timeout_s: float, lends: bool
    ) -> Update | None:
        """Copies this rank's own slices aside, to be sent as often as asked until the next version is kept.
        Rank 0 says what there is for engines of `num_workers`, which share the ranks' devices if the ranks
        are to lend it to them."""
        with self._in("keep_version"), torch.no_grad():
            if self._source is None:
                device = "cpu" if on_cpu.use_cpu() else f"cuda:{torch.cuda.current_device()}"
                group = parallel_state.get_tensor_model_parallel_group()
                self._source = SliceSource(self.shape, self.layout, self.rank, DTYPES[dtype], group, device)
                self._sender = Sender(self._store, self._source, device, lends=lends)
            owned = plan.owned(self.shape, self.layout, self.rank)
            self._source.keep(version, by_chunk(self.actor, owned))
            if self.rank != 0:
                return None
            address, there = (self.host, self._store.port), segments(self.shape, self.layout)
            stream = Stream(address, WIRE_DTYPES[dtype], BUCKET_BYTES, num_workers, timeout_s, there, lends)
            return Update("", version, tuple(self.shape.tensors()), stream)

    def send_version(self, update: Update, wires: Sequence[str]) -> None:
        """Sends this rank's share of the kept version to the engines at the other ends of these wires."""
        with self._in("send_version"), torch.no_grad():
            assert self._source is not None, "keep_version comes first"
            assert update.stream is not None, "an image is not sent"
            assert self._source.version == update.version, "the group keeps another version"
            self._sender.send(update.stream, wires)

    def refused(self, update: Update, reason: str) -> None:
        """The engines refused a version: it can be loaded no more, and this rank says why in its log."""
        if self.rank == 0 and update.stream is None:
            digest.forget(Path(update.image))
        logging.getLogger(__name__).warning("version %d refused: %s", update.version, reason)

    def write_slices(self, path: str) -> None:
        """Writes this rank's own slices into an exported image."""
        with self._in("write_slices"), torch.no_grad():
            owned = plan.owned(self.shape, self.layout, self.rank)
            views = image.writable(Path(path))
            for params, copies in by_chunk(self.actor, owned):
                digest.write_slices(views, params, copies)

    def create_export(self, folder: str) -> str:
        """Rank 0 makes a Hugging Face folder aside, with everything but the weights."""
        with self._in("create_export"):
            aside = Path(folder + ".partial")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            image.carry_files(Path(self.setup.model_path), aside)
            image.create(aside / "model.safetensors", self.shape, DTYPES[self.setup.dtype])
            return str(aside / "model.safetensors")

    def finish_export(self, folder: str) -> None:
        """Renames it to its name; an older export of that name goes when the new one is in place."""
        target, old = Path(folder), Path(folder + ".old")
        if target.exists():
            target.rename(old)
        Path(folder + ".partial").rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def save(self, folder: str) -> None:
        """Begins to write model, optimizer and schedule into a folder that rank 0 makes."""
        with self._in("save"):
            assert self.optimizer is not None, "begin comes first"
            if self.rank == 0:
                Path(folder).mkdir(parents=True)
            dist.barrier()
            self._saver.begin(Path(folder), self.actor, self.optimizer, self.step_index)

    def saved(self, blocking: bool) -> bool:
        """Whether every save that began is whole."""
        with self._in("saved"):
            return self._saver.finish(blocking=blocking)

    def load(self, folder: str) -> None:
        with self._in("load"):
            assert self.optimizer is not None, "begin comes first"
            self.step_index = checkpoint.load(Path(folder), self.actor, self.optimizer)

    def _build(self) -> list[TreeGPTModel]:
        chunks = build(self.shape, self.setup, self.rank)
        for index, chunk in enumerate(chunks):
            names = {name for name, _ in chunk.named_parameters()}
            planned = plan.params(self.shape, self.layout, self.rank, index)
            assert names == set(planned), "the plan names other parameters"
        return chunks

    def _load(self, chunks: Sequence[TreeGPTModel], folder: str) -> None:
        weights = image.Folder(folder)
        weights.check(self.shape)
        held = plan.held(self.shape, self.layout, self.rank)
        for index, chunk in enumerate(chunks):
            with torch.no_grad(), fp8_layers.filled(chunk) as params:
                image.load_slices(weights, params, [copy for copy in held if copy.chunk == index])

    def _loss(self, objective: Objective) -> step.Loss:
        def loss(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
            inputs = LossInputs.from_micro_batch(batch, logprobs.device)
            return (
                nll_loss(logprobs, inputs)
                if objective == "sft"
                else policy_loss(logprobs, inputs, self.setup.algo)
            )

        return loss

    def _reports(self) -> bool:
        return self.rank in self.layout.output_ranks()

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.setup.collective_timeout_s)

    @contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        self._phase = phase
        with on_cpu.device_scope():
            yield
        self._phase = f"idle after {phase}"


def _parameters(chunks: Sequence[TreeGPTModel]) -> Iterator[torch.nn.Parameter]:
    return (param for chunk in chunks for param in chunk.parameters())


def by_chunk(
    chunks: Sequence[TreeGPTModel], copies: Sequence[SliceCopy]
) -> Iterator[tuple[dict[str, torch.Tensor], list[SliceCopy]]]:
    """Parameters by name and the slices that concern them: names repeat from chunk to chunk."""
    for index, chunk in enumerate(chunks):
        yield fp8_layers.numbers(chunk), [copy for copy in copies if copy.chunk == index]


def start_megatron(
    rank: int, layout: ParallelLayout, store: dist.Store, timeout: timedelta, num_threads: int
) -> None:
    """Process group and Megatron's parallel state. Seeds are fixed: training itself draws no random
    number."""
    from megatron.core import tensor_parallel

    cpu = on_cpu.use_cpu()
    if not cpu:  # a rank sees its own GPU or, started without Ray, all of its host's
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo" if cpu else "nccl", store=store, rank=rank, world_size=layout.world_size, timeout=timeout
    )
    if cpu:
        torch.set_num_threads(num_threads)
        on_cpu.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
    )
    if not cpu:
        tensor_parallel.model_parallel_cuda_manual_seed(1)


def stop_megatron() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
