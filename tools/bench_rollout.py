"""Growing trees with one real engine: prefill that sharing leaves, and time, against chains and lockstep.

Three drivers, the prefix cache empty before each:

- `trees`: `rollout.grow`, as a run uses it.
- `chains`: the same with as many leaves per prompt, none of which shares a turn.
- `lockstep`: the very requests and tool calls of `trees`, but all rows move turn by turn: a turn's requests
  wait for all tools of the turn before, a round for all trees. It samples the same tokens, which is checked.

Turns sample at most 120 tokens (mean near 78: the end has one chance in 128), observe 300, behind a prompt of
200; a turn answers with probability 0.2, and at most 4 follow one another. A tool call sleeps for 0.15 s x
Pareto(1.5), seeded by the action, 10 s at most: median 0.24 s, mean 0.4 s, 99th percentile 3.2 s.

`prefill_computed_over_unique`: prompt tokens that the engine computed over those that some request had to
compute: a prompt's once for all its trees, and each observation once. Whole blocks of 32 alone are shared.
Medians over the repeats, whose drivers take turns. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_tree.config import EngineConfig, RolloutConfig
from megatron_tree.engine.engine import Engine
from megatron_tree.engine.pool import EnginePool
from megatron_tree.rollout.episode import Reply, Score, Turn
from megatron_tree.rollout.grow import SeedPath, grow_groups
from megatron_tree.types import GenerateRequest, GenerateResult, Group, IntArray, Node, Row

VOCAB, END = 128, 2
PROMPT_TOKENS, ACTION_TOKENS, OBSERVATION_TOKENS = 200, 120, 300
MAX_TURNS, ANSWERS = 4, 0.2
TREE = {"trees": 2, "expand_nodes": 2, "expand_rounds": 1}  # 2 (1 + 2) = 6 leaves per prompt
TOOL_SCALE_S, TOOL_SHAPE, TOOL_LIMIT_S = 0.15, 1.5, 10.0


class Words:
    """A token per word `wN`: what `rollout.tokens` does with a tokenizer, without one."""

    def encode(self, text: str) -> IntArray:
        return np.array([int(word[1:]) for word in text.split()], dtype=np.int32)

    def decode(self, ids: IntArray) -> str:
        return " ".join(f"w{i}" for i in ids)


@dataclass
class Tools:
    """The environment. What an action leads to depends on its text alone, so that every driver meets it."""

    stop: tuple[str, ...] = ()
    seconds: float = 0.0  # slept, over all calls

    def begin(self, row: Row) -> Tools:
        return self

    def fork(self) -> Tools:
        return self

    async def act(self, action: str, *, turns_left: int, tool_calls_left: int) -> Reply:
        draws = self.draws("answer", action)
        if draws.random() < ANSWERS or not turns_left:
            return Reply("", done=True)
        await self.call(action)
        observation = " ".join(f"w{draws.randrange(3, VOCAB)}" for _ in range(OBSERVATION_TOKENS))
        return Reply(observation, num_tool_calls=1)

    async def call(self, action: str) -> None:
        factor = self.draws("latency", action).paretovariate(TOOL_SHAPE)
        latency = min(TOOL_SCALE_S * factor, TOOL_LIMIT_S)
        self.seconds += latency
        await asyncio.sleep(latency)

    @staticmethod
    def draws(what: str, action: str) -> random.Random:
        return random.Random(hashlib.blake2b(f"{what} {action}".encode(), digest_size=8).digest())


def no_reward(row: Row, turns: Sequence[Turn]) -> Score:
    return Score(0.0, 0.0)


@dataclass
class Recorder:
    """Stands between growth and the pool: keeps requests and results, and how long they took together."""

    pool: EnginePool
    requests: dict[str, GenerateRequest] = field(default_factory=dict)
    results: dict[str, GenerateResult] = field(default_factory=dict)
    seconds: float = 0.0

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        begun = time.perf_counter()
        self.requests[request.request_id] = request
        result = self.results[request.request_id] = await self.pool(request)
        self.seconds += time.perf_counter() - begun
        return result


class LocalEngine(Engine):
    """An engine whose front end runs in this process, where its cache can be emptied between the drivers."""

    async def forget(self) -> None:
        assert await self._llm.reset_prefix_cache(), "vLLM kept its prefix cache"

    async def kill(self) -> None:
        await self.stop()


def make_model(folder: Path, seed: int) -> None:
    """A Llama of a million parameters whose next token is nearly uniform over its words."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        eos_token_id=END,
        initializer_range=0.02,
        dtype="float32",
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{END}").save_pretrained(folder)


@asynccontextmanager
async def serving(folder: Path, threads: int) -> AsyncIterator[tuple[LocalEngine, EnginePool]]:
    config = EngineConfig(
        dtype="fp32", max_model_len=2048, max_num_seqs=64, kv_cache_gib=2.0, cpu_threads=threads
    )
    engine = LocalEngine(str(folder), config)
    pool = EnginePool(config, lambda _: engine)
    await pool.start()
    try:
        yield engine, pool
    finally:
        await pool.stop()


def make_rows(count: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, VOCAB, (count, PROMPT_TOKENS), dtype=np.int32)
    return [Row(f"train/{i}", "bench", (), prompt, ()) for i, prompt in enumerate(ids)]


@dataclass(frozen=True)
class Grown:
    """One driver's run."""

    groups: list[Group]
    recorder: Recorder
    wall_s: float
    tool_s: float  # of all calls together

    @property
    def num_leaves(self) -> int:
        return sum(len(tree.leaves) for group in self.groups for tree in group.trees)


async def grow(pool: EnginePool, rows: Sequence[Row], config: RolloutConfig, seed: int) -> Grown:
    recorder, tools = Recorder(pool), Tools()
    begun = time.perf_counter()
    groups = await grow_groups(
        rows,
        config=config,
        environment=tools,
        reward=no_reward,
        generate=recorder,
        tokens=Words(),
        seed=SeedPath((seed, 0)),
    )
    return Grown(groups, recorder, time.perf_counter() - begun, tools.seconds)


async def lockstep(pool: EnginePool, trees: Grown) -> Grown:
    """All rows move together: a round's first turns, all their tools, its second turns, and so on."""
    recorder, tools, words = Recorder(pool), Tools(), Words()
    begun = time.perf_counter()
    for _, paths in sorted(steps_of(trees.recorder.requests).items()):
        results = await asyncio.gather(*(recorder(trees.recorder.requests[path]) for path in paths))
        await asyncio.gather(
            *(
                tools.call(words.decode(result.token_ids))
                for path, result in zip(paths, results, strict=True)
                if next_turn(path) in trees.recorder.requests
            )
        )
    wall_s = time.perf_counter() - begun
    for path, result in trees.recorder.results.items():
        np.testing.assert_array_equal(recorder.results[path].token_ids, result.token_ids, err_msg=path)
    return Grown(trees.groups, recorder, wall_s, tools.seconds)


def steps_of(requests: Iterable[str]) -> dict[tuple[int, int], list[str]]:
    """(round, how many turns of its branch come before) -> the requests that a lockstep driver makes at once.

    A request is named `…/tree/round/expansion/turn`, and a branch begins at any turn.
    """
    branches = defaultdict(list)
    for path in requests:
        branch, turn = path.rsplit("/", 1)
        branches[branch].append(int(turn))
    steps = defaultdict(list)
    for branch, turns in branches.items():
        round_ = int(branch.rsplit("/", 2)[1])
        for step, turn in enumerate(sorted(turns)):
            steps[round_, step].append(f"{branch}/{turn}")
    return steps


def next_turn(path: str) -> str:
    branch, turn = path.rsplit("/", 1)
    return f"{branch}/{int(turn) + 1}"


def prefill(groups: Sequence[Group]) -> tuple[int, int]:
    """Prompt tokens that the engine computed, and those that some request had to compute."""
    nodes = [node for group in groups for tree in group.trees for node in tree.nodes[1:]]
    computed = sum(node.prefill_tokens - node.cached_tokens for node in nodes)
    prompts = sum(len(group.row.prompt_ids) for group in groups)
    return computed, prompts + sum(len(node.observation_ids) for node in nodes)


def hit_rate_by_depth(groups: Sequence[Group]) -> list[float]:
    """Share of prompt tokens found in the cache, of the requests for first turns, second turns, and so on."""
    found: dict[int, list[Node]] = defaultdict(list)
    for tree in (tree for group in groups for tree in group.trees):
        for index, node in enumerate(tree.nodes[1:], start=1):
            found[len(tree.path(index)) - 1].append(node)
    return [
        round(sum(node.cached_tokens for node in nodes) / sum(node.prefill_tokens for node in nodes), 4)
        for _, nodes in sorted(found.items())
    ]


async def measure(folder: Path, prompts: int, repeats: int, threads: int) -> list[dict[str, Grown]]:
    """A short run that compiles, then the drivers in turn, with other prompts and seeds each time."""
    config = RolloutConfig(
        **TREE,
        max_turns=MAX_TURNS,
        max_tool_calls=MAX_TURNS,
        max_turn_tokens=ACTION_TOKENS,
        max_observation_tokens=OBSERVATION_TOKENS,
        max_path_tokens=MAX_TURNS * (ACTION_TOKENS + OBSERVATION_TOKENS),
    )
    leaves = config.trees * config.leaves_per_tree
    chains = config.model_copy(update={"trees": leaves, "expand_rounds": 0})
    found = []
    async with serving(folder, threads) as (engine, pool):
        await grow(pool, make_rows(4, seed=1000), config, seed=1000)
        for seed in range(repeats):
            rows = make_rows(prompts, seed)
            await engine.forget()
            trees = await grow(pool, rows, config, seed)
            await engine.forget()
            together = await lockstep(pool, trees)
            await engine.forget()
            apart = await grow(pool, rows, chains, seed)
            found.append({"trees": trees, "lockstep": together, "chains": apart})
    return found


def report(found: Sequence[dict[str, Grown]]) -> dict[str, Any]:
    """The ratios first, then what they are made of; of the first repeat where no median makes sense."""

    def over(ratio: Callable[[dict[str, Grown]], float]) -> float:
        return round(median(ratio(run) for run in found), 4)

    def computed_over_unique(run: dict[str, Grown]) -> float:
        computed, unique = prefill(run["trees"].groups)
        return computed / unique

    def leaves_per_s(driver: Grown) -> float:
        return driver.num_leaves / driver.wall_s

    trees = found[0]["trees"]
    return {
        "prefill_computed_over_unique": over(computed_over_unique),
        "wall_lockstep_over_ours": over(lambda run: run["lockstep"].wall_s / run["trees"].wall_s),
        "leaves_per_second_over_chain": over(
            lambda run: leaves_per_s(run["trees"]) / leaves_per_s(run["chains"])
        ),
        "cache_hit_rate_by_depth": hit_rate_by_depth(trees.groups),
        "sampled_tokens_over_chain": over(lambda run: _sampled(run["trees"]) / _sampled(run["chains"])),
        "prefill_computed_over_chain": over(
            lambda run: prefill(run["trees"].groups)[0] / prefill(run["chains"].groups)[0]
        ),
        **{
            f"{name}_wall_s": over(lambda run, name=name: run[name].wall_s)
            for name in ("trees", "lockstep", "chains")
        },
        "leaves": trees.num_leaves,
        "requests": len(trees.recorder.requests),
        "tool_calls_s": round(trees.tool_s, 1),
        "repeats": len(found),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _sampled(driver: Grown) -> int:
    return sum(len(result.token_ids) for result in driver.recorder.results.values())


def show_profile(found: Sequence[dict[str, Grown]]) -> None:
    """Where the time of each driver goes. In flight: requests, or tool calls, at once on the mean."""
    for name in ("trees", "lockstep", "chains"):
        driver = found[0][name]
        sys.stderr.write(
            f"{name:9}{driver.wall_s:7.2f} s  {len(driver.recorder.requests):5} requests, "
            f"{driver.recorder.seconds / driver.wall_s:5.1f} in flight  "
            f"tools {driver.tool_s:6.1f} s, {driver.tool_s / driver.wall_s:5.1f} in flight  "
            f"sampled {_sampled(driver):6} tokens, {_sampled(driver) / driver.wall_s:6.0f} a second\n"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--profile", action="store_true", help="print where the time goes to stderr")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatron-tree-bench-") as folder:
        make_model(Path(folder), seed=0)
        found = asyncio.run(measure(Path(folder), args.prompts, args.repeats, args.threads))
    if args.profile:
        show_profile(found)
    print(json.dumps(report(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
