"""What the driver does between growing and training, at scale: seconds, peak memory, growth with tokens.

Synthetic trees stand for grown ones. Each size runs in a process of its own, whose peak memory is its own: a
scoring batch and the scatter of its log-probs, then the training batch (advantages, weights, packing,
partition), each shared out per dp rank as it is serialised for `ray.put`. The baseline is the smallest size
with every leaf's whole path as a sequence of its own. Beside it, once: the slice plan of a 70B model and the
estimate of such a run. The last line is JSON; a slope is that of a logarithm over log tokens, 1 where the
cost is linear.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import pickle
import pstats
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_tree.algo import batch as batching
from megatron_tree.algo.packing import scatter
from megatron_tree.config import AlgoConfig, Config
from megatron_tree.planner.estimate import estimate
from megatron_tree.reshard import plan
from megatron_tree.reshard.names import ModelShape
from megatron_tree.types import Group, Leaf, Node, Row, StepBatch, Tree

DP, HIDDEN = 8, 4096
SHAPE = {"trees": 4, "expand_nodes": 3, "expand_rounds": 1}  # 4 (1 + 3) = 16 leaves per prompt
TURNS, ACTION, OBSERVATION, PROMPT = 8, 300, 700, 400  # a path: 400 + 7 · 1,000 + 300 = 7,700 tokens


@dataclass
class Stopwatch:
    """CPU seconds of this process, which has one busy thread: other work on the machine does not count."""

    seconds: dict[str, float]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.process_time() - start, 4)


def synthetic_group(index: int, rng: np.random.Generator) -> Group:
    """As `rollout.grow` grows them: a chain of TURNS turns, then branches from random nodes of it to the full
    length. Token counts of turns vary by a half either way."""
    prompt = Node(-1, _ids(rng, 0), _ids(rng, PROMPT), _floats(rng, 0), "prompt", 0)
    trees = []
    for tree_index in range(SHAPE["trees"]):
        tree = Tree(f"train/{index}", tree_index, [prompt], [])
        origins = rng.permutation(TURNS - 1)[: SHAPE["expand_nodes"]] + 1  # step nodes of the chain
        for origin in (0, *origins.tolist()):
            _branch(tree, origin, rng)
        trees.append(tree)
    return Group(Row(f"train/{index}", "synthetic", (), prompt.observation_ids, ()), trees)


def _branch(tree: Tree, origin: int, rng: np.random.Generator) -> None:
    parent = origin
    for turn in range(origin + 1, TURNS + 1):
        last = turn == TURNS
        action, observation = (int(count * rng.uniform(0.5, 1.5)) for count in (ACTION, OBSERVATION))
        node = Node(
            parent,
            _ids(rng, action),
            _ids(rng, 0 if last else observation),
            _floats(rng, action),
            "answer" if last else "tool",
            1,
        )
        tree.nodes.append(node)
        parent = len(tree.nodes) - 1
    tree.leaves.append(Leaf(parent, float(rng.random()), 0.0, None))


def copied(group: Group) -> Group:
    """Every leaf's path as a tree of its own, which shares nothing, the prompt neither."""
    trees = []
    for tree in group.trees:
        for leaf in tree.leaves:
            path = [tree.nodes[i] for i in tree.path(leaf.node)]
            nodes = [replace(node, parent=depth - 1) for depth, node in enumerate(path)]
            name = f"{tree.group_id}/{len(trees)}"
            trees.append(Tree(name, 0, nodes, [replace(leaf, node=len(nodes) - 1)]))
    return Group(group.row, trees)


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 32000, count, dtype=np.int32)


def _floats(rng: np.random.Generator, count: int) -> np.ndarray:
    return -rng.random(count, dtype=np.float32)


def share_out(batch: StepBatch) -> int:
    """Bytes of the shares, one per dp rank, serialised as `ray.put` does it: arrays out of band."""
    total = 0
    for share in batch:
        buffers: list[pickle.PickleBuffer] = []
        pickle.dumps(share, protocol=5, buffer_callback=buffers.append)
        total += sum(buffer.raw().nbytes for buffer in buffers)
    return total


def one_size(
    prompts: int, spec: batching.PackingSpec, *, profile: bool = False, copies: bool = False
) -> dict[str, Any]:
    """The driver's work for one iteration of one optimizer step."""
    rng = np.random.default_rng(0)
    watch = Stopwatch({})
    groups = [synthetic_group(index, rng) for index in range(prompts)]
    if copies:
        groups = [copied(group) for group in groups]
    trees = [tree for group in groups for tree in group.trees]
    grown_bytes = _peak_bytes()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    with watch("scoring_batch"):
        scoring, spans = batching.scoring_batch(trees, spec)
    with watch("share_out"):
        shared = share_out(scoring)
    logprobs = [[np.zeros(mb.num_trained, np.float32) for mb in rank] for rank in scoring]
    del scoring
    with watch("scatter"):
        scatter(spans, logprobs, "old_logprobs")
        scatter(spans, logprobs, "ref_logprobs")
    with watch("step_batch"):
        training, metrics = batching.step_batch(groups, AlgoConfig(), spec)
    with watch("share_out"):
        shared += share_out(training)
    if profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    return {
        "prompts": prompts,
        "leaves": sum(len(tree.leaves) for tree in trees),
        "unique_tokens": int(metrics["packing/unique_tokens"].value),
        "copied_tokens": int(metrics["packing/copied_tokens"].value),
        "micro_batches": int(metrics["packing/micro_batches"].value),
        "imbalance": round(metrics["packing/imbalance"].value, 4),
        "seconds": watch.seconds,
        "total_seconds": round(sum(watch.seconds.values()), 3),
        "shared_bytes": shared,
        "tree_bytes": grown_bytes,
        "peak_bytes": _peak_bytes(),
    }


def planning() -> dict[str, float]:
    """A Llama of 70B on TP 8 x PP 8 x DP 8, engines of TP 4: what a start plans, and `megatron-tree plan`."""
    shape = ModelShape(
        family="llama",
        num_layers=80,
        hidden=8192,
        ffn=28672,
        heads=64,
        kv_heads=8,
        head_dim=128,
        vocab=128256,
        tied=False,
        norm_eps=1e-5,
        rope_theta=500000.0,
        max_positions=131072,
    )
    config = Config.model_validate(
        {
            "run": {"dir": "none"},
            "model": {"path": "none"},
            "environment": {"target": "none:None"},
            "reward": {"target": "none:None"},
            "data": {"max_prompt_tokens": PROMPT},
            "rollout": {
                **SHAPE,
                "prompts": 512,
                "max_turns": TURNS,
                "max_turn_tokens": ACTION,
                "max_observation_tokens": OBSERVATION,
                "max_path_tokens": TURNS * (ACTION + OBSERVATION),
            },
            "train": {"micro_batch_tokens": 8448, "parallel": {"tp": 8, "pp": 8, "dp": DP}},
            "engine": {"count": 16, "tp": 4, "max_model_len": 8448},
            "plan": {"memory_gib": 180.0},
        }
    )
    watch = Stopwatch({})
    with watch("slice_plan"):
        plan.atoms(shape, config.train.parallel.layout, config.engine.tp)
    with watch("estimate"):
        estimate(config, shape)
    return watch.seconds


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _apart(prompts: int, spec: batching.PackingSpec, **more: bool) -> dict[str, Any]:
    """`one_size` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result: dict[str, Any] = pool.apply(one_size, (prompts, spec), more)
    sys.stderr.write(f"{json.dumps(result)}\n")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=512, help="of the largest of four sizes")
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--profile", action="store_true", help="print where the largest size spends its time")
    args = parser.parse_args()
    spec = batching.PackingSpec(DP, args.micro_batch_tokens, pad_to=1, hidden_size=HIDDEN)
    sizes = [max(args.prompts // 8, 1), max(args.prompts // 4, 1), max(args.prompts // 2, 1), args.prompts]
    results = [_apart(prompts, spec, profile=args.profile and prompts == args.prompts) for prompts in sizes]
    baseline = _apart(sizes[0], spec, copies=True)
    tokens, seconds, peaks = (
        np.log([r[key] for r in results]) for key in ("unique_tokens", "total_seconds", "peak_bytes")
    )
    largest = results[-1]
    report = {
        "copied_seconds_over_ours": round(baseline["total_seconds"] / results[0]["total_seconds"], 3),
        "copied_bytes_over_ours": round(baseline["shared_bytes"] / results[0]["shared_bytes"], 3),
        "slope_of_log_seconds": round(float(np.polyfit(tokens, seconds, 1)[0]), 3),
        "slope_of_log_peak": round(float(np.polyfit(tokens, peaks, 1)[0]), 3),
        "tokens_per_second": round(largest["unique_tokens"] / largest["total_seconds"]),
        "peak_bytes_per_token": round(largest["peak_bytes"] / largest["unique_tokens"], 1),
        "shape": {**SHAPE, "turns": TURNS, "action": ACTION, "observation": OBSERVATION, "prompt": PROMPT},
        "planning_seconds": planning(),
        **largest,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
