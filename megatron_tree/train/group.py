"""All trainer ranks as one: a StepBatch goes in, log-probs or a step's result come out.

Every call goes to every rank and has a time-out. A rank that dies or hangs fails the call with its number and
phase, and the whole group with it: collectives do not survive a lost rank, so the owner kills the group and
starts a new one. Not here: processes (`cluster` makes the handles), what to restore after a restart
(`session`).
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from megatron_tree.algo import context
from megatron_tree.config import (
    AlgoConfig,
    Config,
    Fp8Config,
    KernelsConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainConfig,
)
from megatron_tree.layout import ParallelLayout
from megatron_tree.metrics import Metrics, merge
from megatron_tree.types import RunFailed, StepBatch, Update

Objective = Literal["policy", "sft"]
DEATH_NOTICE_S = 5.0  # within which the death of a rank becomes known after its peers' first errors
PHASE_TIMEOUT_S = 5.0  # of a rank, to say what it is at: a stopped process cannot
LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)  # a restart would meet them again


class RankDied(Exception):
    """The process of a rank is gone."""


class TrainerFailed(RunFailed):
    """The group is of no further use; one line naming rank and phase."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What every rank of a group is told."""

    model_path: str
    parallel: ParallelConfig
    dtype: Literal["fp32", "bf16"]
    temperature: float  # of the rollouts: log-probs are those of the sampled distribution
    algo: AlgoConfig
    collective_timeout_s: float
    num_threads: int  # of torch, on a CPU
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    attention: Literal["auto", "node", "flex", "varlen"] = "auto"
    fp8: Fp8Config | None = None
    kernels: KernelsConfig = field(default_factory=KernelsConfig)

    @classmethod
    def of(cls, config: Config) -> RankSetup:
        train = config.train
        return cls(
            model_path=config.model.path,
            parallel=train.parallel,
            dtype=config.model.dtype,
            temperature=config.rollout.temperature,
            algo=config.algo,
            collective_timeout_s=train.collective_timeout_s,
            num_threads=max(1, (os.cpu_count() or 1) // train.parallel.layout.world_size),
            recompute=train.recompute,
            fp8=train.fp8,
            kernels=train.kernels,
            attention=train.attention,
        )

    @property
    def layout(self) -> ParallelLayout:
        return self.parallel.layout


@dataclass(frozen=True, slots=True)
class StepResult:
    metrics: Metrics  # of one rank's share, empty off the last stage; of all ranks when the group answers
    grad_norm: float  # before clipping, over the whole model
    learning_rate: float
    skipped: bool  # non-finite loss or gradient: no rank stepped


class RankHandle(Protocol):
    async def call(self, method: str, *args: Any) -> Any:
        """Calls `TrainRank.method`. RankDied, or what the method raised."""
        ...

    async def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Transport:
    """How ranks come to be, how a share of data reaches several of them once, and who removes a run's images
    from a folder of rank 0's host when rank 0 is dead."""

    spawn: Callable[[int], RankHandle]
    put: Callable[[Any], Any]
    remove: Callable[[str, str], None]


class TrainerGroup:
    def __init__(self, layout: ParallelLayout, config: TrainConfig, transport: Transport) -> None:
        self._layout, self._config, self._transport = layout, config, transport
        self._ranks: list[RankHandle] = []
        self._released = False  # what the ranks need only to train
        self._kept: int | None = None  # the version that can be sent
        self._images: tuple[str, str] | None = None  # folder and run id of those that rank 0 made
        self._turn = asyncio.Lock()

    async def start(self, weights: str) -> None:
        """Starts every rank and loads the Hugging Face folder `weights`."""
        self._ranks = [self._transport.spawn(rank) for rank in self._layout.ranks()]
        timeout = self._config.start_timeout_s
        address = (await self._all("bind", ranks=[0], timeout=timeout))[0]
        await self._all("start", address, weights, timeout=timeout)

    async def kill(self) -> None:
        ranks, self._ranks, self._kept = self._ranks, [], None
        self._released = False
        await asyncio.gather(*(rank.kill() for rank in ranks))

    async def stop(self) -> None:
        """Ends the ranks in order, so that they remove what they left in shared memory; where they cannot, it
        is removed for them."""
        try:
            if self._ranks:
                await self._all("stop", timeout=30)
                self._images = None
        finally:
            await self.kill()
            if self._images is not None:
                await asyncio.to_thread(self._transport.remove, *self._images)

    async def take_reference(self, weights: str | None) -> None:
        """Freezes the actor as the reference, or loads the reference from a Hugging Face folder."""
        await self._all("take_reference", weights)

    async def begin(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        await self._all("begin", optimizer, total_steps)

    async def release(self) -> None:
        """The ranks keep nothing on their devices but the actor's weights."""
        if not self._released:
            await self._all("release")
            self._released = True

    async def take_back(self) -> None:
        """What `release` released is on the devices again."""
        if self._released:
            await self._all("take_back")
            self._released = False

    async def score(self, batch: StepBatch, which: Literal["actor", "reference"]) -> list[list[np.ndarray]]:
        """Log-probs `[dp][num_microbatches]` of `[T]`."""
        results = await self._all("score", self._shares(batch), which)
        return context.join(batch, [results[rank] for rank in self._layout.output_ranks()], self._layout)

    async def train(self, batch: StepBatch, objective: Objective) -> StepResult:
        """One optimizer step; the metrics are those of all ranks, reduced."""
        results: list[StepResult] = await self._all("train", self._shares(batch), objective)
        reporting = [results[rank] for rank in self._layout.output_ranks()]
        return replace(reporting[0], metrics=merge(result.metrics for result in reporting))

    async def write_image(self, image_dir: str, run_id: str, version: int, dtype: str) -> Update:
        """Writes a version's slot; all ranks have written when it returns."""
        self._images = image_dir, run_id
        created = await self._all("create_image", image_dir, run_id, version, dtype, ranks=[0])
        update: Update = created[0]
        await self._all("write_version", update)
        return update

    async def keep(
        self, version: int, dtype: str, num_workers: int, timeout_s: float, *, lends: bool = False
    ) -> Update:
        """Keeps a version to be sent to engines of `num_workers`, or with `lends` to be lent to them on the
        ranks' own devices; the one before can be sent no more."""
        async with self._turn:
            self._kept = None
            offered = await self._call("keep_version", version, dtype, num_workers, timeout_s, lends)
            self._kept = version
            return offered[0]

    def keeps(self, version: int) -> bool:
        """Whether it can be sent: by these ranks, and not after they failed."""
        return self._kept == version

    async def send(
        self, update: Update, wires: Sequence[str], receive: Callable[[], Awaitable[object]]
    ) -> None:
        """Sends a version to the engines at the other ends, which load it in `receive`, between two other
        calls of the group."""
        async with self._turn:
            if not self.keeps(update.version):
                raise TrainerFailed(f"version {update.version} is not kept any more")
            await asyncio.gather(self._call("send_version", update, wires), receive())

    async def refused(self, update: Update, reason: str) -> None:
        """Tells every rank why a version was not taken."""
        await self._all("refused", update, reason)

    async def export(self, folder: str) -> None:
        """Writes a Hugging Face folder: aside first, renamed when whole."""
        target = (await self._all("create_export", folder, ranks=[0]))[0]
        await self._all("write_slices", target)
        await self._all("finish_export", folder, ranks=[0])

    async def save(self, folder: str) -> None:
        """Begins a checkpoint; the next step may follow at once."""
        await self._all("save", folder)

    async def saved(self, *, blocking: bool) -> bool:
        """Whether what `save` began is whole."""
        return all(await self._all("saved", blocking))

    async def load(self, folder: str) -> None:
        await self._all("load", folder)

    def _shares(self, batch: StepBatch) -> _PerRank:
        """Each rank gets its own tokens only; ranks of equal dp and cp get the same."""
        assert len(batch) == self._layout.dp, "one list of micro-batches per dp rank"
        shared = {
            (dp, cp): self._transport.put(micro_batches)
            for dp, by_context in enumerate(context.split(batch, self._layout))
            for cp, micro_batches in enumerate(by_context)
        }
        places = (self._layout.coordinates(rank) for rank in self._layout.ranks())
        return _PerRank([shared[at.dp, at.cp] for at in places])

    async def _all(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """One call of the group after another, in the order in which they were made."""
        async with self._turn:
            return await self._call(method, *args, ranks=ranks, timeout=timeout)

    async def _call(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Results in rank order. ValueError from a rank and a full disk are the user's and pass; anything
        else is TrainerFailed."""
        numbers = list(self._layout.ranks()) if ranks is None else list(ranks)
        timeout = self._config.step_timeout_s if timeout is None else timeout
        calls = {
            asyncio.ensure_future(self._ranks[rank].call(method, *(_of(arg, rank) for arg in args))): rank
            for rank in numbers
        }
        try:
            _, waiting = await asyncio.wait(calls, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            failed = next((call for call in calls if call.done() and call.exception() is not None), None)
            if failed is None and not waiting:
                return [call.result() for call in calls]
            self._kept = None
            if failed is not None:
                failed = await _cause(failed, calls)
        finally:
            late = [rank for call, rank in calls.items() if not call.done()]
            for call in calls:
                call.cancel()
        error = failed.exception() if failed is not None else None
        if isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno in LASTING):
            raise error
        phases = await self._phases(late)
        if failed is None:
            raise TrainerFailed(f"{method}: no answer within {timeout:g} s: {phases}")
        # a rank that hangs fails its peers, whose collectives run out of time
        waits = f"; no answer from {phases}" if late else ""
        raise TrainerFailed(
            f"{method}: rank {calls[failed]} failed: {type(error).__name__}: {error}{waits}"
        ) from error

    async def _phases(self, ranks: Sequence[int]) -> str:
        """What the watchdog says of ranks that do not answer: those at one phase together, so that one that
        is elsewhere stands out."""
        found: dict[str, list[int]] = {}
        for rank, phase in zip(ranks, await asyncio.gather(*map(self._phase, ranks)), strict=True):
            found.setdefault(phase, []).append(rank)
        return "; ".join(
            f"rank{'s' * (len(there) > 1)} {', '.join(map(str, there))} {phase}"
            for phase, there in found.items()
        )

    async def _phase(self, rank: int) -> str:
        try:
            phase = await asyncio.wait_for(self._ranks[rank].call("phase"), timeout=PHASE_TIMEOUT_S)
        except (TimeoutError, RankDied) as error:
            return f"not answering ({type(error).__name__})"
        return f"at {phase}"


async def _cause(failed: asyncio.Future[Any], calls: Collection[asyncio.Future[Any]]) -> asyncio.Future[Any]:
    """The call of a rank that died, if there is one: it breaks the collectives of the others, whose errors
    may come first."""
    if isinstance(failed.exception(), ValueError | RankDied):
        return failed
    done, _ = await asyncio.wait(calls, timeout=DEATH_NOTICE_S)
    return next((call for call in done if isinstance(call.exception(), RankDied)), failed)


class _PerRank(list[Any]):
    """An argument that differs between ranks."""


def _of(arg: Any, rank: int) -> Any:
    return arg[rank] if isinstance(arg, _PerRank) else arg
