"""The slice plan: its invariants for drawn shapes and layouts, counted element by element and proved on
intervals; hand-written plans; wrong plans that the proof refuses; and real bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import cuts, digest, image, plan
from megatron_tree.reshard.names import ModelShape, check_model
from megatron_tree.reshard.plan import (
    Atom,
    EngineProof,
    SliceCopy,
    atoms,
    engine_reads,
    held,
    num_elements,
    owned,
    param_shapes,
    params,
    prove,
)
from tests.unit.shapes import engine_tps, shapes_and_layouts, small_shape


def allocated(shape: ModelShape, layout: ParallelLayout, rank: int, chunk: int) -> dict[str, tuple[int, ...]]:
    """A chunk's parameters as Megatron-Core allocates them, written down from its layers, not from the
    plan. tests/dist/test_layout.py has Megatron's own."""
    at, tp, hidden = layout.coordinates(rank), layout.tp, shape.hidden
    vocab_rows = -(-shape.vocab // tp)
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp
    found: dict[str, tuple[int, ...]] = {}
    if at.pp == 0 and chunk == 0:
        found["embedding.word_embeddings.weight"] = (vocab_rows, hidden)
    for layer in range(len(layout.stage_layers(shape.num_layers, at.pp, chunk))):
        prefix = f"decoder.layers.{layer}."
        found[prefix + "input_layernorm.weight"] = (hidden,)
        found[prefix + "self_attention.linear_qkv.weight"] = (qkv, hidden)
        if shape.family == "qwen2":
            found[prefix + "self_attention.linear_qkv.bias"] = (qkv,)
        if shape.family == "qwen3":
            found[prefix + "self_attention.q_layernorm.weight"] = (shape.head_dim,)
            found[prefix + "self_attention.k_layernorm.weight"] = (shape.head_dim,)
        found[prefix + "self_attention.linear_proj.weight"] = (hidden, shape.heads * shape.head_dim // tp)
        found[prefix + "pre_mlp_layernorm.weight"] = (hidden,)
        found[prefix + "mlp.linear_fc1.weight"] = (2 * shape.ffn // tp, hidden)
        found[prefix + "mlp.linear_fc2.weight"] = (hidden, shape.ffn // tp)
    if at.pp == layout.pp - 1 and chunk == layout.vpp - 1:
        found["decoder.final_layernorm.weight"] = (hidden,)
        if not shape.tied or layout.pp > 1:
            found["output_layer.weight"] = (vocab_rows, hidden)
    return found


def zeros(shape: ModelShape) -> dict[str, np.ndarray]:
    return {name: np.zeros(size, int) for name, size in shape.tensors().items()}


Drawn = tuple[ModelShape, ParallelLayout]


@given(shapes_and_layouts())
def test_every_element_of_every_tensor_is_owned_exactly_once(drawn: Drawn):
    shape, layout = drawn
    check_model(shape, layout)
    times = zeros(shape)
    for rank in layout.ranks():
        for copy in owned(shape, layout, rank):
            times[copy.tensor][copy.tensor_index] += 1
    assert all((count == 1).all() for count in times.values())


@given(shapes_and_layouts())
def test_the_slices_a_rank_holds_cover_each_element_of_its_parameters_exactly_once_but_for_padding(
    drawn: Drawn,
):
    shape, layout = drawn
    for rank in layout.ranks():
        copies = held(shape, layout, rank)
        assert {copy.chunk for copy in copies} <= set(range(layout.vpp))
        for chunk in range(layout.vpp):
            sizes = allocated(shape, layout, rank, chunk)
            assert param_shapes(shape, layout, rank, chunk) == sizes
            assert sorted(params(shape, layout, rank, chunk)) == sorted(sizes)
            times = {name: np.zeros(size, int) for name, size in sizes.items()}
            for copy in copies:
                if copy.chunk == chunk:
                    times[copy.param][copy.param_index] += 1
            for name, count in times.items():
                real = len(count)
                if "embed" in name or "output" in name:
                    real = max(0, min(real, shape.vocab - layout.coordinates(rank).tp * len(count)))
                assert (count[:real] == 1).all(), name
                assert (count[real:] == 0).all(), name


@given(shapes_and_layouts())
def test_what_a_rank_owns_it_also_holds(drawn: Drawn):
    shape, layout = drawn
    for rank in layout.ranks():
        assert set(owned(shape, layout, rank)) <= set(held(shape, layout, rank))


@settings(max_examples=40)
@given(shapes_and_layouts())
def test_the_atoms_partition_every_tensor_and_what_a_rank_owns(drawn: Drawn):
    shape, layout = drawn
    owner = zeros(shape)
    for rank in layout.ranks():
        for copy in owned(shape, layout, rank):
            owner[copy.tensor][copy.tensor_index] = rank
    for tp in engine_tps(shape):
        times = zeros(shape)
        for atom in atoms(shape, layout, tp):
            times[atom.tensor][atom.index] += 1
            assert (owner[atom.tensor][atom.index] == atom.writer).all()
        assert all((count == 1).all() for count in times.values())


@settings(max_examples=40)
@given(shapes_and_layouts())
def test_what_a_worker_reads_is_a_disjoint_union_of_atoms_and_together_they_read_every_element(
    drawn: Drawn,
):
    shape, layout = drawn
    for tp in engine_tps(shape):
        found, together = atoms(shape, layout, tp), zeros(shape)
        for worker in range(tp):
            read, union = zeros(shape), zeros(shape)
            for region in engine_reads(shape, tp, worker):
                read[region.tensor][region.index] += 1
                together[region.tensor][region.index] += 1
            for atom in found:
                if worker in atom.readers:
                    union[atom.tensor][atom.index] += 1
            assert all((read[name] == union[name]).all() for name in read)
        assert all((count >= 1).all() for count in together.values())


@settings(max_examples=40)
@given(shapes_and_layouts())
def test_the_proof_agrees_with_the_lists(drawn: Drawn):
    shape, layout = drawn
    proof = prove(shape, layout, engine_tps(shape), element_bytes=4)
    copies = [owned(shape, layout, rank) for rank in layout.ranks()]
    assert proof.tensors == len(shape.tensors())
    assert proof.elements == sum(map(num_elements, copies)) == sum(map(math.prod, shape.tensors().values()))
    assert proof.slices == sum(map(len, copies))
    sizes = [4 * num_elements(held(shape, layout, rank)) for rank in layout.ranks()]
    assert proof.held_bytes == (min(sizes), max(sizes))
    for engine in proof.engines:
        read = [4 * num_elements(engine_reads(shape, engine.tp, w)) for w in range(engine.tp)]
        expected = EngineProof(engine.tp, len(atoms(shape, layout, engine.tp)), (min(read), max(read)))
        assert engine == expected


def rows(copies: list[SliceCopy], param: str) -> list[str]:
    """`tensor[row]` for each row of a parameter, in its order."""
    by_row = {}
    for copy in copies:
        if copy.param == param:
            short = copy.tensor.split(".")[-2]
            for row in range(copy.extent[0]):
                by_row[copy.param_start[0] + row] = f"{short}[{copy.tensor_start[0] + row}]"
    return [by_row[row] for row in sorted(by_row)]


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        (1, ["q0 q1 q2 q3 k0 k1 v0 v1 q4 q5 q6 q7 k2 k3 v2 v3"]),
        (2, ["q0 q1 q2 q3 k0 k1 v0 v1", "q4 q5 q6 q7 k2 k3 v2 v3"]),
        # more ranks than KV heads: Megatron splits the fused rows, and ranks 0 and 1 gather them to attend
        (4, ["q0 q1 q2 q3", "k0 k1 v0 v1", "q4 q5 q6 q7", "k2 k3 v2 v3"]),
    ],
)
def test_qkv_interleave_by_hand(tp: int, expected: list[str]):
    """4 query heads of 2 rows in 2 KV groups: each group is two queries, their key, their value."""
    layout = ParallelLayout(tp=tp)
    for rank in layout.ranks():
        got = rows(held(small_shape(), layout, rank), QKV)
        assert got == [f"{name[0]}_proj[{name[1]}]" for name in expected[rank].split()]


def test_gate_then_up_by_hand():
    """The docstring's example: 8 ffn rows over two ranks; rank 1 has gate rows 4-7, then up rows 4-7."""
    copies = held(small_shape(hidden=4), ParallelLayout(tp=2), 1)
    param = "decoder.layers.0.mlp.linear_fc1.weight"
    assert rows(copies, param) == [
        *(f"gate_proj[{r}]" for r in range(4, 8)),
        *(f"up_proj[{r}]" for r in range(4, 8)),
    ]
    assert SliceCopy("model.layers.0.mlp.up_proj.weight", (4, 0), param, (4, 0), (4, 4)) in copies


def test_second_stage_has_the_models_later_layers_and_the_head():
    """Local layer 0 of the last stage is layer 1; a tied head is held there, and owned by the first stage
    only."""
    shape, layout = small_shape(), ParallelLayout(pp=2)
    fc2 = next(c for c in held(shape, layout, 1) if c.param == "decoder.layers.0.mlp.linear_fc2.weight")
    assert fc2.tensor == "model.layers.1.mlp.down_proj.weight"
    holders = [{c.param for c in held(shape, layout, r) if "embed" in c.tensor} for r in layout.ranks()]
    owners = [{c.param for c in owned(shape, layout, r) if "embed" in c.tensor} for r in layout.ranks()]
    assert holders == [{"embedding.word_embeddings.weight"}, {"output_layer.weight"}]
    assert owners == [{"embedding.word_embeddings.weight"}, set()]


def test_chunks_of_a_stage_by_hand():
    """5 layers as (1, 2, 1, 1) over pp=2, vpp=2: stage 1 has layers 1-2, then 4; local numbers restart."""
    shape, layout = small_shape(num_layers=5), ParallelLayout(pp=2, vpp=2, stage_split=(1, 2, 1, 1))
    found = {
        (c.chunk, c.param): c.tensor for c in held(shape, layout, 1) if c.param.endswith("linear_fc2.weight")
    }
    assert found == {
        (0, "decoder.layers.0.mlp.linear_fc2.weight"): "model.layers.1.mlp.down_proj.weight",
        (0, "decoder.layers.1.mlp.linear_fc2.weight"): "model.layers.2.mlp.down_proj.weight",
        (1, "decoder.layers.0.mlp.linear_fc2.weight"): "model.layers.4.mlp.down_proj.weight",
    }
    outside = [
        (rank, chunk, param)
        for rank in layout.ranks()
        for chunk in range(2)
        for param in params(shape, layout, rank, chunk)
        if "layers" not in param
    ]
    assert outside == [
        (0, 0, "embedding.word_embeddings.weight"),
        (1, 1, "decoder.final_layernorm.weight"),
        (1, 1, "output_layer.weight"),
    ]


def test_what_engine_workers_read_by_hand():
    """4 query heads and 2 KV heads of 2 rows, hidden 3, ffn 8, 130 words (padded to 192: 48 to each) on 4
    workers."""
    read = [
        {region.tensor.split(".")[-2]: region for region in engine_reads(small_shape(vocab=130), 4, worker)}
        for worker in range(4)
    ]

    def places(module: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(found[module].start, found[module].extent) for found in read if module in found]

    assert places("q_proj") == [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (2, 3)), ((6, 0), (2, 3))]
    for module in ("k_proj", "v_proj"):  # heads 0, 0, 1, 1
        assert places(module) == [((0, 0), (2, 3)), ((0, 0), (2, 3)), ((2, 0), (2, 3)), ((2, 0), (2, 3))]
    for module in ("o_proj", "down_proj"):
        assert places(module) == [((0, 2 * worker), (3, 2)) for worker in range(4)]
    for module in ("gate_proj", "up_proj"):
        assert places(module) == [((2 * worker, 0), (2, 3)) for worker in range(4)]
    assert places("norm") == [((0,), (3,))] * 4
    # worker 3's rows are all padding
    assert places("embed_tokens") == [((0, 0), (48, 3)), ((48, 0), (48, 3)), ((96, 0), (34, 3))]


def test_atoms_by_hand():
    """Key rows of 2 KV heads of 2: Megatron's tp=2 gives each rank one head, as two workers read them; its
    tp=1 writes two slices, of which four workers read one each in pairs."""
    key = "model.layers.0.self_attn.k_proj.weight"
    found = [atom for atom in atoms(small_shape(), ParallelLayout(tp=2), 2) if atom.tensor == key]
    assert found == [Atom(key, (0, 0), (2, 3), 0, (0,)), Atom(key, (2, 0), (2, 3), 1, (1,))]
    found = [atom for atom in atoms(small_shape(), ParallelLayout(), 4) if atom.tensor == key]
    assert found == [Atom(key, (0, 0), (2, 3), 0, (0, 1)), Atom(key, (2, 0), (2, 3), 0, (2, 3))]
    # 8 columns of down_proj, two ranks of the second stage, four workers
    down = "model.layers.1.mlp.down_proj.weight"
    found = [atom for atom in atoms(small_shape(), ParallelLayout(tp=2, pp=2), 4) if atom.tensor == down]
    assert [(atom.start[1], atom.extent[1], atom.writer, atom.readers) for atom in found] == [
        (0, 2, 2, (0,)),
        (2, 2, 2, (1,)),
        (4, 2, 3, (2,)),
        (6, 2, 3, (3,)),
    ]


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 3, "engine.tp: must divide the model's 4 heads, got 3"),
        ({"heads": 6, "ffn": 8}, 3, "engine.tp: must divide the model's 8 ffn rows, got 3"),
        (
            {"heads": 6, "ffn": 9, "vocab": 65},
            3,
            "engine.tp: must divide the model's 128 padded vocabulary rows, got 3",
        ),
        (
            {"heads": 12, "kv_heads": 3},
            2,
            "engine.tp: must divide the model's 3 KV heads or be a multiple of them, got 2",
        ),
    ],
)
def test_engines_that_a_model_does_not_fit(changes: dict[str, int], tp: int, message: str):
    for refused in (
        lambda shape: engine_reads(shape, tp, 0),
        lambda shape: prove(shape, ParallelLayout(), [1, tp]),
    ):
        with pytest.raises(ValueError, match=r"^engine\.tp") as refusal:
            refused(small_shape(**changes))
        assert str(refusal.value) == message


def drop_first(copies: list[SliceCopy]) -> list[SliceCopy]:
    return copies[1:]


def repeat_last(copies: list[SliceCopy]) -> list[SliceCopy]:
    return [*copies, *copies[-1:]]


def shift(copies: list[SliceCopy]) -> list[SliceCopy]:
    """The second norm of every layer is written one element further on."""
    return [
        replace(copy, tensor_start=(1,)) if copy.param.endswith("pre_mlp_layernorm.weight") else copy
        for copy in copies
    ]


@pytest.mark.parametrize("name", ["held", "owned"])
@pytest.mark.parametrize("wrong", [drop_first, repeat_last, shift])
def test_a_wrong_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[[list[SliceCopy]], list[SliceCopy]]
):
    right = getattr(plan, name)
    monkeypatch.setattr(plan, name, lambda *args: wrong(right(*args)))
    with pytest.raises(AssertionError):
        prove(small_shape(), ParallelLayout(tp=2, pp=2), [2])


def test_an_engine_that_misses_elements_is_refused(monkeypatch: pytest.MonkeyPatch):
    right = cuts.engine_span

    def without_last_row(*args: object) -> tuple[int, int, int]:
        axis, low, high = right(*args)
        return (axis, low, high - 1) if args[1] == "gate_up" else (axis, low, high)

    monkeypatch.setattr(cuts, "engine_span", without_last_row)
    with pytest.raises(AssertionError, match=r"^engine tp 2 does not read all of .*0\.mlp\.gate_proj"):
        prove(small_shape(), ParallelLayout(tp=2), [2])


def test_a_plan_cut_in_two_dimensions_is_refused(monkeypatch: pytest.MonkeyPatch):
    right = plan.owned

    def square(*args: object) -> list[SliceCopy]:
        return [
            replace(copy, extent=(copy.extent[0], copy.extent[1] - 1)) if "fc1" in copy.param else copy
            for copy in right(*args)
        ]

    monkeypatch.setattr(plan, "owned", square)
    monkeypatch.setattr(plan, "held", square)
    with pytest.raises(AssertionError, match=r"cut in two dimensions"):
        prove(small_shape(), ParallelLayout(tp=2), [1])


@settings(max_examples=30)
@given(shapes_and_layouts())
def test_loaded_and_written_back_is_bit_equal(tmp_path_factory: pytest.TempPathFactory, drawn: Drawn):
    shape, layout = drawn
    folder = tmp_path_factory.mktemp("model")
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(size, generator=draw) for name, size in shape.tensors().items()}
    save_file(tensors, folder / "model.safetensors")
    image_path = write_back(shape, layout, folder)
    got = load_file(image_path)
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)


def write_back(shape: ModelShape, layout: ParallelLayout, folder: Path) -> Path:
    """Every rank loads what it holds; then each writes what it owns into an image."""
    source, path = image.Folder(folder), folder / "image.safetensors"
    source.check(shape)
    image.create(path, shape, torch.float32)
    target, written = image.writable(path), []
    for rank in layout.ranks():
        copies, owns = held(shape, layout, rank), owned(shape, layout, rank)
        for chunk in range(layout.vpp):
            sizes = allocated(shape, layout, rank, chunk)
            own = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
            image.load_slices(source, own, [copy for copy in copies if copy.chunk == chunk])
            written += digest.write_slices(target, own, [copy for copy in owns if copy.chunk == chunk])
    assert num_elements(written) == sum(map(math.prod, shape.tensors().values()))
    return path
