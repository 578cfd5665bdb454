"""Ten-line stand-ins for growth tests: a tokenizer of characters, an engine of seeded text, an environment
with state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_tree.rollout.episode import Reply, Score, Turn
from megatron_tree.types import GenerateRequest, GenerateResult, IntArray, Row


class Letters:
    """One token per character."""

    def encode(self, text: str) -> IntArray:
        return np.array([ord(c) for c in text], dtype=np.int32)

    def decode(self, ids: IntArray) -> str:
        return "".join(chr(i) for i in ids)


def row(group_id: str = "g", prompt: str = "ask") -> Row:
    return Row(group_id, "fake", (), Letters().encode(prompt), ("yes",))


@dataclass
class SeededEngine:
    """Says `S…` (search), `A…` (answer) or `x…` (nonsense) by the request's seed alone; ends in an order of
    its own."""

    delays: random.Random = field(default_factory=lambda: random.Random(0))
    requests: list[GenerateRequest] = field(default_factory=list)

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        for _ in range(self.delays.randrange(6)):
            await asyncio.sleep(0)
        rng = np.random.default_rng(request.seed)
        text = str(rng.choice(["S", "A", "x"], p=[0.5, 0.3, 0.2])) + "." * int(rng.integers(0, 9))
        ids = Letters().encode(text)[: request.max_tokens]
        logprobs = -rng.random(len(ids)).astype(np.float32)
        return GenerateResult(
            ids, logprobs, "stop", cached_tokens=len(request.prompt_ids) // 2, policy_version=7
        )


@dataclass
class ScriptedEngine:
    """Says the texts of its script, one after the other; None is as many dots as the request allows."""

    script: Sequence[str | None]
    requests: list[GenerateRequest] = field(default_factory=list)

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        text = self.script[len(self.requests)]
        self.requests.append(request)
        text = "." * request.max_tokens if text is None else text
        finish = "length" if len(text) == request.max_tokens else "stop"
        ids = Letters().encode(text)
        return GenerateResult(ids, np.zeros(len(ids), np.float32), finish, cached_tokens=0, policy_version=0)


@dataclass
class Counted:
    """An episode that counts its own actions and says so: `<n>` and a closing `!`."""

    world: CountingWorld
    count: int = 0

    async def act(self, action: str, *, turns_left: int, tool_calls_left: int) -> Reply:
        self.count += 1
        self.world.seen.append((action, turns_left, tool_calls_left))
        if action.startswith("A"):
            return Reply("", done=True)
        said = f"<{self.count}>{'o' * self.world.filler}!"
        if action.startswith("S") and tool_calls_left and turns_left:
            return Reply(said, num_tool_calls=1, keep_end="!")
        return Reply(said, valid=False, keep_end="!")

    def fork(self) -> Counted:
        return Counted(self.world, self.count)


@dataclass
class CountingWorld:
    filler: int = 0
    seen: list[tuple[str, int, int]] = field(default_factory=list)
    stop: tuple[str, ...] = ("stop",)

    def begin(self, row: Row) -> Counted:
        return Counted(self)


def length_reward(row: Row, turns: Sequence[Turn]) -> Score:
    """The number of turns; right when it answered."""
    answered = turns[-1].finish == "answer"
    return Score(
        float(len(turns)), float(answered), turns[-1].action if answered else None, {"turns": len(turns)}
    )
