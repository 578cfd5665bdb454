"""Bytes of a rank and pipeline schedules, on small numbers worked out by hand. Real ranks are measured in
tests/dist/test_planner.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_tree.config import Fp8Config, ParallelConfig, RecomputeConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.planner.activations import Activations, PackedTokens
from megatron_tree.planner.memory import TrainState, rank_memory
from megatron_tree.planner.schedule import Pass, passes, replay
from tests.unit.shapes import small_shape

NONE = RecomputeConfig()
CORE = RecomputeConfig(granularity="selective")
MLP = RecomputeConfig(granularity="selective", modules=("mlp",))
FULL = RecomputeConfig(granularity="full")
PAIRS = RecomputeConfig(granularity="full", layers=2)
PACKED = PackedTokens(tokens=12, trained=4, copied=30)


def state(recompute: RecomputeConfig = NONE, num_microbatches: int = 8) -> TrainState:
    return TrainState("fp32", "node", PACKED, num_microbatches, reference=False, recompute=recompute)


def test_order_of_passes_as_in_the_papers_figure() -> None:
    """1F1B of PP 2 with three micro-batches, and interleaved with two chunks a, b and two micro-batches."""
    assert [spelled(ParallelLayout(pp=2), s, 3) for s in range(2)] == [
        "Fa0 Fa1 Ba0 Fa2 Ba1 Ba2",
        "Fa0 Ba0 Fa1 Ba1 Fa2 Ba2",
    ]
    assert [spelled(ParallelLayout(pp=2, vpp=2), s, 2) for s in range(2)] == [
        "Fa0 Fa1 Fb0 Fb1 Bb0 Bb1 Ba0 Ba1",
        "Fa0 Fa1 Fb0 Bb0 Fb1 Bb1 Ba0 Ba1",
    ]


def spelled(layout: ParallelLayout, stage: int, num_microbatches: int) -> str:
    found = passes(layout, stage, num_microbatches)
    return " ".join(f"{'BF'[one.forward]}{'abcd'[one.chunk]}{one.micro_batch}" for one in found)


def test_replay_of_unequal_stages_by_hand() -> None:
    """Stage 0: F 0-1, F 1-2, B 6-8, B 11-13. Stage 1: F 1-3, B 3-6, F 6-8, B 8-11."""
    seconds = {(0, True): 1.0, (0, False): 2.0, (1, True): 2.0, (1, False): 3.0}
    found = replay(ParallelLayout(pp=2), 2, lambda stage, one: seconds[stage, one.forward])
    assert (found.wall, found.busy) == (13.0, (6.0, 10.0))
    assert found.bubble == 1 - 16 / 26


def test_replay_of_interleaved_stages_by_hand() -> None:
    """Every pass takes 1. Stage 0: Fa0 0-1, Fa1 1-2, Fb0 2-3, Fb1 3-4, Bb0 5-6, Bb1 7-8, Ba0 8-9, Ba1 9-10;
    stage 1: Fa0 1-2, Fa1 2-3, Fb0 3-4, Bb0 4-5, Fb1 5-6, Bb1 6-7, Ba0 7-8, Ba1 8-9."""
    found = replay(ParallelLayout(pp=2, vpp=2), 2, lambda stage, one: 1.0)
    assert (found.wall, found.busy) == (10.0, (8.0, 8.0))


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 1, 3), (4, 1, 2), (4, 2, 8), (8, 1, 16), (8, 4, 8)])
def test_bubble_of_equal_passes_is_the_formula(pp: int, vpp: int, m: int) -> None:
    """Narayanan et al. 2021: (pp - 1) / (m vpp + pp - 1), backward passes twice as long."""
    found = replay(ParallelLayout(pp=pp, vpp=vpp), m, lambda stage, one: 1.0 if one.forward else 2.0)
    assert found.bubble == pytest.approx((pp - 1) / (m * vpp + pp - 1))


def test_every_pass_is_run_once_and_forward_first() -> None:
    layout = ParallelLayout(pp=4, vpp=3)
    for stage in range(4):
        found = passes(layout, stage, 8)
        assert sorted((p.chunk, p.micro_batch, p.forward) for p in found) == sorted(
            (chunk, i, way) for chunk in range(3) for i in range(8) for way in (True, False)
        )
        at = {one: i for i, one in enumerate(found)}
        assert all(at[Pass(p.chunk, p.micro_batch, True)] <= at[p] for p in found)


@pytest.mark.parametrize(
    ("pp", "vpp", "micro_batches", "expected"),
    [
        (4, 1, 8, [4, 3, 2, 1]),
        (4, 1, 2, [2, 2, 2, 1]),
        (4, 2, 8, [11, 9, 7, 5]),  # 2 (pp - 1 - s) + (vpp - 1) pp warm-up passes, and one
        (1, 1, 8, [1]),
    ],
)
def test_passes_in_flight(pp: int, vpp: int, micro_batches: int, expected: list[int]) -> None:
    shape, parallel = small_shape(num_layers=8), ParallelConfig(pp=pp, vpp=vpp)
    counted = state(num_microbatches=micro_batches)
    assert [rank_memory(shape, parallel, stage, counted).in_flight for stage in range(pp)] == expected


@pytest.mark.parametrize(
    ("parallel", "recompute", "expected"),
    [
        # norms 2 (12 (4 * 3 + 4 * 3 + 4) + 12 * 4 * 3) = 960; rotary 12 * 4 * 4 * 2 = 384; queries and output
        # 2 * 12 * 4 * 8 = 768; keys 12 * 4 * 4 = 192; fused 12 * 4 * 16 = 768; log-sum-exp 4 * 12 * 4 = 192;
        # MLP 12 * 5 * 4 * 8 = 1920
        (ParallelConfig(), NONE, 5184),
        (ParallelConfig(), CORE, 5184 - 192),
        (ParallelConfig(), MLP, 5184 - 1920),
        # all but norms and rotary tables halved; then norms too
        (ParallelConfig(tp=2), NONE, 960 + 384 + (5184 - 960 - 384) / 2),
        (ParallelConfig(tp=2, sequence_parallel=True), NONE, 480 + 384 + (5184 - 960 - 384) / 2),
        # more ranks than KV heads: queries 192, keys 96, log-sum-exp 48, MLP 480, but fused 768 of all ranks
        (ParallelConfig(tp=4), NONE, 960 + 384 + 192 + 96 + 768 + 48 + 480),
        # a quarter of 5184 less keys and fused, but keys and values of all 12 tokens, 2 * 192
        (ParallelConfig(cp=4), NONE, (5184 - 192 - 768) / 4 + 384),
        (ParallelConfig(cp=4), CORE, (5184 - 192) / 4),
        # 12 * 4 * 3 for the input of a layer
        (ParallelConfig(tp=2, sequence_parallel=True), FULL, 72),
    ],
)
def test_bytes_of_a_layer_by_hand(
    parallel: ParallelConfig, recompute: RecomputeConfig, expected: float
) -> None:
    found = Activations(small_shape(), parallel, "fp32", "node", PACKED)
    two, one = (found.chunk(n, recompute, first=False, head=False) for n in (2, 1))
    assert two - one == expected


def test_back_ends_by_hand() -> None:
    """bf16: half of 5184, but inputs of norms 2 * 12 * 4 * 3, roots 2 * 12 * 4 and log-sum-exp 192 are fp32.
    `flex` adds a copy of the output, `varlen` has keys and values of 30 tokens instead of keys and fused."""
    node = (5184 - 288 - 96 - 192) / 2 + 288 + 96 + 192
    sizes = {"node": node, "flex": node + 192, "varlen": node - 96 - 384 + 2 * 30 * 2 * 4}
    for backend, expected in sizes.items():
        assert Activations(small_shape(), ParallelConfig(), "bf16", backend, PACKED).layer() == expected


def test_head_and_logits_by_hand() -> None:
    """Final norm 12 * 28; 4 trained tokens of 12 + 29 bytes and 10 words; TP 4 pads to 12 words, 3 a rank;
    CP 2 leaves half of the tokens."""
    one = Activations(small_shape(), ParallelConfig(), "fp32", "node", PACKED)
    assert (one.head, one.logits) == (336 + 4 * 41 + 4 * 4 * 10, 8 * 4 * 10)
    split = ParallelConfig(tp=4, cp=2, sequence_parallel=True)
    many = Activations(small_shape(), split, "fp32", "node", PACKED)
    assert (many.head, many.logits) == (1.5 * 28 + 2 * 41 + 4 * 2 * 3, 8 * 2 * 3)


def test_fullest_moment_by_hand() -> None:
    """PP 2, four micro-batches. Stage 0: two in flight, each a layer and 8 * 12 of token ids. Stage 1: one,
    and the head."""
    shape, parallel, head = small_shape(), ParallelConfig(pp=2), 336 + 4 * 41 + 160
    kept = [rank_memory(shape, parallel, stage, state()).activations for stage in range(2)]
    assert kept == [2 * (5184 + 96), 5184 + head]
    # full: inputs 144 and angles 96 stay; a layer comes back, whose first norm's input is that input
    full = [rank_memory(shape, parallel, stage, state(FULL)).activations for stage in range(2)]
    assert full == [2 * (144 + 96 + 96) + 5184 - 144, 144 + 96 + 5184 - 144]
    assert [rank_memory(shape, parallel, s, state()).activations_recomputed for s in range(2)] == full
    # both layers at once on one rank, whose head has gone by then
    pairs = rank_memory(shape, ParallelConfig(), 0, state(PAIRS)).activations
    assert pairs == 144 + 96 + 96 + 2 * 5184 - 144


def test_uneven_virtual_stages_by_hand() -> None:
    """PP 2, VPP 2, layers 1 0 2 1, four micro-batches. Stage 0 (1 and 2 layers) has 5 in flight at most. Its
    order Fa0 Fa1 Fb0 Fb1 Fa2 Bb0 Fa3 Bb1 Fb2 Ba0 ... has most behind Fa2: 3 of a and 2 of b."""
    parallel = ParallelConfig(pp=2, vpp=2, stage_split=(1, 0, 2, 1))
    found = rank_memory(small_shape(num_layers=4), parallel, 0, state(num_microbatches=4))
    assert spelled(parallel.layout, 0, 4).startswith("Fa0 Fa1 Fb0 Fb1 Fa2 Bb0 Fa3 Bb1 Fb2 Ba0")
    assert (found.in_flight, found.activations) == (5, 3 * (5184 + 96) + 2 * 2 * 5184)


def test_kept_tensors_by_hand() -> None:
    """A layer of `small_shape`: qkv (8 + 4 + 4) 3, proj 3 * 8, fc1 16 * 3, fc2 3 * 8, norms 6: 150. Stage 0
    adds 10 * 3 of the embedding, stage 1 as much of the tied head and 3 of the norm."""
    for stage, parameters in enumerate((180, 183)):
        plain = TrainState("bf16", "node", PACKED, 4, reference=True, recompute=NONE)
        found = rank_memory(small_shape(), ParallelConfig(pp=2, dp=2), stage, plain)
        sizes = (found.weights, found.gradients, found.optimizer, found.reference)
        assert sizes == (2 * parameters, 4 * parameters, 12 * parameters, 2 * parameters)


def test_buffers_of_the_distributed_optimizer_by_hand() -> None:
    """Each parameter begins at a multiple of 64: six of a layer take 6 * 64, the final norm 64. Buckets end
    at multiples of 128 that the 4 shards divide: 384 and 128 for the embedding; 512 and 128 for the head."""
    parallel = ParallelConfig(pp=2, dp=2, cp=2, distributed_optimizer=True)
    for stage, elements in enumerate((512, 640)):
        found = rank_memory(small_shape(), parallel, stage, state())
        assert (found.weights, found.gradients, found.optimizer) == (
            4 * elements,
            4 * elements,
            2 * elements,  # 8 over 4 shards
        )


@pytest.mark.parametrize(
    ("fp8", "copies"),
    [
        ({"recipe": "tensorwise"}, (2 * 288, 2 * 288)),
        ({"recipe": "blockwise", "first_last_layers_bf16": 1}, (2 * 144, 2 * 144)),
        ({"recipe": "mxfp8"}, (2 * 288 + 18, 2 * 288 + 18)),  # a scale of a byte for every 32
        ({"recipe": "blockwise", "param_gather": True}, (0, 0)),  # the weights are their own
    ],
)
def test_copies_of_weights_in_fp8_by_hand(fp8: dict[str, object], copies: tuple[int, int]) -> None:
    """Matrices of a layer of `small_shape`: 48 + 24 + 48 + 24 = 144, two layers in each of two stages.
    Transformer Engine keeps each by rows and by columns (`quantize_weight`), a byte an element."""
    for stage, expected in enumerate(copies):
        train = replace(state(), fp8=Fp8Config.model_validate(fp8))
        found = rank_memory(small_shape(num_layers=4), ParallelConfig(pp=2), stage, train)
        plain = rank_memory(small_shape(num_layers=4), ParallelConfig(pp=2), stage, state())
        assert (found.fp8_copies, found.kept - plain.kept) == (expected, expected)
