"""Stories on a Ray cluster of several nodes in one process tree; the last line of stdout tells them as JSON.

    python -m tests.e2e.nodes              ranks and engines are light stand-ins that say where they are
    python -m tests.e2e.nodes CONFIG.yaml  a run with real ranks and prepared rollouts (`replay`)

Placement, pool, trainer group and Ray are the program's own. GPUs are claims that nobody checks. A process of
its own, since one joins one cluster only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from megatron_tree import cluster, loop
from megatron_tree.config import Config, load
from megatron_tree.placement import Placement, place
from megatron_tree.train.group import RankSetup, TrainerGroup
from megatron_tree.types import GenerateRequest, GenerateResult, RunFailed, Update
from tests.e2e.replay import ReplaySession

A, B, C = (f"127.0.0.{last}" for last in (2, 3, 4))
LONG = 1000  # tokens that take the engine on B for ever
GPUS = {A: 2, B: 1, C: 4}


def here() -> dict[str, str]:
    host = ray.util.get_node_ip_address()
    return {"host": host, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "-")}


class LightRank:
    def __init__(self, rank: int, setup: RankSetup, address: str) -> None:
        self.rank, self.address = rank, address

    async def call(self, method: str, *args: Any) -> Any:
        if method == "hang":
            await asyncio.sleep(1000)
        return {"bind": (self.address, 0), "where": here()}.get(method)

    async def phase(self) -> str:
        return "hanging"


class LightEngine:
    """Its tokens are the bytes of its host and GPUs. It knows nothing that imports torch."""

    def __init__(self, *_: Any) -> None: ...

    async def start(self, update: Update | None) -> SimpleNamespace:
        return SimpleNamespace(version=0, segments=())

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.max_tokens == LONG and here()["host"] == B:
            await asyncio.sleep(1000)
        where = np.frombuffer(json.dumps(here()).encode(), np.uint8).astype(np.int32)
        return GenerateResult(where, np.zeros(len(where), np.float32), "stop", 0, 0)


def config(count: int = 1) -> Config:
    """Two ranks and so many engines of one GPU."""
    return Config.model_validate(
        {
            "run": {"dir": "run"},
            "model": {"path": "model"},
            "environment": {"target": "a:B"},
            "reward": {"target": "a:B"},
            "train": {"parallel": {"tp": 2}},
            "engine": {"count": count, "max_restarts": 1},
        }
    )


class Site:
    """A head without GPUs, as a driver's often is, and workers with some."""

    def __init__(self) -> None:
        head = {"num_cpus": 1, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._workers: dict[str, Any] = {}

    def add(self, host: str, num_gpus: int) -> None:
        self._workers[host] = self._cluster.add_node(num_cpus=0, num_gpus=num_gpus, node_ip_address=host)

    def take(self, host: str, num_gpus: int) -> None:
        """As another run does."""
        node = next(node for node in ray.nodes() if node["NodeManagerAddress"] == host)
        there = [{"ray.io/node-id": node["NodeID"]}]
        ray.get(placement_group([{"GPU": num_gpus}], bundle_label_selector=there).ready())

    def lose(self, host: str) -> None:
        """As if its power had gone: nobody says goodbye."""
        self._cluster.remove_node(self._workers.pop(host), allow_graceful=False)

    @property
    def address(self) -> str:
        return self._cluster.address

    def close(self) -> None:
        self._cluster.shutdown()


class Run:
    """A trainer group and a pool on the cluster as it is."""

    def __init__(self, settings: Config) -> None:
        self.layout = settings.train.parallel.layout
        places = cluster.Places(place(settings, cluster.nodes()), self.layout)
        self.trainer = TrainerGroup(self.layout, settings.train, cluster.trainer_transport(None, places))  # type: ignore[arg-type]
        self.pool = cluster.engine_pool("model", settings.engine, places)

    async def start(self) -> None:
        await asyncio.gather(self.trainer.start("weights"), self.pool.start())

    async def ranks(self) -> list[str]:
        return [_shown(where) for where in await self.trainer._all("where")]

    async def engine(self, route: str, max_tokens: int = 1) -> str:
        request = GenerateRequest(route, np.array([1], np.int32), max_tokens, 0, 1.0, 1.0, (), route)
        return _shown(json.loads(bytes((await self.pool(request)).token_ids.astype(np.uint8))))

    async def bound(self) -> str:
        return (await self.trainer._all("bind", ranks=[0]))[0][0]

    async def stop(self) -> None:
        await self.trainer.kill()
        await self.pool.stop()


def _shown(where: dict[str, str]) -> str:
    return f"{where['host']}:{where['gpus']}"


async def said(work: Any) -> str:
    try:
        await work
    except (RunFailed, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


async def story(site: Site) -> dict[str, Any]:
    """Ranks on one node and an engine on another; first the node of the ranks is lost, then the engine's."""
    told: dict[str, Any] = {"refused": await said(_place(config(count=2)))}
    run = Run(config())
    await run.start()
    told |= {"ranks": await run.ranks(), "bound": await run.bound(), "engine": await run.engine("a")}
    with patch.object(cluster, "RESERVE_TIMEOUT_S", 2.0):
        told["held"] = await said(_place(config()))
    hanging = asyncio.create_task(said(run.trainer._all("hang")))
    await asyncio.sleep(0.1)
    site.lose(A)
    told["lost_ranks"] = await hanging
    await run.trainer.kill()
    told["no_place"] = await said(run.trainer.start("weights"))
    site.add(C, GPUS[C])
    site.take(C, 1)
    told["beside"] = _places(place(config(), cluster.nodes()))
    await run.trainer.start("weights")
    told["moved_ranks"] = await run.ranks()
    waiting = asyncio.create_task(run.engine("b", max_tokens=LONG))
    await asyncio.sleep(0.1)
    site.lose(B)
    told["moved_engine"] = await waiting
    told["restarts"] = run.pool.metrics()["engine/restarts"].value
    await run.stop()
    return told


async def _place(settings: Config) -> None:
    Run(settings)


def _places(placement: Placement) -> dict[str, int]:
    """How many GPUs of each host."""
    return Counter(spot.node.host for spot in (*placement.ranks, *placement.engines) for _ in spot.gpus)


class Losing(ReplaySession):
    """Loses the node of its ranks once two iterations are done."""

    site: Site

    async def publish(self) -> None:
        await super().publish()
        if self.publisher.version == 3:
            self.site.lose(A)


def run(config_path: str) -> dict[str, object]:
    async def until_done(site: Site) -> dict[str, object]:
        session = Losing(load(config_path))
        session.site = site
        async with session as entered:
            return await loop.train(entered)

    with on_site(A, C) as site:
        os.environ["RAY_ADDRESS"] = site.address
        return asyncio.run(until_done(site))


def light() -> dict[str, Any]:
    cluster._RankActor, cluster.Engine = LightRank, LightEngine  # type: ignore[assignment,misc]
    with on_site(A, B) as site, cluster.running_ray(site.address):
        return asyncio.run(story(site))


@contextmanager
def on_site(*hosts: str) -> Iterator[Site]:
    site = Site()
    try:
        for host in hosts:
            site.add(host, GPUS[host])
        yield site
    finally:
        site.close()


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1]) if sys.argv[1:] else light()))
