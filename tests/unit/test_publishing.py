"""Which transport a run takes, over what its hosts see and share; and what a refused version costs. Places,
trainers and engines are stand-ins that answer; real ones are in `tests/e2e`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from megatron_tree.config import EngineConfig
from megatron_tree.placement import Node, Placement, Spot
from megatron_tree.publishing import Publisher, with_transport
from megatron_tree.train.group import TrainerFailed
from megatron_tree.turns import Turns
from megatron_tree.types import RunFailed, Update

UNSEEN = "/dev/shm of rank 0's host is not seen on b"


def hosts(mode: Literal["disaggregated", "colocated"] = "disaggregated", *, num_ranks: int = 2) -> Placement:
    """An engine of two GPUs; where shared, on those of the ranks."""
    node = Node("a", "a", 8)
    first = 0 if mode == "colocated" else num_ranks
    ranks = tuple(Spot(node, (gpu,)) for gpu in range(num_ranks))
    return Placement(mode, ranks, (Spot(node, (first, first + 1)),))


@dataclass
class Hosts:
    placement: Placement
    unseen: tuple[str, ...] = ()

    def blind(self, folder: str) -> list[str]:
        assert folder == "/dev/shm"
        return list(self.unseen)


@pytest.mark.parametrize(
    ("asked", "hosts", "taken"),
    [
        ("auto", Hosts(hosts()), "shm"),
        ("shm", Hosts(hosts()), "shm"),
        ("stream", Hosts(hosts()), "stream"),
        ("auto", Hosts(hosts(), ("b",)), f"stream; engine.transport: stream, since {UNSEEN}"),
        ("stream", Hosts(hosts(), ("b",)), "stream"),
        ("auto", Hosts(hosts("colocated")), "shm"),
        ("auto", Hosts(hosts("colocated", num_ranks=1)), "shm"),
        ("ipc", Hosts(hosts("colocated")), "ipc"),
        ("auto", Hosts(hosts("colocated"), ("b",)), f"ipc; engine.transport: ipc, since {UNSEEN}"),
        (
            "shm",
            Hosts(hosts(), ("b",)),
            f"engine.transport: shm is for one host, and {UNSEEN}; stream is for several",
        ),
        (
            "shm",
            Hosts(hosts("colocated"), ("b",)),
            f"engine.transport: shm is for one host, and {UNSEEN}; ipc is for several",
        ),
        (
            "ipc",
            Hosts(hosts("colocated", num_ranks=1)),
            "engine.transport: ipc needs a trainer rank on each engine worker's GPU, got none on a:1",
        ),
    ],
)
def test_the_transport(asked: str, hosts: Hosts, taken: str) -> None:
    assert told(EngineConfig.model_validate({"transport": asked}), hosts) == taken


def told(engine: EngineConfig, hosts: Hosts) -> str:
    said: list[str] = []
    try:
        engine = with_transport(engine, hosts, said.append)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return "; ".join([engine.transport, *said])


@dataclass
class Parts:
    """Trainers and engines; what engines answer, version by version."""

    answers: list[Exception | None]
    config: EngineConfig
    done: list[str] = field(default_factory=list)

    async def write_image(self, folder: str, run: str, version: int, dtype: str) -> Update:
        self.done.append(f"write {version}")
        return Update(f"{folder}/{run}", version, ())

    async def keep(self, version: int, *_: Any, lends: bool) -> Update:
        self.done.append(f"keep {version}{' to lend' if lends else ''}")
        return Update("", version, ())

    async def update(self, update: Update) -> None:
        if (answer := self.answers.pop(0)) is not None:
            raise answer
        self.done.append(f"load {update.version}")

    async def refused(self, update: Update, reason: str) -> None:
        self.done.append(f"forget {update.version}: {reason}")


def publisher(*answers: Exception | None, transport: str = "shm") -> tuple[Publisher, Parts, list[str]]:
    parts = Parts(list(answers), EngineConfig.model_validate({"transport": transport}))
    said: list[str] = []
    return Publisher(parts, parts, Turns(), "run", said.append), parts, said  # type: ignore[arg-type]


def test_a_refused_version_is_written_again_under_its_number() -> None:
    made, parts, said = publisher(None, ValueError("a flipped byte"), None)
    for _ in range(2):
        asyncio.run(made.publish())
    assert parts.done == ["write 1", "load 1", "write 2", "forget 2: a flipped byte", "write 2", "load 2"]
    assert said == ["publish: a flipped byte; writing version 2 again"]
    assert made.version == 2


def test_a_version_refused_twice_ends_the_run() -> None:
    made, parts, _ = publisher(ValueError("once"), ValueError("twice"))
    with pytest.raises(RunFailed, match=r"^publish: version 1 refused: twice$"):
        asyncio.run(made.publish())
    assert made.version == 0
    assert "load 1" not in parts.done


def test_a_version_that_was_half_sent_gives_no_other_its_number() -> None:
    made, parts, _ = publisher(TrainerFailed("gone"), None, transport="stream")
    with pytest.raises(TrainerFailed, match="gone"):
        asyncio.run(made.publish())
    asyncio.run(made.publish())
    assert parts.done == ["keep 1", "keep 2", "load 2"]


def test_colocated_ranks_lend() -> None:
    made, parts, _ = publisher(None, transport="ipc")
    asyncio.run(made.publish())
    assert parts.done == ["keep 1 to lend", "load 1"]
