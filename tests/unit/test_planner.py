"""Estimates of `megatron-tree plan`: tokens, FLOPs and packing against real growth, packing and torch;
memory, passes in flight and time by hand; what it refuses; what it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_tree import cli
from megatron_tree.algo.batch import PackingSpec, scoring_batch
from megatron_tree.algo.packing import NodeWeights, cut, visible_keys
from megatron_tree.config import Config
from megatron_tree.layout import ParallelLayout
from megatron_tree.planner import work
from megatron_tree.planner.estimate import estimate
from megatron_tree.planner.limits import check_layout
from megatron_tree.planner.memory import PackedTokens, TrainState, chunks_in_flight, rank_memory
from megatron_tree.reshard.names import ModelShape, read_shape
from megatron_tree.rollout.select import candidates, draw
from megatron_tree.types import Finish, Leaf, Node, Tree
from tests.unit.shapes import small_shape

GIB = 1 << 30
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
SMOLLM2 = LLAMA_70B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def config(**sections: dict) -> Config:
    """70B on 64 big ranks, unless changed section by section."""
    base: dict = {
        "run": {"dir": "runs/none"},
        "model": {"path": "nowhere"},
        "environment": {"target": "a:B"},
        "reward": {"target": "a:B"},
        "data": {"max_prompt_tokens": 512},
        "rollout": {},
        "train": {"parallel": {"tp": 8, "pp": 8}},
        "engine": {"tp": 4, "count": 8},
        "plan": {"memory_gib": 180.0},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return Config.model_validate(base)


def shape_of(tmp_path: Path, fields: dict) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return read_shape(tmp_path)


def test_one_tree_by_hand() -> None:
    """P=10, 3 turns of 2 sampled and 3 observed tokens, M=1 N=2 L=1. The chain samples 6 and observes 6
    behind contexts of 10, 15, 20. A branch shares 1 or 2 turns: samples 4 or 2, observes 3 or 0."""
    found = work.expected_tree(
        config(
            data={"max_prompt_tokens": 10},
            rollout={
                "max_turns": 3,
                "max_tool_calls": 2,
                "max_turn_tokens": 2,
                "max_observation_tokens": 3,
                "expand_nodes": 2,
            },
        )
    )
    assert found.generated == 6 + 2 * 3  # M B + M L N B / 2
    assert found.observed == 10 + 6 + 2 * 1.5
    assert found.requested == 45 + 2 * (35 + 20) / 2
    assert found.copied == 3 * (10 + 12)
    assert found.requests == 3 + 2 * 1.5
    assert found.cached == found.requested - found.observed


@pytest.mark.parametrize("root", ["fallback", "always"])
def test_tokens_and_keys_are_the_mean_of_grown_trees(root: str) -> None:
    """Second source: 400 trees grown by `select`, counted by `Tree` and `packing`."""
    settings = config(
        data={"max_prompt_tokens": 20},
        rollout={"max_turn_tokens": 7, "max_observation_tokens": 5, "expand_nodes": 3, "root": root},
    )
    expected = work.expected_tree(settings)
    trees = [grown(settings, np.random.default_rng(i)) for i in range(400)]
    weights = NodeWeights(*np.zeros((3, 40)))
    keys = [visible_keys(cut(tree, weights, 10**6)[0]) for tree in trees]
    actions = [sum(len(node.action_ids) for node in tree.nodes) for tree in trees]
    assert np.mean(actions) == pytest.approx(expected.generated, rel=0.02)
    assert np.mean([tree.num_unique_tokens for tree in trees]) == pytest.approx(expected.unique, rel=0.02)
    assert np.mean([tree.num_copied_tokens for tree in trees]) == pytest.approx(expected.copied)
    assert np.mean(keys) == pytest.approx(expected.keys, rel=0.02)


def test_path_tokens_cap_shortens_all_turns_alike() -> None:
    path = work.expected_path(config(rollout={"max_path_tokens": 1750}))  # of 4 * 500 + 3 * 500
    assert (path.action, path.observation, path.length) == (250, 250, 512 + 1750)


def test_fill_scales_prompt_and_turns() -> None:
    path = work.expected_path(config(plan={"fill": 0.5}))
    assert (path.prompt, path.action, path.observation) == (256, 250, 250)


def test_without_rounds_a_tree_is_a_chain() -> None:
    settings = config(rollout={"expand_rounds": 0})
    found = work.expected_tree(settings)
    assert found.unique == found.copied == work.expected_path(settings).length
    assert found.keys == found.unique * (found.unique + 1) / 2


@pytest.mark.parametrize(
    ("budget", "within"),
    [(1000, 0.1), (300, 0.1), (130, 0.1), (80, 0.2)],  # ten trees of about 101 tokens, three, one, a cut one
)
def test_micro_batches_are_those_of_the_real_packing(budget: int, within: float) -> None:
    settings = config(
        data={"max_prompt_tokens": 20},
        rollout={
            "max_turn_tokens": 7,
            "max_observation_tokens": 5,
            "max_path_tokens": 50,
            "prompts": 32,
        },
        train={"micro_batch_tokens": budget, "parallel": {"dp": 2}},
    )
    trees = [grown(settings, np.random.default_rng(i)) for i in range(64)]
    real = scoring_batch(trees, PackingSpec(2, budget, 1, 64))[0]
    assert work.num_microbatches(settings) == pytest.approx(len(real[0]), rel=within)


def test_flops_are_those_torch_counts() -> None:
    """Second source: torch's counter on transformers' Llama, whose attention computes all S x S keys."""
    tokens = 24
    hf = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(hf), torch.zeros(1, tokens, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(ids)
    shape = small_shape(num_layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=50)
    all_trained = work.Tokens(tokens, 0, 0, 0, tokens * tokens, 0, 0)
    found = work.flops(shape, all_trained, reference=True)
    assert counter.get_total_flops() == found.decode
    assert found.train == 3 * found.decode
    assert found.score == 2 * found.decode


@pytest.mark.parametrize(
    ("pp", "vpp", "micro_batches", "expected"),
    [
        (4, 1, 8, [4, 3, 2, 1]),
        (4, 1, 2, [2, 2, 2, 1]),
        (4, 2, 8, [11, 9, 7, 5]),  # 2 (pp - 1 - s) + (vpp - 1) pp warm-up passes, and one
        (1, 1, 8, [1]),
    ],
)
def test_chunks_in_flight(pp: int, vpp: int, micro_batches: int, expected: list[int]) -> None:
    layout = ParallelLayout(pp=pp, vpp=vpp)
    assert [chunks_in_flight(layout, stage, micro_batches) for stage in range(pp)] == expected


def test_memory_of_kept_tensors_by_hand() -> None:
    """A layer of `small_shape`: qkv (8 + 4 + 4) 3, proj 3 * 8, fc1 16 * 3, fc2 3 * 8, norms 6: 150. Stage 0
    adds 10 * 3 of the embedding, stage 1 as much of the tied head and 3 of the norm."""
    layout, packed = ParallelLayout(pp=2, dp=2), PackedTokens(10, 5)
    for stage, parameters in enumerate((180, 183)):
        plain = TrainState("bf16", "node", packed, 4, reference=True)
        found = rank_memory(small_shape(), layout, stage, plain)
        assert (found.weights, found.gradients, found.optimizer) == (
            2 * parameters,
            4 * parameters,
            12 * parameters,
        )
        assert found.reference == found.weights
        shared = TrainState("fp32", "node", packed, 4, reference=False, distributed_optimizer=True)
        assert rank_memory(small_shape(), layout, stage, shared).optimizer == 8 * parameters / 2
        assert rank_memory(small_shape(), layout, stage, shared).reference == 0


def test_70b_estimate(tmp_path: Path) -> None:
    """Public figures: Llama-3.1-70B has 70,553,706,496 parameters and 320 KiB of bf16 keys and values a
    token."""
    settings = config(train={"parallel": {"tp": 8, "pp": 8, "dp": 2}})
    found = estimate(settings, shape_of(tmp_path, LLAMA_70B))
    assert found.parameters == 70_553_706_496
    assert found.image_bytes == 2 * found.parameters
    assert found.engine.kv_bytes_per_token * 4 == 320 * 1024
    assert found.engine.read_bytes == pytest.approx(found.image_bytes, rel=1e-4)  # norms are read by all four
    room = int((180 * 0.85 - 4) * GIB) - found.engine.weight_bytes
    assert found.engine.kv_tokens == room // (80 * 1024) // 32 * 32
    assert found.bubble == 7 / (found.num_microbatches + 7)
    assert [stage.ranks for stage in found.stages][:2] == [(0, 16), (16, 32)]
    assert [stage.layers for stage in found.stages][-1] == ((70, 80),)
    seconds = {cost.name: cost.seconds for cost in found.costs}
    # a ring over 2 ranks: half of the fp32 buffer out, half of the sums back
    assert seconds["gradient sums"] == pytest.approx(4 * found.stages[-1].parameters / 50e9)
    # the busiest rank writes an eighth of an outer stage, each worker reads a quarter of the model
    assert seconds["publish"] == pytest.approx((19.2e9 / 8 + 141.1e9 / 4) / 50e9, rel=0.01)
    assert seconds["train"] == pytest.approx(found.flops.train / 128 / (989e12 * 0.4))
    assert found.seconds == pytest.approx(sum(seconds.values()))
    assert seconds[found.bottleneck] == max(seconds.values())


def test_the_bottleneck_follows_the_hardware(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, LLAMA_70B)
    assert estimate(config(), shape).bottleneck == "decode"
    assert (
        estimate(config(plan={"memory_gib": 180.0, "network_gb_per_s": 0.5}), shape).bottleneck == "publish"
    )
    slow = config(plan={"memory_gib": 180.0, "peak_tflops": 50.0})
    assert estimate(slow, shape).bottleneck == "train"


def test_interleaved_and_uneven_stages(tmp_path: Path) -> None:
    shape, packed = shape_of(tmp_path, LLAMA_70B), PackedTokens(4096, 2048)
    state = TrainState("bf16", "flex", packed, 16, reference=False)
    even = [rank_memory(shape, ParallelLayout(tp=8, pp=4), s, state) for s in range(4)]
    uneven = ParallelLayout(tp=8, pp=4, stage_split=(19, 21, 21, 19))
    other = [rank_memory(shape, uneven, s, state) for s in range(4)]
    layer = even[1].weights // 20
    assert [b.weights - a.weights for a, b in zip(even, other, strict=True)] == [-layer, layer, layer, -layer]
    chunked = rank_memory(shape, ParallelLayout(tp=8, pp=4, vpp=2), 0, state)
    # 11 chunks of 10 layers against 4 of 20
    assert chunked.activations / even[0].activations == pytest.approx(11 / 8, rel=0.01)
    assert chunked.weights == even[0].weights


REFUSED = {
    "heads": (
        SMOLLM2,
        {"train": {"parallel": {"tp": 2}}},
        "train.parallel.tp: must divide the model's 9 heads, got 2; "
        "the nearest layout that can run is tp=3 pp=1",
    ),
    "layers": (
        SMOLLM2,
        {"train": {"parallel": {"pp": 4}}},
        "must divide the model's 30 layers, got 4; the nearest layout that can run is tp=1 pp=5",
    ),
    "both": (
        SMOLLM2,
        {"train": {"parallel": {"tp": 4, "pp": 7}}},
        "the nearest layout that can run is tp=3 pp=6",
    ),
    "memory": (
        LLAMA_70B,
        {"train": {"parallel": {"tp": 8, "pp": 1}, "micro_batch_tokens": 4608}},
        "train.parallel: a rank of stage 0 must fit plan.memory_gib 180 less plan.reserve_gib 4, got ",
    ),
    "engine": (
        SMOLLM2,
        {"train": {"parallel": {}}, "engine": {"tp": 2}},
        "engine.tp: must divide the model's 9 heads, got 2; the nearest that can run is engine.tp=3",
    ),
    "engine memory": (
        LLAMA_70B,
        {"engine": {"tp": 1}, "plan": {"memory_gib": 150.0}},
        "the smallest that fits is engine.tp=2",
    ),
    "cache": (
        SMOLLM2,
        {"train": {"parallel": {}}, "engine": {"tp": 1, "kv_cache_gib": 0.1}, "plan": {"device": "cpu"}},
        # 6144 tokens of 2 * 30 * 3 * 64 * 2 bytes
        "engine.kv_cache_gib: must hold one sequence of engine.max_model_len 6144 tokens, 0.13 GiB, got 0.1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_nearest_that_can(tmp_path: Path, name: str) -> None:
    fields, changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refusal:
        estimate(config(**changes), shape_of(tmp_path, fields))
    assert message in str(refusal.value)


def test_the_layout_it_names_is_the_smallest_that_fits(tmp_path: Path) -> None:
    """Followed, the advice passes; with half the pipeline it does not."""
    shape = shape_of(tmp_path, LLAMA_70B)
    start = {"tp": 8, "pp": 1}
    with pytest.raises(ValueError, match="smallest layout that fits is tp=") as refusal:
        estimate(config(train={"parallel": start, "micro_batch_tokens": 4608}), shape)
    words = str(refusal.value).split("fits is ")[1].replace(",", "").replace(";", "").split()
    tp, pp = (int(word.split("=")[1]) for word in words[:2])
    estimate(config(train={"parallel": {"tp": tp, "pp": pp}, "micro_batch_tokens": 4608}), shape)
    with pytest.raises(ValueError, match="must fit"):
        estimate(config(train={"parallel": {"tp": tp, "pp": pp // 2}, "micro_batch_tokens": 4608}), shape)


def test_shorter_micro_batches_are_named_where_they_help(tmp_path: Path) -> None:
    shape, parallel = shape_of(tmp_path, LLAMA_70B), {"tp": 8, "pp": 8}
    with pytest.raises(ValueError, match="micro_batch_tokens=") as refusal:
        estimate(config(train={"parallel": parallel, "micro_batch_tokens": 16384}), shape)
    tokens = int(str(refusal.value).split("micro_batch_tokens=")[1].split(";")[0])
    estimate(config(train={"parallel": parallel, "micro_batch_tokens": tokens}), shape)
    with pytest.raises(ValueError, match="must fit"):
        estimate(config(train={"parallel": parallel, "micro_batch_tokens": tokens + 64}), shape)


def test_a_layout_that_fits_is_not_refused(tmp_path: Path) -> None:
    check_layout(shape_of(tmp_path, SMOLLM2), ParallelLayout(tp=3, pp=5))


def test_command_reads_only_the_models_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model folder holds config.json and nothing else. Tables fit 80 columns, nothing is cut."""
    path = config_file(tmp_path, LLAMA_70B)
    monkeypatch.setenv("COLUMNS", "80")
    assert command(monkeypatch, "plan", str(path)) == 0
    shown = capsys.readouterr().out
    tables = shown.split("bottleneck:")[0]
    assert max(len(line) for line in tables.splitlines()) <= 80
    assert "…" not in tables
    assert "70.6 G parameters" in tables
    assert "bottleneck: decode" in shown
    assert command(monkeypatch, "plan", str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 70_553_706_496
    assert found["model"]["num_layers"] == 80
    memory = found["stages"][0]["memory"]
    parts = ("weights", "gradients", "optimizer", "reference", "activations", "logits")
    assert memory["total"] == sum(memory[part] for part in parts)
    assert found["bottleneck"] == "decode"


def test_command_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config_file(tmp_path, SMOLLM2)
    assert command(monkeypatch, "plan", str(path), "train.parallel.tp=2") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "nearest layout that can run is tp=3 pp=" in shown.err


def config_file(tmp_path: Path, fields: dict) -> Path:
    (tmp_path / "model").mkdir()
    shape_of(tmp_path / "model", fields)
    path = tmp_path / "config.yaml"
    text = config().model_copy(update={"run": config().run}).model_dump(mode="json")
    text["model"]["path"] = str(tmp_path / "model")
    path.write_text(json.dumps(text))
    return path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["megatron-tree", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def grown(settings: Config, generator: np.random.Generator) -> Tree:
    """A tree of equal turns, its branches drawn by the real rules."""
    path, rollout = work.expected_path(settings), settings.rollout
    prompt = Node(-1, ids(0), ids(path.prompt), np.zeros(0, np.float32), "prompt", 0)
    tree = Tree("g", 0, [prompt], [])
    chain(tree, 0, path)
    for _ in range(rollout.expand_rounds):
        for start in draw(candidates(tree, rollout.root), rollout.expand_nodes, generator):
            chain(tree, start, path)
    return tree


def chain(tree: Tree, start: int, path: work.Path) -> None:
    parent = start
    for turn in range(len(tree.path(start)) - 1, path.turns):
        last = turn == path.turns - 1
        finish: Finish = "answer" if last else "tool"
        observed = ids(0) if last else ids(path.observation)
        action = ids(path.action)
        tree.nodes.append(Node(parent, action, observed, np.zeros(len(action), np.float32), finish, 1))
        parent = len(tree.nodes) - 1
    tree.leaves.append(Leaf(parent, 0.0, 0.0, None))


def ids(count: float) -> np.ndarray:
    return np.zeros(int(count), np.int32)
