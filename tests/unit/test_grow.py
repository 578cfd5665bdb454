"""The invariants of `grow`, under the words of its head, and each way a path can end."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree.config import RolloutConfig
from megatron_tree.rollout.episode import Generate, Reply, Score
from megatron_tree.rollout.grow import GrowthError, SeedPath, grow_groups, turns_of
from megatron_tree.types import GenerateResult, Group, Tree
from tests.unit.rollout_fakes import CountingWorld, Letters, ScriptedEngine, SeededEngine, length_reward, row

SEED = SeedPath((5, 0))


def grow(
    generate: Generate, config: RolloutConfig, rows=None, world=None, reward=length_reward, **more
) -> list[Group]:
    return asyncio.run(
        grow_groups(
            rows or [row()],
            config=config,
            environment=world or CountingWorld(),
            reward=reward,
            generate=generate,
            tokens=Letters(),
            seed=more.pop("seed", SEED),
            **more,
        )
    )


def assert_equal_trees(left: list[Group], right: list[Group]) -> None:
    for a, b in zip([t for g in left for t in g.trees], [t for g in right for t in g.trees], strict=True):
        assert (a.group_id, a.index, a.leaves) == (b.group_id, b.index, b.leaves)
        assert len(a.nodes) == len(b.nodes)
        for x, y in zip(a.nodes, b.nodes, strict=True):
            assert (x.parent, x.finish, x.num_tool_calls) == (y.parent, y.finish, y.num_tool_calls)
            assert x.action_ids.tolist() == y.action_ids.tolist()
            assert x.observation_ids.tolist() == y.observation_ids.tolist()
            assert x.engine_logprobs.tolist() == y.engine_logprobs.tolist()


configs = st.builds(
    RolloutConfig,
    trees=st.integers(1, 2),
    expand_nodes=st.integers(1, 3),
    expand_rounds=st.integers(0, 3),
    root=st.sampled_from(["fallback", "always", "never"]),
    max_turns=st.integers(1, 5),
    max_tool_calls=st.integers(0, 3),
    max_path_tokens=st.integers(1, 60),
    max_turn_tokens=st.integers(1, 12),
    max_observation_tokens=st.integers(1, 12),
)


@settings(max_examples=80, deadline=None)
@given(config=configs, seed=st.integers(0, 2**40), filler=st.integers(0, 12))
def test_invariants(config: RolloutConfig, seed: int, filler: int) -> None:
    engine = SeededEngine(random.Random(1))
    rows = [row("a", "one"), row("b", "three")]
    path = SeedPath((seed, 3))
    groups = grow(engine, config, rows, CountingWorld(filler), seed=path)

    assert [g.row.group_id for g in groups] == ["a", "b"]
    assert [[t.index for t in g.trees] for g in groups] == [list(range(config.trees))] * 2
    requests = {r.request_id: r for r in engine.requests}
    assert len(requests) == len(engine.requests) == len({r.seed for r in engine.requests})
    for group in groups:
        for tree in group.trees:
            check_tree(tree, config, f"{path}/{tree.group_id}/{tree.index}", requests)

    # same seed, same engine output: same tree, however the requests interleaved
    again = grow(
        SeededEngine(random.Random(2)), config, rows, CountingWorld(filler), seed=path, max_concurrent_trees=1
    )
    assert_equal_trees(groups, again)


def check_tree(tree: Tree, config: RolloutConfig, name: str, requests: dict) -> None:
    full = 1 + config.expand_rounds * config.expand_nodes
    dead_end = config.root == "never" and len(tree.nodes) == 2
    assert len(tree.leaves) == (1 if dead_end else full)
    ends = [leaf.node for leaf in tree.leaves]
    assert ends == sorted(set(ends))  # path order
    assert ends[-1] == len(tree.nodes) - 1
    assert (
        sorted(set(range(len(tree.nodes))) - {n.parent for n in tree.nodes}) == ends
    )  # exactly the childless
    for index, node in enumerate(tree.nodes):
        assert node.parent < index  # parents come before children
        assert (node.finish == "prompt") == (index == 0)
        assert (index in ends) == (node.finish in ("answer", "max_tokens", "max_turns"))
        assert len(node.engine_logprobs) == len(node.action_ids)
        assert len(node.observation_ids) <= config.max_observation_tokens or index == 0
        if index in ends:
            assert len(node.observation_ids) == 0
        elif index:
            depth = len(tree.path(index)) - 1  # the episode's own count: no branch saw another's actions
            text = Letters().decode(node.observation_ids)
            assert text.endswith("!")
            assert f"<{depth}>".startswith(text[:-1][:3])
    for leaf in tree.leaves:
        nodes = [tree.nodes[i] for i in tree.path(leaf.node)[1:]]
        assert len(nodes) <= config.max_turns
        assert sum(n.num_tool_calls for n in nodes) <= config.max_tool_calls
        assert sum(n.num_tokens for n in nodes) <= config.max_path_tokens
        assert leaf.reward == len(nodes)
    check_requests(tree, config, name, requests)


def check_requests(tree: Tree, config: RolloutConfig, name: str, requests: dict) -> None:
    """Every node's request is named by its (round, expansion, turn) in the order of the nodes, and its
    context is the tokens of its path."""
    index = 1
    for number, leaf in enumerate(tree.leaves):
        round_, expansion = (
            (0, 0)
            if number == 0
            else (1 + (number - 1) // config.expand_nodes, (number - 1) % config.expand_nodes)
        )
        while index <= leaf.node:
            path = tree.path(index)
            request = requests[f"{name}/{round_}/{expansion}/{len(path) - 2}"]
            context = [
                i for n in path[:-1] for i in (*tree.nodes[n].action_ids, *tree.nodes[n].observation_ids)
            ]
            assert request.prompt_ids.tolist() == context
            assert tree.nodes[index].prefill_tokens == len(context)
            assert request.route == f"{tree.group_id}/{tree.index}"
            assert request.stop == ("stop",)
            index += 1


def test_no_rounds_grow_chains() -> None:
    groups = grow(SeededEngine(), RolloutConfig(trees=4, expand_rounds=0))
    assert len(groups[0].trees) == 4
    for tree in groups[0].trees:
        assert [n.parent for n in tree.nodes] == list(range(-1, len(tree.nodes) - 1))


def test_a_branch_continues_the_tokens_of_its_node() -> None:
    """A chain S, A; then one branch from the only candidate, node 1. Written out by hand."""
    engine = ScriptedEngine(["S1", "Ano", "Ayes"])
    [group] = grow(
        engine, RolloutConfig(trees=1, expand_nodes=1, expand_rounds=1, max_turns=3, max_path_tokens=50)
    )
    tree = group.trees[0]
    assert [n.parent for n in tree.nodes] == [-1, 0, 1, 1]
    assert [n.finish for n in tree.nodes] == ["prompt", "tool", "answer", "answer"]
    assert [leaf.node for leaf in tree.leaves] == [2, 3]
    assert [leaf.answer for leaf in tree.leaves] == ["Ano", "Ayes"]
    assert [Letters().decode(r.prompt_ids) for r in engine.requests] == ["ask", "askS1<1>!", "askS1<1>!"]
    assert [r.max_tokens for r in engine.requests] == [50, 50 - 6, 50 - 6]  # S1<1>! is six tokens
    assert [t.action + "|" + t.observation for t in turns_of(tree, 3, Letters())] == ["S1|<1>!", "Ayes|"]


def test_a_branch_inherits_spent_calls_and_turns() -> None:
    world = CountingWorld()
    engine = ScriptedEngine(["S", "S", "A", "S", "A"])
    config = RolloutConfig(trees=1, expand_nodes=1, max_turns=4, max_tool_calls=2)
    [group] = grow(engine, config, world=world)
    origin = group.trees[0].nodes[4].parent
    # (action, turns left after it, calls left before it): the chain, then the branch below `origin` (1 or 2)
    assert world.seen[:3] == [("S", 3, 2), ("S", 2, 1), ("A", 1, 0)]
    assert world.seen[3] == ("S", 3 - origin, 2 - origin)


@pytest.mark.parametrize(
    ("script", "limits", "finishes", "observations"),
    [
        # answered
        (["A"], {}, ["answer"], [""]),
        # the answer's last token was the path's last: still an answer
        (["A123"], {"max_path_tokens": 4}, ["answer"], [""]),
        # a turn cut by its own cap is an action like any other
        ([None, "A"], {"max_turn_tokens": 3}, ["invalid", "answer"], ["<1>!", ""]),
        # the path's tokens end inside an action
        ([None], {"max_path_tokens": 5, "max_turn_tokens": 9}, ["max_tokens"], [""]),
        # the observation <1>! would take the last of 6 tokens: it is dropped
        (["S2"], {"max_path_tokens": 6}, ["max_tokens"], [""]),
        # one more token leaves room for one more action token
        (["S2", None], {"max_path_tokens": 7}, ["tool", "max_tokens"], ["<1>!", ""]),
        # the turns end
        (["S", "x"], {"max_turns": 2}, ["tool", "max_turns"], ["<1>!", ""]),
        # no calls left: a hint, which uses up the turn
        (["S", "S", "A"], {"max_tool_calls": 1}, ["tool", "invalid", "answer"], ["<1>!", "<2>!", ""]),
        # an observation of 4 tokens under a cap of 2 keeps its end
        (["S", "A"], {"max_observation_tokens": 2}, ["tool", "answer"], ["<!", ""]),
    ],
)
def test_ways_to_end(script, limits, finishes, observations) -> None:
    config = RolloutConfig(trees=1, expand_rounds=0, **limits)
    tree = grow(ScriptedEngine(script), config)[0].trees[0]
    assert [n.finish for n in tree.nodes[1:]] == finishes
    assert [Letters().decode(n.observation_ids) for n in tree.nodes[1:]] == observations


def test_temperature_zero_and_on_group() -> None:
    engine, ended = SeededEngine(), []
    config = RolloutConfig(expand_rounds=0, temperature=0.5)
    grow(
        engine, config, [row("a"), row("b")], temperature=0.0, on_group=lambda g: ended.append(g.row.group_id)
    )
    assert {r.temperature for r in engine.requests} == {0.0}
    assert sorted(ended) == ["a", "b"]
    grow(engine := SeededEngine(), config)
    assert {r.temperature for r in engine.requests} == {0.5}


def test_trees_do_not_wait_for_each_other() -> None:
    """Row `slow` never gets its first action until row `fast` has its whole tree: a barrier would hang."""

    async def run() -> list[str]:
        fast_done, ended = asyncio.Event(), []
        seeded = SeededEngine()

        async def generate(request) -> GenerateResult:
            if "/slow/" in request.request_id:
                await asyncio.wait_for(fast_done.wait(), 5)
            return await seeded(request)

        def on_group(group: Group) -> None:
            ended.append(group.row.group_id)
            fast_done.set()

        await grow_groups(
            [row("slow"), row("fast")],
            config=RolloutConfig(expand_rounds=2),
            environment=CountingWorld(),
            reward=length_reward,
            generate=generate,
            tokens=Letters(),
            seed=SEED,
            on_group=on_group,
        )
        return ended

    assert asyncio.run(run()) == ["fast", "slow"]


def test_no_barrier_over_the_turns_and_rounds_of_a_prompt() -> None:
    """Tree 1 gets its first action only when tree 0 asks for its last round: a barrier would hang."""

    async def run() -> list[Group]:
        last_round = asyncio.Event()
        seeded = SeededEngine()

        async def generate(request) -> GenerateResult:
            _, _, _, tree, round_, *_ = request.request_id.split("/")
            if (tree, round_) == ("0", "2"):
                last_round.set()
            if tree == "1":
                await asyncio.wait_for(last_round.wait(), 5)
            return await seeded(request)

        return await grow_groups(
            [row()],
            config=RolloutConfig(expand_rounds=2),
            environment=CountingWorld(),
            reward=length_reward,
            generate=generate,
            tokens=Letters(),
            seed=SEED,
        )

    [group] = asyncio.run(run())
    assert [len(tree.leaves) for tree in group.trees] == [5, 5]


@dataclass
class Broken(CountingWorld):
    reply: Reply | None = None

    def begin(self, row):
        return self

    def fork(self):
        return self

    async def act(self, action, *, turns_left, tool_calls_left):
        if self.reply is None:
            raise ConnectionError("no server")
        return self.reply


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (None, "ConnectionError: no server"),
        (Reply("x", num_tool_calls=4), r"num_tool_calls: must be 0\.\.3, got 4"),
        (Reply("x" * 501, keep_end="y" * 501), r"max_observation_tokens: must hold 'y+' \(501\), got 500"),
    ],
)
def test_a_failing_environment_names_the_path(reply, reason) -> None:
    with pytest.raises(GrowthError, match=rf"^path 5/0/g/0/0/0/0: environment: .*{reason}$"):
        grow(ScriptedEngine(["S"]), RolloutConfig(trees=1), world=Broken(reply=reply))


def test_a_failing_reward_names_the_path() -> None:
    with pytest.raises(GrowthError, match=r"^path 5/0/g/0/0/0: reward: ValueError: must be finite, got nan$"):
        grow(
            ScriptedEngine(["A"]), RolloutConfig(trees=1), reward=lambda row, turns: Score(float("nan"), 0.0)
        )


def test_the_first_failure_cancels_the_rest() -> None:
    ended = []

    async def generate(request) -> GenerateResult:
        if "/a/" in request.request_id:
            raise RuntimeError("engine died")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(request.request_id)
        raise AssertionError

    with pytest.raises(RuntimeError, match=r"^engine died$"):
        grow(generate, RolloutConfig(trees=2), [row("b"), row("a")])
    assert sorted(ended) == ["5/0/b/0/0/0/0", "5/0/b/1/0/0/0"]


def test_seed_is_stable() -> None:
    """Second source: `printf "(0, 3, 'nq:7@0', 1)" | b2sum -l 64` of coreutils, shifted right by one."""
    path = SeedPath((0, 3)) / "nq:7@0" / 1
    assert str(path) == "0/3/nq:7@0/1"
    assert path.seed == 0x0E94F0E85AFDA3C6 >> 1
    assert (SeedPath((1,)) / 23).seed != (SeedPath((12,)) / 3).seed
    assert (SeedPath((1,)) / "2").seed != (SeedPath((1,)) / 2).seed
    assert path.generator().integers(1 << 30) == np.random.default_rng(path.seed).integers(1 << 30)
