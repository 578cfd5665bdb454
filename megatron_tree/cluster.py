"""Processes: the only file that imports ray. Starts a local Ray (or joins a cluster) and makes actors of the
engines.

Not here: what the actors do (`engine`), when they are restarted (`engine.pool`).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from megatron_tree.config import EngineConfig
from megatron_tree.engine.engine import Engine, EngineInfo
from megatron_tree.engine.handle import EngineDied
from megatron_tree.engine.pool import EnginePool
from megatron_tree.train.group import RankDied, RankSetup, Transport
from megatron_tree.types import FloatArray, GenerateRequest, GenerateResult, IntArray, Update


@contextmanager
def running_ray(address: str | None = None) -> Iterator[None]:
    """A Ray of our own on this machine, stopped at the end, or the cluster at `address` (also from
    RAY_ADDRESS).
    """
    quiet = {
        "RAY_DEDUP_LOGS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    address = address or os.environ.get("RAY_ADDRESS")
    local = {} if address else {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, 1)}
    # ray.init puts a handler of its own on SIGTERM, which aborts the process: nothing would be saved
    before = signal.getsignal(signal.SIGTERM)
    ray.init(address=address or "local", logging_level=logging.ERROR, **local)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
    try:
        yield
    finally:
        ray.shutdown()


class RayEngine:
    """An `EngineHandle` over an actor; time-outs are the pool's. Child processes of vLLM end with it."""

    def __init__(self, model: str, config: EngineConfig, index: int) -> None:
        gpus = config.tp if torch.cuda.is_available() else 0
        actor = ray.remote(Engine)
        # Zero CPUs: engines and trainer ranks take turns on the same cores, so Ray must not count them apart.
        options = actor.options(num_cpus=0, num_gpus=gpus, max_concurrency=4096, max_restarts=0)
        self._actor = options.remote(model, config)
        self.index = index
        self.info: EngineInfo | None = None

    async def start(self, update: Update | None) -> None:
        self.info = await self._call("start", update)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._call("generate", request)

    async def score(self, request_id: str, token_ids: IntArray) -> FloatArray:
        return await self._call("score", request_id, token_ids)

    async def check(self, update: Update) -> None:
        await self._call("check", update)

    async def update(self, update: Update) -> int:
        return await self._call("update", update)

    async def kill(self) -> None:
        """Removes shared memory that a killed vLLM leaves, too, if it ran on this host."""
        ray.kill(self._actor)
        for segment in self.info.segments if self.info else ():
            Path(segment).unlink(missing_ok=True)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayActorError as error:
            raise EngineDied(f"engine {self.index}: its actor died: {str(error).splitlines()[0]}") from error
        except RayTaskError as error:
            raise error.cause from None  # the engine's own exception, without Ray's traceback text


def engine_pool(model: str, config: EngineConfig) -> EnginePool:
    """The configured number of engines of a model folder, not started."""
    return EnginePool(config, lambda index: RayEngine(model, config, index))


class _RankActor:
    """One trainer rank. The default group has one thread, so collective calls never overlap; `phase` has its
    own, so that a hanging rank can still say where it is. Megatron is imported here and not in the driver.
    """

    def __init__(self, rank: int, setup: RankSetup) -> None:
        warnings.filterwarnings("ignore", module=r"megatron|torch\.distributed")
        from megatron_tree.train.rank import TrainRank

        self._rank = TrainRank(rank, setup)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._rank, method)(*args)

    @ray.method(concurrency_group="status")
    def phase(self) -> str:
        return self._rank.phase()


class RayRank:
    """A `RankHandle` over an actor."""

    def __init__(self, rank: int, setup: RankSetup) -> None:
        actor = ray.remote(concurrency_groups={"status": 1})(_RankActor)
        gpus = 1 if torch.cuda.is_available() else 0
        self._actor = actor.options(num_cpus=0, num_gpus=gpus, max_restarts=0).remote(rank, setup)

    async def call(self, method: str, *args: Any) -> Any:
        try:
            if method == "phase":
                return await self._actor.phase.remote()
            return await self._actor.call.remote(method, *args)
        except RayActorError as error:
            raise RankDied(str(error).splitlines()[0]) from error
        except RayTaskError as error:
            raise error.cause from None

    async def kill(self) -> None:
        ray.kill(self._actor)


def trainer_transport(setup: RankSetup) -> Transport:
    """How a trainer group reaches its ranks: one `ray.put` for each share of the data."""
    return Transport(spawn=lambda rank: RayRank(rank, setup), put=ray.put)
