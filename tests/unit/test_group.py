"""The trainer group with fake ranks: who gets what, and what is said of a rank that dies, fails or hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from megatron_tree.config import TrainConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.metrics import Mean
from megatron_tree.train import group as group_module
from megatron_tree.train.group import RankDied, StepResult, TrainerFailed, TrainerGroup, Transport
from megatron_tree.types import Update

LAYOUT = ParallelLayout(tp=2, pp=2, dp=2)  # ranks 4 and 6 report: last stage, tp 0, dp 0 and 1


class FakeRank:
    def __init__(self, rank: int, behaviour: dict[int, Any]) -> None:
        self.rank, self.behaviour, self.killed, self.stopped = rank, behaviour, False, False

    async def call(self, method: str, *args: Any) -> Any:
        if method == "phase":
            await asyncio.sleep(60 * self.stopped)
            return "train policy"
        answer = self.behaviour.get(self.rank)
        if isinstance(answer, Exception):
            raise answer
        if answer == "hang":
            await asyncio.sleep(60)
        if answer == "die":
            await asyncio.sleep(0.05)
            raise RankDied("its node is lost")
        return (self.rank, args) if answer is None else answer

    async def kill(self) -> None:
        self.killed = True


def _group(
    behaviour: dict[int, Any], put: Any = lambda share: share, removed: list[tuple[str, str]] | None = None
) -> tuple[TrainerGroup, list[FakeRank]]:
    made: list[FakeRank] = []

    def remove(*images: str) -> None:
        assert removed is not None, "nothing is to be removed"
        removed.append(images)

    def spawn(rank: int) -> FakeRank:
        made.append(FakeRank(rank, behaviour))
        return made[-1]

    config = TrainConfig(step_timeout_s=0.2)
    group = TrainerGroup(LAYOUT, config, Transport(spawn, put, remove))
    group._ranks = [spawn(rank) for rank in LAYOUT.ranks()]
    return group, made


def test_each_rank_gets_the_share_of_its_dp_index_put_once() -> None:
    put: list[Any] = []

    def remember(share: Any) -> Any:
        put.append(share)
        return ("ref", share)

    group, _ = _group({}, remember)
    asked = asyncio.run(group._all("score", group._shares([["a"], ["b"]]), "actor"))
    assert put == [["a"], ["b"]]
    # dp is the axis between tp and pp: ranks 0 1 | 2 3 | 4 5 | 6 7 have dp 0 1 0 1
    assert [args[0][1] for _, args in asked] == [["a"]] * 2 + [["b"]] * 2 + [["a"]] * 2 + [["b"]] * 2


def test_scores_come_from_the_reporting_ranks() -> None:
    scored = {4: [np.zeros(3)], 6: [np.ones(2)]}
    group, _ = _group({rank: scored.get(rank, "nothing") for rank in LAYOUT.ranks()})
    assert asyncio.run(group.score([[], []], "actor")) == [scored[4], scored[6]]


def test_metrics_of_all_dp_ranks_are_reduced() -> None:
    results = {rank: StepResult({}, 2.0, 0.1, False) for rank in LAYOUT.ranks()}
    results[4] = StepResult({"policy/loss": Mean(1.0, 0.25)}, 2.0, 0.1, False)
    results[6] = StepResult({"policy/loss": Mean(3.0, 0.75)}, 2.0, 0.1, False)
    group, _ = _group(results)
    result = asyncio.run(group.train([[], []], "policy"))
    assert result.metrics["policy/loss"] == Mean(4.0, 1.0)
    assert (result.grad_norm, result.learning_rate, result.skipped) == (2.0, 0.1, False)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (RankDied("the actor died"), "score: rank 5 failed: RankDied: the actor died"),
        (RuntimeError("connection closed"), "score: rank 5 failed: RuntimeError: connection closed"),
        ("hang", "score: no answer within 0.2 s: rank 5 at train policy"),
    ],
)
def test_a_lost_rank_is_named(fault: Any, message: str) -> None:
    group, _ = _group({5: fault})
    with pytest.raises(TrainerFailed, match=message):
        asyncio.run(group.score([[], []], "actor"))


def test_the_dead_rank_is_named_and_not_the_peers_that_failed_before() -> None:
    closed = RuntimeError("connection closed by peer")
    group, _ = _group({0: closed, 2: closed, 4: "die"})
    with pytest.raises(TrainerFailed, match=r"^score: rank 4 failed: RankDied: its node is lost$"):
        asyncio.run(group.score([[], []], "actor"))


def test_a_rank_that_hangs_is_named_beside_the_peers_that_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers' collectives run out of time before the call does. Rank 7 is alive, rank 5 is stopped."""
    monkeypatch.setattr(group_module, "DEATH_NOTICE_S", 0.05)
    monkeypatch.setattr(group_module, "PHASE_TIMEOUT_S", 0.05)
    timed_out = RuntimeError("Timed out waiting for recv")
    group, made = _group(dict.fromkeys(LAYOUT.ranks(), timed_out) | {5: "hang", 6: "hang", 7: "hang"})
    made[5].stopped = True
    with pytest.raises(
        TrainerFailed,
        match=r"^score: rank 0 failed: RuntimeError: Timed out waiting for recv; no answer from "
        r"rank 5 not answering \(TimeoutError\); ranks 6, 7 at train policy$",
    ):
        asyncio.run(group.score([[], []], "actor"))


def test_the_users_mistake_passes_as_it_is() -> None:
    group, _ = _group({3: ValueError("model.path: lacks a tensor")})
    with pytest.raises(ValueError, match=r"^model\.path: lacks a tensor$"):
        asyncio.run(group.load("checkpoint"))


def test_kill_reaches_every_rank() -> None:
    group, made = _group({})
    asyncio.run(group.kill())
    assert all(rank.killed for rank in made)


@pytest.mark.parametrize("dies", ["never", "before", "while it stops"])
def test_images_that_rank_0_cannot_remove_are_removed(dies: str) -> None:
    removed: list[tuple[str, str]] = []

    async def story() -> None:
        group, made = _group(behaviour := {0: Update("", 1, ())}, removed=removed)
        await group.write_image("/images", "run", 1, "fp32")
        if dies == "before":
            await group.kill()
        if dies == "while it stops":
            behaviour[0] = RankDied("gone")  # type: ignore[assignment]
            with pytest.raises(TrainerFailed, match="stop: rank 0 failed"):
                await group.stop()
        else:
            await group.stop()
        assert all(rank.killed for rank in made)

    asyncio.run(story())
    assert removed == ([] if dies == "never" else [("/images", "run")])


def test_a_version_is_sent_between_other_calls_and_only_by_those_who_keep_it() -> None:
    """A send that is asked for during a step comes after it, before what is asked for later; the engines
    begin to load when the ranks begin to send. What is kept goes with the next version and with a failure."""
    told: list[str] = []

    class Telling(FakeRank):
        async def call(self, method: str, *args: Any) -> Any:
            if self.rank == 0:
                told.append(method)
            await asyncio.sleep(0.01)
            return await super().call(method, *args)

    async def receive() -> None:
        told.append("receive")

    async def story() -> None:
        group, _ = _group(behaviour := {})
        group._ranks = [Telling(rank, behaviour) for rank in LAYOUT.ranks()]
        await group.keep(1, "fp32", 1, 1.0)
        step = asyncio.create_task(group._all("step"))
        await asyncio.sleep(0)
        sending = asyncio.create_task(group.send(Update("", 1, ()), ["0.0"], receive))
        await asyncio.sleep(0)
        await asyncio.gather(step, sending, group.keep(2, "fp32", 1, 1.0))
        assert told[:2] + told[4:] == ["keep_version", "step", "keep_version"]
        assert set(told[2:4]) == {"send_version", "receive"}  # together
        with pytest.raises(TrainerFailed, match="version 1 is not kept any more"):
            await group.send(Update("", 1, ()), ["0.0"], receive)
        assert group.keeps(2)
        behaviour[3] = RankDied("gone")
        with pytest.raises(TrainerFailed, match="step: rank 3 failed"):
            await group._all("step")
        assert not group.keeps(2)
        assert told.count("receive") == 1

    asyncio.run(story())
