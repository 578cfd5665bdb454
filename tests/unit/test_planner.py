"""Estimates of `megatron-tree plan`: tokens, FLOPs and packing against real growth, packing and torch;
time and traffic by hand; what it refuses; what it prints. Memory is in test_planner_memory."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_tree import cli
from megatron_tree.algo.batch import PackingSpec, scoring_batch
from megatron_tree.algo.packing import NodeWeights, cut, join, visible_keys
from megatron_tree.config import Config, RecomputeConfig
from megatron_tree.planner import work
from megatron_tree.planner.activations import PackedTokens
from megatron_tree.planner.estimate import estimate
from megatron_tree.planner.limits import check_devices, check_layout, check_precision
from megatron_tree.planner.memory import TrainState, rank_memory
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
    keys = [visible_keys(cut(join([(tree, weights)]), 10**6)[0]) for tree in trees]
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


def test_trees_of_a_prompt_share_it_where_they_are_packed() -> None:
    """Prompt of 10, trees of 12 sampled and 19 more tokens (`test_one_tree_by_hand`)."""
    settings = config(
        data={"max_prompt_tokens": 10},
        rollout={
            "trees": 4,
            "max_turns": 3,
            "max_tool_calls": 2,
            "max_turn_tokens": 2,
            "max_observation_tokens": 3,
        },
    )
    tree, prompt = work.expected_tree(settings), work.expected_prompt(settings)
    assert (tree.generated, tree.unique) == (12, 31)
    assert (prompt.generated, prompt.unique) == (4 * 12, 4 * 31 - 3 * 10)
    assert prompt.keys == 4 * tree.keys - 3 * 55  # 10 * 11 / 2 of the prompt
    assert prompt.copied == 4 * tree.copied


@pytest.mark.parametrize(
    ("budget", "vpp", "within"),
    # five prompts of about 182 tokens, two, one, one cut in two, one leaf or two; groups of pp under VPP
    [(1000, 1, 0.15), (400, 1, 0.25), (260, 1, 0.0), (130, 1, 0.15), (80, 1, 0.15), (260, 2, 0.0)],
)
def test_micro_batches_are_those_of_the_real_packing(budget: int, vpp: int, within: float) -> None:
    settings = config(
        data={"max_prompt_tokens": 20},
        rollout={
            "max_turn_tokens": 7,
            "max_observation_tokens": 5,
            "max_path_tokens": 50,
            "prompts": 32,
        },
        train={"micro_batch_tokens": budget, "parallel": {"dp": 2, "pp": 7, "vpp": vpp}},
    )
    trees = [grown(settings, np.random.default_rng(i), f"prompt {i // 2}") for i in range(64)]
    real = scoring_batch(trees, PackingSpec(2, budget, 1, 64, count_multiple=7 if vpp > 1 else 1))[0]
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
    found = work.flops(shape, all_trained, all_trained, RecomputeConfig(), reference=True)
    assert counter.get_total_flops() == found.decode
    assert found.train == 3 * found.decode
    assert found.score == 2 * found.decode
    assert found.recomputed == 0


def test_recomputed_flops_by_hand() -> None:
    """Two layers of `small_shape`, 10 tokens that see 55 keys. A layer: 2 * 3 (2 * 8 + 2 * 4 + 3 * 8) a
    token, of it 2 * 3 * 3 * 8 in the MLP; 4 * 8 a key."""
    shape, tokens = small_shape(), work.Tokens(10, 0, 0, 0, 55, 0, 0)
    again = {
        name: work.recomputed_flops(
            shape, tokens, 2, RecomputeConfig(granularity=granularity, modules=modules)
        )
        for name, granularity, modules in (
            ("core", "selective", ("core_attn",)),
            ("both", "selective", ("core_attn", "mlp")),
            ("full", "full", ("core_attn",)),
        )
    }
    assert again == {"core": 2 * 32 * 55, "both": 2 * (32 * 55 + 144 * 10), "full": 2 * (288 * 10 + 32 * 55)}


def test_70b_estimate(tmp_path: Path) -> None:
    """Public figures: Llama-3.1-70B has 70,553,706,496 parameters and 320 KiB of bf16 keys and values a
    token."""
    settings = config(train={"parallel": {"tp": 8, "pp": 8, "dp": 2}})
    shape = shape_of(tmp_path, LLAMA_70B)
    found = estimate(settings, shape)
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
    # the last stage has 10 layers and the head, on 16 ranks
    last = work.forward_flops(shape, found.packed, 10, head=True)
    assert seconds["train"] == pytest.approx(3 * last / 16 / (989e12 * 0.4))
    assert seconds["pipeline bubble"] == pytest.approx(
        7 / found.num_microbatches * (seconds["score"] + seconds["train"])
    )
    assert found.seconds == pytest.approx(sum(seconds.values()))
    assert seconds[found.bottleneck] == max(seconds.values())


def test_engines_in_fp8_by_hand(tmp_path: Path) -> None:
    """A worker of four: of the 80 layers' matrices (2 * 8192^2 + 2 * 1024 * 8192 + 3 * 28672 * 8192 elements
    each) a quarter at a byte; an fp32 scale for 2048 + 512 + 14336 rows of its own and 2 * 8192 whole ones;
    a quarter of embedding and head and all 161 norms in bf16. Published are bf16 weights."""
    shape = shape_of(tmp_path, LLAMA_70B)
    served, rounded = (
        estimate(config(engine={"tp": 4, "quantization": kind}), shape).engine for kind in (None, "fp8")
    )
    matrices = (2 * 8192**2 + 2 * 1024 * 8192 + 3 * 28672 * 8192) * 80 // 4
    scales, rest = 4 * 80 * (2048 + 512 + 14336 + 2 * 8192), 2 * (2 * 128256 * 8192 // 4 + 161 * 8192)
    assert rounded.weight_bytes == matrices + scales + rest
    assert served.weight_bytes == served.update_bytes == rounded.update_bytes == 2 * matrices + rest
    assert rounded.kv_bytes - served.kv_bytes == served.weight_bytes - rounded.weight_bytes


def test_the_bottleneck_follows_the_hardware(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, LLAMA_70B)
    assert estimate(config(), shape).bottleneck == "decode"
    assert (
        estimate(config(plan={"memory_gib": 180.0, "network_gb_per_s": 0.5}), shape).bottleneck == "publish"
    )
    slow = config(plan={"memory_gib": 180.0, "peak_tflops": 50.0})
    assert estimate(slow, shape).bottleneck == "train"


def test_traffic_of_a_70b_layout_by_hand(tmp_path: Path) -> None:
    """TP 8 with sequence parallelism, CP 2, DP 2: 10 layers a stage, two scoring passes, one training."""
    parallel = {"tp": 8, "pp": 8, "cp": 2, "dp": 2, "sequence_parallel": True, "distributed_optimizer": True}
    shape = shape_of(tmp_path, LLAMA_70B)
    found = estimate(config(train={"parallel": parallel, "mini_batches": 4}), shape)
    amounts = {cost.name: cost.amount for cost in found.costs}
    hidden = found.packed.unique / 4 * 8192 * 2
    # of a ring's 7/8: 2 gathers and 2 scatters a forward pass, one gather more in each half's backward pass
    assert amounts["tensor-parallel sums"] == pytest.approx((3 * 4 + 6) * 10 * 7 / 8 * hidden)
    # keys and values of one KV head: gathered in three forward passes, scattered in the backward pass
    keys = found.packed.unique / 2 * 2 * 128 * 2
    assert amounts["context-parallel keys"] == pytest.approx(4 * 10 / 2 * keys)
    # 3/4 of fp32 gradients out and of bf16 weights back, four steps
    parameters = max(stage.parameters for stage in found.stages)
    assert amounts["gradient sums"] == pytest.approx(4 * 3 / 4 * (4 + 2) * parameters)
    assert "recomputation" not in amounts
    again = {"granularity": "full"}
    full = estimate(config(train={"parallel": parallel, "mini_batches": 4, "recompute": again}), shape)
    more = {cost.name: cost.amount for cost in full.costs}
    assert more["tensor-parallel sums"] == pytest.approx((3 * 4 + 6 + 4) * 10 * 7 / 8 * hidden)
    assert more["context-parallel keys"] == pytest.approx(5 * 10 / 2 * keys)
    assert more["recomputation"] == pytest.approx(
        work.forward_flops(shape, found.packed, 10, head=False) / 32
    )


def test_knobs_of_the_config_reach_the_memory(tmp_path: Path) -> None:
    """Second source: `rank_memory`, itself checked by hand and on real ranks."""
    parallel = {"tp": 8, "pp": 8, "cp": 2, "sequence_parallel": True, "distributed_optimizer": True}
    again = {"granularity": "selective", "modules": ("core_attn", "mlp")}
    settings = config(train={"parallel": parallel, "recompute": again})
    shape = shape_of(tmp_path, LLAMA_70B)
    found, packed = estimate(settings, shape), work.micro_batch(settings)
    for attention, backend in (("auto", "flex"), ("varlen", "varlen")):
        settings = config(train={"parallel": parallel, "recompute": again, "attention": attention})
        found = estimate(settings, shape)
        state = TrainState(
            "bf16", backend, packed, found.num_microbatches, True, RecomputeConfig.model_validate(again)
        )
        assert found.stages[3].memory == rank_memory(shape, settings.train.parallel, 3, state)
    assert packed == PackedTokens(8192, packed.trained, packed.copied)
    assert packed.copied / packed.tokens == pytest.approx(found.packed.copied / found.packed.unique)


def test_the_device_of_the_plan_decides_what_fp8_runs(tmp_path: Path) -> None:
    train = {"parallel": {}, "fp8": {"recipe": "mxfp8"}, "micro_batch_tokens": 8192}
    shape = shape_of(tmp_path, SMOLLM2)
    check_precision(config(train=train, plan={"compute_capability": 10.0}), shape)
    check_precision(config(train=train, plan={"device": "cpu"}), shape)  # emulated
    with pytest.raises(ValueError, match=r"got 9\.0"):
        check_precision(config(train=train), shape)
    engine = {"quantization": "fp8"}
    for plan in ({"compute_capability": 8.9}, {"compute_capability": 8.0, "device": "cpu"}):
        check_precision(config(engine=engine, plan=plan), shape)
    needs = r"^engine\.quantization: fp8 needs a GPU of compute capability 8\.9 or above, got 8\.0$"
    with pytest.raises(ValueError, match=needs):
        check_precision(config(engine=engine, plan={"compute_capability": 8.0}), shape)


@pytest.mark.parametrize(
    ("train", "device", "knob"),
    [
        ({"kernels": {"layers": "local"}, "fp8": {"recipe": "tensorwise"}}, "gpu", "train.kernels.layers"),
        ({"kernels": {"layers": "te"}}, "cpu", "train.kernels.layers"),
        ({"kernels": {"optimizer": "fused"}}, "cpu", "train.kernels.optimizer"),
        ({"attention": "flex"}, "cpu", "train.attention"),
        ({"kernels": {"layers": "te", "optimizer": "fused"}, "attention": "varlen"}, "gpu", None),
    ],
)
def test_kernels_that_a_rank_would_refuse_are_refused_by_plan(
    tmp_path: Path, train: dict, device: str, knob: str | None
) -> None:
    """FP8 on a GPU is Transformer Engine's; a CPU has neither that nor `flex`."""
    settings, shape = config(train=train, plan={"device": device}), shape_of(tmp_path, LLAMA_70B)
    refused = pytest.raises(ValueError, match=f"^{knob}: must be auto or")
    with refused if knob else contextlib.nullcontext():
        check_precision(settings, shape)


def test_virtual_stages_shorten_the_bubble(tmp_path: Path) -> None:
    """PP 8 x VPP 2: micro-batches in groups of 8, bubble 7 / (2 m + 7). 12 prompts over 2 ranks leave 4 of 16
    micro-batches empty."""
    settings = config(
        rollout={"prompts": 12, "max_path_tokens": 3000, "trees": 1},
        train={"parallel": {"tp": 8, "pp": 8, "vpp": 2, "dp": 2}},
        plan={"memory_gib": 400.0},
    )
    found = estimate(settings, shape_of(tmp_path, LLAMA_70B))
    assert (found.num_microbatches, found.num_fillers) == (8, 4)
    assert found.bubble == 7 / (2 * 8 + 7)
    assert found.stages[0].layers == ((0, 5), (40, 45))


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
    "uneven": (
        SMOLLM2,
        {"train": {"parallel": {"pp": 4}}},
        ", or tp=1 pp=4 stage_split=[7, 8, 8, 7]",
    ),
    "virtual stages": (
        SMOLLM2,
        {"train": {"parallel": {"pp": 2, "vpp": 4}}},
        "must divide the model's 30 layers, got 8; the nearest layout that can run is tp=1 pp=2 vpp=1, "
        "or tp=1 pp=2 stage_split=[3, 4, 4, 4, 4, 4, 4, 3]",
    ),
    "split": (
        SMOLLM2,
        {"train": {"parallel": {"pp": 2, "stage_split": [8, 8]}}},
        "stage_split: must sum to the model's 30 layers, got (8, 8); the nearest layout that can run is "
        "tp=1 pp=2 stage_split=null, or tp=1 pp=2 stage_split=[15, 15]",
    ),
    "sequence parallelism": (
        SMOLLM2,
        {"train": {"parallel": {"tp": 2, "sequence_parallel": True, "cp": 2}}},
        "the nearest layout that can run is tp=3 pp=1 train.micro_batch_tokens=8196",  # of 3 * 2 * cp
    ),
    "FP8 recipe of the device": (
        LLAMA_70B,
        {"train": {"fp8": {"recipe": "mxfp8"}, "micro_batch_tokens": 8192}, "plan": {}},
        "train.fp8.recipe: mxfp8 needs compute capability 10.0 or higher, below 12.0, got 9.0; "
        "the nearest that runs is train.fp8.recipe=blockwise",
    ),
    "FP8 recipe of the model": (
        SMOLLM2,  # 576 wide: 4.5 blocks
        {"train": {"parallel": {}, "fp8": {"recipe": "blockwise"}, "micro_batch_tokens": 8192}},
        "train.fp8.recipe: blockwise needs a rank's hidden size to be a multiple of 128, got 576; "
        "the nearest that runs is train.fp8.recipe=tensorwise",
    ),
    "memory": (
        LLAMA_70B,
        {"train": {"parallel": {"tp": 8, "pp": 1}, "micro_batch_tokens": 4608}},
        "train.parallel: a rank of stage 0 must fit plan.memory_gib 180 less plan.reserve_gib 4, got ",
    ),
    "memory beside an engine that sleeps": (
        LLAMA_70B,
        {
            "train": {"parallel": {"tp": 8, "pp": 1}, "micro_batch_tokens": 4608},
            "cluster": {"placement": "colocated"},
        },
        "must fit plan.memory_gib 180 less twice plan.reserve_gib 4, got ",
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


@pytest.mark.parametrize(
    "name", ["heads", "layers", "both", "virtual stages", "split", "sequence parallelism"]
)
def test_the_layouts_it_names_can_run(tmp_path: Path, name: str) -> None:
    fields, changes, _ = REFUSED[name]
    shape = shape_of(tmp_path, fields)
    with pytest.raises(ValueError, match="can run is") as refusal:
        check_layout(config(**changes), shape)
    for way in str(refusal.value).split("can run is ")[1].split(", or "):
        train = {"parallel": dict(changes["train"]["parallel"])}
        for word in way.replace(", ", ",").split():
            key, value = word.split("=")
            section = train if "." in key else train["parallel"]
            section[key.split(".")[-1]] = json.loads(value)
        check_layout(config(train=train), shape)


def test_the_layout_it_names_is_the_smallest_that_fits(tmp_path: Path) -> None:
    """Followed, the advice passes; with half the pipeline it does not."""
    shape = shape_of(tmp_path, LLAMA_70B)
    start = {"tp": 8, "pp": 1}
    with pytest.raises(ValueError, match="smallest layout that fits is tp=") as refusal:
        estimate(config(train={"parallel": start, "micro_batch_tokens": 4608}), shape)
    assert "GiB with train.recompute.granularity=full, " in str(refusal.value)
    assert "GiB with train.parallel.sequence_parallel=true" in str(refusal.value)
    words = str(refusal.value).split("fits is ")[1].replace(",", "").replace(";", "").split()
    tp, pp = (int(word.split("=")[1]) for word in words[:2])
    estimate(config(train={"parallel": {"tp": tp, "pp": pp}, "micro_batch_tokens": 4608}), shape)
    with pytest.raises(ValueError, match="must fit"):
        estimate(config(train={"parallel": {"tp": tp, "pp": pp // 2}, "micro_batch_tokens": 4608}), shape)


def test_the_layout_it_names_takes_the_recipe(tmp_path: Path) -> None:
    """Qwen2.5-14B on eight ranks: 13,824 / 8 rows are no whole blocks of 128, 13,824 / 4 are 27."""
    qwen = LLAMA_70B | {"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824}
    qwen |= {"num_hidden_layers": 48, "num_attention_heads": 40, "vocab_size": 152064}
    shape, plan = shape_of(tmp_path, qwen), {"memory_gib": 46.0}
    train = {"micro_batch_tokens": 4608, "parallel": {"tp": 1}, "recompute": {"granularity": "full"}}
    for fp8, tp in ((None, 8), ({"recipe": "blockwise"}, 4)):
        with pytest.raises(ValueError, match=f"smallest layout that fits is tp={tp} pp={8 // tp}([;,]|$)"):
            estimate(config(train=train | {"fp8": fp8}, plan=plan), shape)
        settings = config(train=train | {"fp8": fp8, "parallel": {"tp": tp, "pp": 8 // tp}}, plan=plan)
        estimate(settings, shape)


def test_shorter_micro_batches_are_named_where_they_help(tmp_path: Path) -> None:
    shape, parallel = shape_of(tmp_path, LLAMA_70B), {"tp": 8, "pp": 8}
    with pytest.raises(ValueError, match="micro_batch_tokens=") as refusal:
        estimate(config(train={"parallel": parallel, "micro_batch_tokens": 16384}), shape)
    tokens = int(str(refusal.value).split("micro_batch_tokens=")[1].split(";")[0])
    estimate(config(train={"parallel": parallel, "micro_batch_tokens": tokens}), shape)
    with pytest.raises(ValueError, match="must fit"):
        estimate(config(train={"parallel": parallel, "micro_batch_tokens": tokens + 64}), shape)


def test_proposals_keep_what_the_layout_asked_for(tmp_path: Path) -> None:
    """CP, virtual stages and sequence parallelism."""
    parallel = {"tp": 4, "pp": 2, "vpp": 2, "cp": 2, "sequence_parallel": True}
    with pytest.raises(ValueError, match="smallest layout that fits is ") as refusal:
        estimate(config(train={"parallel": parallel}), shape_of(tmp_path, LLAMA_70B))
    way = str(refusal.value).split("fits is ")[1].split(";")[0].split(",")[0].split()
    tp, pp = (int(word.split("=")[1]) for word in way[:2])
    kept = config(train={"parallel": parallel | {"tp": tp, "pp": pp}})
    estimate(kept, shape_of(tmp_path, LLAMA_70B))
    assert len(way) == 2  # VPP and sequence parallelism stay as they are


def test_a_nearest_layout_says_how_many_devices_it_needs(tmp_path: Path) -> None:
    """56 ranks and 32 workers have 88 GPUs; 80 layers do not divide into 7 stages, 8 stages take 64 ranks."""
    parallel, plan = {"tp": 8, "pp": 7}, {"memory_gib": 180.0, "devices": 88}
    split = "[11, 12, 12, 12, 11, 11, 11]"
    message = f"run is tp=8 pp=8 with plan.devices=96, or tp=8 pp=7 stage_split={split}"
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        check_layout(config(train={"parallel": parallel}, plan=plan), shape_of(tmp_path, LLAMA_70B))
    check_devices(config(train={"parallel": parallel | {"stage_split": json.loads(split)}}, plan=plan))
    check_devices(config(train={"parallel": parallel | {"pp": 8}}, plan=plan | {"devices": 96}))


def test_the_device_of_the_plan_is_that_of_the_placement() -> None:
    """A run with such a placement takes no GPU, or needs some that a CPU has not."""
    with pytest.raises(ValueError, match=r"^plan\.device: must be cpu where cluster\.placement is, got gpu$"):
        check_devices(config(cluster={"placement": "cpu"}))
    message = r"^plan\.device: must hold 64 .* 96, got 0; .*cluster\.placement=cpu fits$"
    with pytest.raises(ValueError, match=message):
        check_devices(config(cluster={"placement": "disaggregated"}, plan={"device": "cpu"}))
    for placement in ("auto", "cpu", "colocated"):
        assert check_devices(config(cluster={"placement": placement}, plan={"device": "cpu"})) == "shm"


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
    assert "GPUs     96, one for each" in tables  # 64 ranks and 8 engines of 4
    assert "bottleneck: decode" in shown
    assert command(monkeypatch, "plan", str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 70_553_706_496
    assert found["model"]["num_layers"] == 80
    memory = found["stages"][0]["memory"]
    parts = ("weights", "gradients", "optimizer", "reference", "activations", "logits")
    assert memory["total"] == sum(memory[part] for part in parts)
    assert found["bottleneck"] == "decode"
    changed = ["cluster.placement=colocated", "train.fp8={recipe: tensorwise}"]
    assert command(monkeypatch, "plan", str(path), *changed) == 0
    shown = capsys.readouterr().out
    assert "GPUs     64, where ranks and workers take turns" in shown
    assert "linear layers in FP8, tensorwise" in shown


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


def grown(settings: Config, generator: np.random.Generator, group: str = "g") -> Tree:
    """A tree of equal turns, its branches drawn by the real rules."""
    path, rollout = work.expected_path(settings), settings.rollout
    prompt = Node(-1, ids(0), ids(path.prompt), np.zeros(0, np.float32), "prompt", 0)
    tree = Tree(group, 0, [prompt], [])
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


@pytest.mark.parametrize(
    ("devices", "ways"),
    [
        (12, None),  # 2 x 2 ranks twice, and 4 workers
        # 3 beside 8 ranks, 7 beside 4 workers, or workers on the GPUs of ranks
        (
            11,
            "engine.count=1 or train.parallel.dp=1 or cluster.placement=colocated, where memory allows, fits",
        ),
        # 1 beside 8 ranks is no engine of 2
        (9, "train.parallel.dp=1 or cluster.placement=colocated, where memory allows, fits"),
        (7, "no smaller dp or engine.count fits"),  # 3 beside 4 workers are no 4 ranks
    ],
)
def test_too_few_devices_name_what_would_fit(devices: int, ways: str | None) -> None:
    settings = config(
        plan={"devices": devices},
        engine={"count": 2, "tp": 2},
        train={"parallel": {"tp": 2, "pp": 2, "dp": 2}},
    )
    if ways is None:
        check_devices(settings)
        return
    message = f"plan.devices: must hold 8 trainer ranks and 4 engine workers, 12, got {devices}; {ways}"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_devices(settings)


@pytest.mark.parametrize(
    ("devices", "placement", "dp", "transport"),
    [
        (8, "disaggregated", 1, "shm"),  # 4 ranks and 4 workers on one node
        (None, "disaggregated", 1, "shm"),
        (12, "disaggregated", 2, "stream"),  # 8 ranks, and 4 workers on the second node
        (None, "disaggregated", 2, "stream"),
        (8, "colocated", 2, "shm"),
        (16, "colocated", 3, "ipc"),  # 12 ranks
    ],
)
def test_how_versions_travel_follows_the_nodes(
    devices: int | None, placement: str, dp: int, transport: str
) -> None:
    def settings(asked: str) -> Config:
        return config(
            plan={"devices": devices},
            cluster={"placement": placement},
            engine={"count": 2, "tp": 2, "transport": asked},
            train={"parallel": {"tp": 2, "pp": 2, "dp": dp}},
        )

    assert check_devices(settings("auto")) == transport
    if transport == "shm":
        assert check_devices(settings("shm")) == "shm"
        return
    message = f"shm is for one host, and the run takes 2 nodes of 8 GPUs; {transport} is for several"
    with pytest.raises(ValueError, match=f"^engine.transport: {message}$"):
        check_devices(settings("shm"))


def test_a_way_out_that_takes_more_devices_says_how_many(tmp_path: Path) -> None:
    """8 bytes a rank of 70 billion parameters are 560 GB, on 80 GiB at least 8 ranks; with 4 workers 12 and
    more. What is named passes."""
    shape = shape_of(tmp_path, LLAMA_70B)

    def settings(devices: int, **parallel: int) -> Config:
        return config(
            plan={"devices": devices},
            engine={"count": 1, "tp": 4},
            train={"parallel": {"tp": 8, **parallel}, "micro_batch_tokens": 4608},
        )

    with pytest.raises(ValueError, match=r"smallest layout that fits is tp=\d+ pp=\d+ with") as refused:
        estimate(settings(12), shape)
    tp, pp, devices = map(
        int, re.findall(r"tp=(\d+) pp=(\d+) with plan.devices=(\d+)", str(refused.value))[0]
    )
    assert devices >= tp * pp + 4
    estimate(settings(devices, tp=tp, pp=pp), shape)
    with pytest.raises(ValueError, match=r"plan\.devices: must hold"):
        estimate(settings(devices - 1, tp=tp, pp=pp), shape)


def test_nothing_is_counted_on_a_cpu() -> None:
    check_devices(config(plan={"device": "cpu", "devices": 1}, train={"parallel": {"tp": 2}}))


def test_an_engine_must_fit_beside_the_weights_of_a_rank(tmp_path: Path) -> None:
    """A rank of the last of 8 stages, tp 8: 10 layers of (150,994,944 + 704,643,072) / 8 + 16,384 parameters,
    a head of 128,256 x 8,192 / 8 and a norm of 8,192: 1,201,053,696, in bf16 2.24 GiB. With 4 GiB of reserve
    they leave 1 - 6.24 / 180 = 0.965 of the device."""
    shape = shape_of(tmp_path, LLAMA_70B)

    def beside(utilization: float) -> Config:
        return config(
            cluster={"placement": "colocated"},
            engine={"gpu_memory_utilization": utilization},
            train={"parallel": {"tp": 8, "pp": 8}, "micro_batch_tokens": 4608},
        )

    estimate(beside(0.96), shape)
    with pytest.raises(ValueError, match=r"must leave 6\.2 GiB .*got 0\.97; the largest that fits is 0\.96$"):
        estimate(beside(0.97), shape)
