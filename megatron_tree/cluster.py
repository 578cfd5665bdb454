"""Processes: the only file that imports ray. Starts a local Ray (or joins a cluster), reserves the GPUs of a
placement, and makes actors of trainer ranks and engines on their nodes.

The run holds its GPUs as placement groups, pinned to the planned nodes. Its actors take none from Ray: each
is told by CUDA_VISIBLE_DEVICES which are its own, so that a rank and an engine may share one. Not here: what
goes where (`placement`), what the actors do (`engine`, `train.rank`), when they are restarted (`engine.pool`,
`session`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import ObjectRef
from ray._private.state import available_resources_per_node
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megatron_tree.config import EngineConfig
from megatron_tree.engine.engine import Engine, EngineInfo
from megatron_tree.engine.handle import Aborted, EngineDied
from megatron_tree.engine.pool import EnginePool
from megatron_tree.layout import ParallelLayout
from megatron_tree.placement import Node, Placement, Spot, moved
from megatron_tree.reshard import publish
from megatron_tree.train.group import RankDied, RankSetup, Transport
from megatron_tree.types import FloatArray, GenerateRequest, GenerateResult, IntArray, RunFailed, Update

Result = TypeVar("Result")
RESERVE_TIMEOUT_S = 60.0  # GPUs that are not free by then belong to somebody else, and a node is to answer
ANSWER_TIMEOUT_S = 2.0  # of a node, to a connection
LOST = (RayActorError, ActorUnschedulableError)  # a process, or the node it was to start on


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
    host, _, port = (address or "").rpartition(":")
    if port.isdigit() and "/" not in host and not _connects(host, int(port)):  # Ray would try for ten minutes
        raise RunFailed(f"RAY_ADDRESS: no cluster answers at {address}")
    local = {} if address else {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, 1)}
    # ray.init puts a handler of its own on SIGTERM, which aborts the process: nothing would be saved
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "local", logging_level=logging.ERROR, **local)
    except Exception as error:  # Ray raises the bare class where a node is too slow to start
        verb = f"join the cluster at {address}" if address else "start"
        raise RunFailed(f"Ray does not {verb}: {' '.join(str(error).split())}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
    try:
        yield
    finally:
        ray.shutdown()


def nodes() -> list[Node]:
    """Those that answer, the driver's first."""
    here, free = ray.get_runtime_context().get_node_id(), available_resources_per_node()
    found = [node for node in ray.nodes() if _answers(node)]
    found.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
    return [_node(node, free.get(node["NodeID"])) for node in found]


def _node(node: dict[str, Any], free: dict[str, float] | None) -> Node:
    """`free`: what Ray says is, which may be late; None of a node that it does not know so well yet."""
    num_gpus = int(node["Resources"].get("GPU", 0))
    num_free = num_gpus if free is None else int(free.get("GPU", 0))
    return Node(node["NodeID"], node["NodeManagerAddress"], num_gpus, num_gpus - num_free)


def _answers(node: dict[str, Any]) -> bool:
    """Ray itself notices a lost node only after many seconds."""
    return node["Alive"] and _connects(node["NodeManagerAddress"], node["NodeManagerPort"])


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=ANSWER_TIMEOUT_S).close()
    except OSError:
        return False
    return True


class Places:
    """Where the actors of a run start: holds the GPUs of a placement, and moves what a lost node held when it
    is to start again."""

    def __init__(self, placement: Placement, layout: ParallelLayout) -> None:
        self._placement, self._layout = placement, layout
        self._gpu_ids: dict[tuple[Node, int], str] = {}  # of a node's GPU as placed: the driver's number
        self._lock = threading.Lock()  # engines ask from threads
        self._reserve()

    @property
    def placement(self) -> Placement:
        return self._placement

    def blind(self, folder: str) -> list[str]:
        """Hosts whose processes do not see what those of rank 0 write into this folder: found out by a file,
        since nodes may share a host and containers of one host no memory."""
        spots = (*self._placement.ranks, *self._placement.engines)
        nodes = list(dict.fromkeys(spot.node for spot in spots))
        if len(nodes) == 1:
            return []
        nonce = Path(folder) / f"{publish.PREFIX}{uuid.uuid4().hex}.nonce"
        try:
            _on(nodes[:1], lambda: nonce.touch())
        except OSError as error:
            raise ValueError(f"engine.image_dir: {nodes[0].host}: {error}") from None
        try:
            seen = _on(nodes, lambda: os.path.exists(nonce))
        finally:
            _on(nodes[:1], lambda: nonce.unlink())
        return [node.host for node, there in zip(nodes, seen, strict=True) if not there]

    def check_room(self, image_dir: str, run_id: str, image_bytes: int) -> None:
        """`publish.check_room` where rank 0 writes."""
        here = [self._placement.ranks[0].node]
        _on(here, lambda: publish.check_room(image_dir, run_id, image_bytes))

    def remove_images(self, folder: str, run_id: str) -> None:
        """Of a run whose rank 0 was killed."""
        _remove(self._placement.ranks[0].node, Path(folder), [f"{publish.PREFIX}{run_id}[-.]*"])

    def rank(self, rank: int) -> Spot:
        width = self._layout.tp * len(self._placement.ranks[rank].gpus)  # ranks move with their group
        return self._living(lambda: self._placement.ranks[rank], f"trainer rank {rank}", width)

    def engine(self, index: int) -> Spot:
        width = len(self._placement.engines[index].gpus)
        return self._living(lambda: self._placement.engines[index], f"engine {index}", width)

    def address(self, spot: Spot) -> str:
        """Under which all processes of the run reach a process there."""
        return "127.0.0.1" if len(self._placement.hosts) == 1 else spot.node.host

    def options(self, spot: Spot) -> dict[str, Any]:
        """Ray's, of an actor there."""
        visible = ",".join(self._gpu_ids[spot.node, gpu] for gpu in spot.gpus)
        # where no node has a GPU there is none to hide
        environment = {"env_vars": {"CUDA_VISIBLE_DEVICES": visible}} if spot.node.num_gpus else {}
        return {
            # engines and trainer ranks take turns on the same cores, so Ray must not count them apart
            "num_cpus": 0,
            "num_gpus": 0,
            "max_restarts": 0,
            # on the node, outside of the group: inside one vLLM would make Ray actors of its workers
            "scheduling_strategy": NodeAffinitySchedulingStrategy(spot.node.name, soft=False),
            "runtime_env": environment,
        }

    def fate(self, spot: Spot, error: Exception) -> str:
        """What became of a process there that is gone."""
        if not _is_there(spot.node):
            return f"its node {spot.node.host} is lost"
        return f"its process on {spot.node.host} died: {str(error).splitlines()[0]}"

    def _living(self, find: Callable[[], Spot], what: str, width: int) -> Spot:
        with self._lock:
            lost = find().node
            if not _is_there(lost):
                alive = self._alive()
                self._placement = moved(self._placement, alive, self._layout)
                if find().node not in alive:
                    gpus = f"has {width} GPUs free" if width else "is there"
                    raise RunFailed(f"cluster: node {lost.host} is lost, and no other {gpus} for {what}")
            self._reserve()
            return find()

    def _alive(self) -> list[Node]:
        """Nodes that answer; what this run holds there is not held by somebody else."""
        mine = Counter(node for node, _ in self._gpu_ids)
        return [replace(node, num_held=max(0, node.num_held - mine[node])) for node in nodes()]

    def _reserve(self) -> None:
        """Takes the GPUs that are placed and not held yet, all or none, and learns their numbers."""
        spots = (*self._placement.ranks, *self._placement.engines)
        placed = {(spot.node, gpu) for spot in spots for gpu in spot.gpus} - self._gpu_ids.keys()
        wanted: dict[Node, list[int]] = {}
        for node, gpu in sorted(placed, key=lambda at: (at[0].name, at[1])):
            wanted.setdefault(node, []).append(gpu)
        if not wanted:
            return
        group = placement_group(
            [{"GPU": len(gpus)} for gpus in wanted.values()],
            bundle_label_selector=[{"ray.io/node-id": node.name} for node in wanted],
        )
        if not group.wait(RESERVE_TIMEOUT_S):
            remove_placement_group(group)
            listed = " and ".join(f"{len(gpus)} on {node.host}" for node, gpus in wanted.items())
            raise RunFailed(
                f"cluster: something else holds GPUs of the placement, {listed}: not free in "
                f"{RESERVE_TIMEOUT_S:g} s"
            )
        # a lambda travels by value: the worker need not import this package
        ask = ray.remote(lambda: ray.get_runtime_context().get_accelerator_ids()["GPU"])
        calls = []
        for bundle, gpus in enumerate(wanted.values()):
            inside = PlacementGroupSchedulingStrategy(group, bundle)
            calls.append(ask.options(num_cpus=0, num_gpus=len(gpus), scheduling_strategy=inside).remote())
        try:
            numbers = _results(wanted, calls)
        except RunFailed:
            remove_placement_group(group)  # else nobody could have these GPUs, not even this run's next try
            raise
        for (node, gpus), ids in zip(wanted.items(), numbers, strict=True):
            self._gpu_ids |= {(node, gpu): str(number) for gpu, number in zip(gpus, ids, strict=True)}


def _on(nodes: Sequence[Node], act: Callable[[], Result]) -> list[Result]:
    """What it returns in a process on each node, or what it raises there."""
    calls = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node.name, soft=False)
        calls.append(ray.remote(act).options(num_cpus=0, scheduling_strategy=there).remote())
    return _results(nodes, calls)


def _remove(node: Node, folder: Path, names: Sequence[str]) -> None:
    """What killed processes left on a node; one that is lost took it with it. Names are patterns."""

    def there() -> None:
        for path in (path for name in names for path in folder.glob(name)):
            path.unlink(missing_ok=True)

    with suppress(RunFailed):
        _on([node], there)


def _results(nodes: Iterable[Node], calls: list[ObjectRef[Any]]) -> list[Any]:
    """RunFailed where a node gives none."""
    try:
        return ray.get(calls, timeout=RESERVE_TIMEOUT_S)
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        hosts = ", ".join(node.host for node in nodes)
        raise RunFailed(f"cluster: no process answers on {hosts}: {str(error).splitlines()[0]}") from error


def _is_there(node: Node) -> bool:
    return any(one["NodeID"] == node.name and _answers(one) for one in ray.nodes())


class RayEngine:
    """An `EngineHandle` over an actor; time-outs are the pool's. Child processes of vLLM end with it."""

    def __init__(self, model: str, config: EngineConfig, index: int, places: Places) -> None:
        self._model, self._config, self._places = model, config, places
        self._actor: Any = None  # until `start`
        self.index = index
        self.info: EngineInfo | None = None

    async def start(self, update: Update | None) -> int:
        try:
            self._spot = await asyncio.to_thread(self._places.engine, self.index)
        except RunFailed as failure:
            raise EngineDied(str(failure)) from failure
        options = self._places.options(self._spot)
        actor = ray.remote(Engine).options(max_concurrency=4096, **options)
        self._actor = actor.remote(self._model, self._config, self._places.placement.mode == "colocated")
        self.info = await self._call("start", update)
        return self.info.version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._call("generate", request)

    async def score(self, request_id: str, token_ids: IntArray) -> FloatArray:
        return await self._call("score", request_id, token_ids)

    async def check(self, update: Update) -> None:
        await self._call("check", update)

    async def update(self, update: Update) -> int:
        return await self._call("update", update)

    async def sleep(self, level: int) -> None:
        await self._call("sleep", level)

    async def wake(self, part: str) -> None:
        await self._call("wake", part)

    async def kill(self) -> None:
        """Removes shared memory that a killed vLLM leaves, too."""
        if self._actor is not None:
            ray.kill(self._actor)
        if self.info is not None and self.info.segments:
            names = [Path(segment).name for segment in self.info.segments]
            await asyncio.to_thread(_remove, self._spot.node, Path("/dev/shm"), names)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except LOST as error:
            raise EngineDied(f"engine {self.index}: {self._places.fate(self._spot, error)}") from error
        except RayTaskError as error:
            cause = error.cause  # the engine's own exception, without Ray's traceback text
            if isinstance(cause, EngineDied | Aborted | ValueError):
                raise cause from None
            # vLLM may raise anything, where a child of it died in whatever it was asked for
            raise EngineDied(f"engine {self.index}: {method}: {type(cause).__name__}: {cause}") from error


def engine_pool(model: str, config: EngineConfig, places: Places) -> EnginePool:
    """The configured number of engines of a model folder, not started."""
    return EnginePool(config, lambda index: RayEngine(model, config, index, places))


class _RankActor:
    """One trainer rank. The default group has one thread, so collective calls never overlap; `phase` has its
    own, so that a hanging rank can still say where it is. Megatron is imported here and not in the driver.
    """

    def __init__(self, rank: int, setup: RankSetup, address: str) -> None:
        warnings.filterwarnings("ignore", module=r"megatron|torch\.distributed")
        from megatron_tree.train.rank import TrainRank

        self._rank = TrainRank(rank, setup, address)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._rank, method)(*args)

    @ray.method(concurrency_group="status")
    def phase(self) -> str:
        return self._rank.phase()


class RayRank:
    """A `RankHandle` over an actor."""

    def __init__(self, rank: int, setup: RankSetup, places: Places) -> None:
        self._places, self._spot = places, places.rank(rank)
        actor = ray.remote(concurrency_groups={"status": 1})(_RankActor)
        self._actor = actor.options(**places.options(self._spot)).remote(
            rank, setup, places.address(self._spot)
        )

    async def call(self, method: str, *args: Any) -> Any:
        try:
            if method == "phase":
                return await self._actor.phase.remote()
            return await self._actor.call.remote(method, *args)
        except LOST as error:
            raise RankDied(self._places.fate(self._spot, error)) from error
        except RayTaskError as error:
            raise error.cause from None

    async def kill(self) -> None:
        ray.kill(self._actor)


def trainer_transport(setup: RankSetup, places: Places) -> Transport:
    """How a trainer group reaches its ranks: one `ray.put` for each share of the data."""
    return Transport(lambda rank: RayRank(rank, setup, places), ray.put, places.remove_images)
