"""The slice plan of published models, up to TP 8 x PP 8 x VPP 2 and engine TP 8, without a weight."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard.names import ModelShape, check_model
from megatron_tree.reshard.plan import EngineProof, Proof, prove
from tests.unit.real_models import CONFIGS, PARAMETERS, real_shape
from tests.unit.shapes import engine_tps


def nearly_equal(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Chunks that differ by at most one layer; those short of one come first."""
    return tuple((num_layers + chunk) // chunks for chunk in range(chunks))


def largest_tp(shape: ModelShape) -> int:
    for tp in (8, 4, 3, 2):
        try:
            check_model(shape, ParallelLayout(tp=tp))
        except ValueError:
            continue
        return tp
    return 1


@pytest.mark.parametrize("model", CONFIGS)
def test_sizes_are_the_published_ones(tmp_path: Path, model: str):
    shape = real_shape(model, tmp_path)
    assert sum(math.prod(size) for size in shape.tensors().values()) == PARAMETERS[model]


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (4, 1), (8, 2)])
def test_every_element_is_covered(tmp_path: Path, model: str, pp: int, vpp: int):
    """Stages are uneven where the layers do not divide; one large stage, then all of TP, PP and VPP."""
    shape = real_shape(model, tmp_path)
    tps = engine_tps(shape) if vpp > 1 else engine_tps(shape)[-1:]
    split = nearly_equal(shape.num_layers, pp * vpp)
    tp = 1 if pp == 1 else largest_tp(shape)
    proof = prove(shape, ParallelLayout(tp=tp, pp=pp, vpp=vpp, stage_split=split), tps)
    assert proof.elements == PARAMETERS[model]
    assert [engine.tp for engine in proof.engines] == tps
    if vpp > 1:  # an engine's only worker reads all
        assert proof.engines[0].read_bytes == (2 * proof.elements, 2 * proof.elements)


def test_where_the_published_models_fit(tmp_path: Path):
    """By hand: 28 heads stop at tp 4 (and 7 is no multiple of 4 KV heads), 9 heads and 3 KV heads at 3; vLLM
    pads 151,936 = 2,374 * 64 words to itself, all others' vocabularies too."""
    shapes = {model: real_shape(model, tmp_path) for model in CONFIGS}
    others = {model: (8, [1, 2, 4, 8]) for model in CONFIGS}
    expected = others | {"Qwen2.5-7B": (4, [1, 2, 4]), "SmolLM2-135M": (3, [1, 3])}
    assert {model: (largest_tp(s), engine_tps(s)) for model, s in shapes.items()} == expected


def test_llama_70b_by_hand(tmp_path: Path):
    """Llama-3.1-70B on TP 8 x PP 8 x VPP 2, in bf16.

    Slices: 80 layers of 7 tensors cut in 8 and 2 norms, embedding and head cut in 8, the final norm:
    80 * 58 + 17 = 4657; an engine of 4 reads pairs of them, so atoms are slices. A layer on one rank:
    qkv 10,240 * 8192 / 8, o 8192 * 1024, fc1 7168 * 8192, fc2 8192 * 3584, norms 2 * 8192: 106,971,136
    elements, ten of them a rank; embedding or head 16,032 * 8192. Norms are owned by tp 0 only.
    """
    proof = prove(real_shape("Llama-3.1-70B", tmp_path), ParallelLayout(tp=8, pp=8, vpp=2), [4])
    ten_layers, norms, vocabulary = 10 * 106_971_136, 10 * 2 * 8192, 16_032 * 8192
    whole_norms = 80 * 2 * 8192 + 8192
    worker = (70_553_706_496 - whole_norms) // 4 + whole_norms
    assert proof == Proof(
        tensors=80 * 9 + 3,
        elements=70_553_706_496,
        slices=4657,
        owned_bytes=(2 * (ten_layers - norms), 2 * (ten_layers + vocabulary + 8192)),
        held_bytes=(2 * ten_layers, 2 * (ten_layers + vocabulary + 8192)),
        engines=(EngineProof(tp=4, atoms=4657, read_bytes=(2 * worker, 2 * worker)),),
    )
