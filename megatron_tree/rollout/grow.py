"""Grows the trees: M chains per prompt, then L rounds that continue N nodes of each tree to new leaves.

Growth knows no tool, no text protocol and no engine: see the Protocols of `episode`. `expand_rounds: 0` grows
chains.

Invariants
- A tree has 1 + L·N leaves; only with `root: never` may an expansion find no candidate and be dropped.
- No path spends more turns, tool calls or tokens than configured; a branch inherits what its prefix spent.
- Same seed, same engine output: same tree, however the requests interleaved. Every seed derives from its
  path, nodes are numbered by (round, expansion, turn), and parents come before children.
- Trees do not wait for each other; round l + 1 of a tree waits for its own round l.
- Token in, token out: a context is the node tokens joined; text is derived from them and never encoded again.

Departures from the authors' code: their random numbers are unseeded, all rows move in lockstep, text is
encoded again every turn, there is no token budget, and a cut observation loses its closing tag.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from megatron_tree.config import RolloutConfig
from megatron_tree.rollout.budget import PathBudget, budget_at
from megatron_tree.rollout.episode import Environment, Episode, Generate, Reply, Reward, Turn
from megatron_tree.rollout.select import candidates, draw
from megatron_tree.rollout.tokens import Codec
from megatron_tree.types import Finish, GenerateRequest, Group, IntArray, Leaf, Node, Row, RunFailed, Tree

T = TypeVar("T")


class GrowthError(RunFailed):
    """The environment, a tool or the reward failed; one line naming the path."""


@dataclass(frozen=True, slots=True)
class SeedPath:
    """Where in a run a random number is used: (run seed, iteration, group id, tree, round, expansion, turn).

    Worked example: `SeedPath((0, 3)) / "train/0/nq.jsonl:7@0" / 1` is one tree; its text is the request ids'
    beginning.
    """

    parts: tuple[int | str, ...]

    def __truediv__(self, part: int | str) -> SeedPath:
        return SeedPath((*self.parts, part))

    def __str__(self) -> str:
        return "/".join(map(str, self.parts))

    @property
    def seed(self) -> int:
        """63 bits, the same in every process (Python's own hash is not)."""
        digest = hashlib.blake2b(repr(self.parts).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def generator(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


async def grow_groups(
    rows: Sequence[Row],
    *,
    config: RolloutConfig,
    environment: Environment,
    reward: Reward,
    generate: Generate,
    tokens: Codec,
    seed: SeedPath,
    temperature: float | None = None,
    max_concurrent_trees: int | None = None,
    on_group: Callable[[Group], None] | None = None,
) -> list[Group]:
    """Grows the trees of all rows at once and returns the groups in the order of `rows`.

    `temperature` overrides the config's (0 is greedy). `on_group` is called as each group ends. The first
    failure cancels everything else and is raised: GrowthError for environment, tool or reward; what
    `generate` raises as it is.
    """
    assert len({row.group_id for row in rows}) == len(rows), (
        "group ids must be unique: seeds derive from them"
    )
    if temperature is None:
        temperature = config.temperature
    grower = Grower(config, environment, reward, generate, tokens, temperature)
    gate = nullcontext() if max_concurrent_trees is None else asyncio.Semaphore(max_concurrent_trees)

    async def tree(row: Row, index: int) -> Tree:
        async with gate:
            return await grower.tree(row, index, seed / row.group_id / index)

    async def group(row: Row) -> Group:
        grown = Group(row, await _together(tree(row, index) for index in range(config.trees)))
        if on_group is not None:
            on_group(grown)
        return grown

    return await _together(group(row) for row in rows)


@dataclass(frozen=True, slots=True)
class Grower:
    """What every tree of a run needs to grow."""

    config: RolloutConfig
    environment: Environment
    reward: Reward
    generate: Generate
    tokens: Codec
    temperature: float

    async def tree(self, row: Row, index: int, seed: SeedPath) -> Tree:
        tree = Tree(row.group_id, index, nodes=[_prompt(row)], leaves=[])
        with _named(seed, "environment"):
            episodes: dict[int, Episode] = {0: self.environment.begin(row)}
        await self._round(tree, row, [0], episodes, seed / 0, keep=self.config.expand_rounds > 0)
        for number in range(1, self.config.expand_rounds + 1):
            path = seed / number
            found = candidates(tree, self.config.root)
            drawn = draw(found, self.config.expand_nodes, (path / "draw").generator())
            await self._round(tree, row, drawn, episodes, path, keep=number < self.config.expand_rounds)
        return tree

    async def _round(
        self,
        tree: Tree,
        row: Row,
        origins: Sequence[int],
        episodes: dict[int, Episode],
        path: SeedPath,
        *,
        keep: bool,
    ) -> None:
        """Continues each origin to a leaf, all at once, and numbers the new nodes in the order of the
        origins. `keep`: a later round may branch from them, so their episodes are kept."""
        branches = await _together(
            self._branch(tree, origin, episodes[origin], path / expansion, keep=keep)
            for expansion, origin in enumerate(origins)
        )
        for expansion, (origin, (nodes, states)) in enumerate(zip(origins, branches, strict=True)):
            parent = origin
            for offset, node in enumerate(nodes):
                node.parent, parent = parent, len(tree.nodes)
                if offset < len(states):
                    episodes[parent] = states[offset]
                tree.nodes.append(node)
            tree.leaves.append(self._leaf(tree, row, path / expansion))

    async def _branch(
        self, tree: Tree, origin: int, episode: Episode, path: SeedPath, *, keep: bool
    ) -> tuple[list[Node], list[Episode]]:
        """Turns from `origin` to a leaf, and the state after each turn but the last (with `keep`)."""
        with _named(path, "environment"):
            episode = episode.fork()
        left = budget_at(tree, origin, self.config)
        parts = [
            ids
            for i in tree.path(origin)
            for ids in (tree.nodes[i].action_ids, tree.nodes[i].observation_ids)
        ]
        nodes: list[Node] = []
        states: list[Episode] = []
        while True:
            turn = path / (self.config.max_turns - left.turns)
            node = await self._turn(
                np.concatenate(parts), episode, left, turn, f"{tree.group_id}/{tree.index}"
            )
            nodes.append(node)
            if node.finish not in ("tool", "invalid"):
                return nodes, states
            if keep:
                with _named(turn, "environment"):
                    states.append(episode.fork())
            left = left.after(node)
            parts += [node.action_ids, node.observation_ids]

    async def _turn(
        self, context: IntArray, episode: Episode, left: PathBudget, path: SeedPath, route: str
    ) -> Node:
        """Samples one action and lets the environment answer it. The parent is filled in when the node is
        numbered."""
        request = GenerateRequest(
            request_id=str(path),
            prompt_ids=context,
            max_tokens=min(self.config.max_turn_tokens, left.tokens),
            seed=path.seed,
            temperature=self.temperature,
            top_p=self.config.top_p,
            stop=self.environment.stop,
            route=route,
        )
        result = await self.generate(request)
        assert len(result.token_ids) == len(result.logprobs) <= request.max_tokens, f"{path}: engine result"
        tokens_left = left.tokens - len(result.token_ids)
        turns_left = left.turns - 1 if tokens_left else 0  # without tokens no turn follows
        with _named(path, "environment"):
            reply = await episode.act(
                self.tokens.decode(result.token_ids), turns_left=turns_left, tool_calls_left=left.tool_calls
            )
            if not 0 <= reply.num_tool_calls <= left.tool_calls:
                raise ValueError(f"num_tool_calls: must be 0..{left.tool_calls}, got {reply.num_tool_calls}")
            observation, finish = self._observe(reply, tokens_left, turns_left)
        return Node(
            parent=-1,
            action_ids=np.asarray(result.token_ids, dtype=np.int32),
            observation_ids=observation,
            engine_logprobs=np.asarray(result.logprobs, dtype=np.float32),
            finish=finish,
            policy_version=result.policy_version,
            num_tool_calls=reply.num_tool_calls,
            prefill_tokens=len(context),
            cached_tokens=result.cached_tokens,
        )

    def _observe(self, reply: Reply, tokens_left: int, turns_left: int) -> tuple[IntArray, Finish]:
        """What is read next and how the turn ends. An observation that leaves no token to answer it with ends
        the path and is dropped, as every observation at a leaf."""
        if reply.done:
            return _nothing(), "answer"
        if tokens_left == 0:
            return _nothing(), "max_tokens"
        if turns_left == 0:
            return _nothing(), "max_turns"
        observation = self._cut(reply)
        if len(observation) >= tokens_left:
            return _nothing(), "max_tokens"
        return observation, "tool" if reply.valid else "invalid"

    def _cut(self, reply: Reply) -> IntArray:
        """Observation ids, cut to the cap with `keep_end` still at their end."""
        limit = self.config.max_observation_tokens
        ids = self.tokens.encode(reply.observation)
        if len(ids) <= limit:
            return ids
        end = self.tokens.encode(reply.keep_end)
        if len(end) > limit:
            raise ValueError(
                f"rollout.max_observation_tokens: must hold {reply.keep_end!r} ({len(end)}), got {limit}"
            )
        return np.concatenate([ids[: limit - len(end)], end])

    def _leaf(self, tree: Tree, row: Row, path: SeedPath) -> Leaf:
        """Scores the path to the newest node."""
        last = len(tree.nodes) - 1
        turns = turns_of(tree, last, self.tokens)
        with _named(path, "reward"):
            score = self.reward(row, turns)
            if not math.isfinite(score.reward):
                raise ValueError(f"must be finite, got {score.reward}")
        return Leaf(last, score.reward, score.success, score.answer, score.metrics)


def turns_of(tree: Tree, node: int, tokens: Codec) -> list[Turn]:
    """The path to `node` as text."""
    nodes = [tree.nodes[i] for i in tree.path(node)[1:]]
    return [Turn(tokens.decode(n.action_ids), tokens.decode(n.observation_ids), n.finish) for n in nodes]


def _prompt(row: Row) -> Node:
    return Node(
        parent=-1,
        action_ids=_nothing(),
        observation_ids=row.prompt_ids,
        engine_logprobs=np.empty(0, dtype=np.float32),
        finish="prompt",
        policy_version=0,
    )


def _nothing() -> IntArray:
    return np.empty(0, dtype=np.int32)


@contextmanager
def _named(path: SeedPath, what: str) -> Iterator[None]:
    """Code of the user's runs inside: whatever it raises gets the path's name."""
    try:
        yield
    except Exception as error:  # an environment or a reward is the user's code and may raise anything
        raise GrowthError(f"path {path}: {what}: {type(error).__name__}: {error}") from error


async def _together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs them at once; the first failure cancels the others, waits for them to end and is raised as
    itself."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
