"""The slice plan: its three invariants for drawn shapes and layouts, two hand-written plans, and real
bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import image
from megatron_tree.reshard.names import ModelShape, check_model
from megatron_tree.reshard.plan import SliceCopy, held, owned, params
from tests.unit.shapes import shapes_and_layouts, small_shape


def param_shapes(shape: ModelShape, layout: ParallelLayout, rank: int) -> dict[str, tuple[int, ...]]:
    """A rank's parameters as Megatron-Core allocates them, written down from its layers, not from the
    plan."""
    at, tp, hidden = layout.coordinates(rank), layout.tp, shape.hidden
    vocab_rows = -(-shape.vocab // tp)
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp
    found: dict[str, tuple[int, ...]] = {}
    if at.pp == 0:
        found["embedding.word_embeddings.weight"] = (vocab_rows, hidden)
    for layer in range(shape.num_layers // layout.pp):
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
    if at.pp == layout.pp - 1:
        found["decoder.final_layernorm.weight"] = (hidden,)
        if not shape.tied or layout.pp > 1:
            found["output_layer.weight"] = (vocab_rows, hidden)
    return found


@given(shapes_and_layouts())
def test_every_element_of_every_tensor_is_owned_exactly_once(drawn: tuple[ModelShape, ParallelLayout]):
    shape, layout = drawn
    check_model(shape, layout)
    times = {name: np.zeros(size, int) for name, size in shape.tensors().items()}
    for rank in layout.ranks():
        for copy in owned(shape, layout, rank):
            times[copy.tensor][copy.tensor_index] += 1
    assert all((count == 1).all() for count in times.values())


@given(shapes_and_layouts())
def test_what_a_rank_holds_covers_its_parameters_exactly_once_but_for_vocabulary_padding(
    drawn: tuple[ModelShape, ParallelLayout],
):
    shape, layout = drawn
    for rank in layout.ranks():
        allocated = param_shapes(shape, layout, rank)
        assert sorted(params(shape, layout, rank)) == sorted(allocated)
        times = {name: np.zeros(size, int) for name, size in allocated.items()}
        for copy in held(shape, layout, rank):
            times[copy.param][copy.param_index] += 1
        for name, count in times.items():
            real = len(count)
            if "embed" in name or "output" in name:
                real = max(0, min(real, shape.vocab - layout.coordinates(rank).tp * len(count)))
            assert (count[:real] == 1).all(), name
            assert (count[real:] == 0).all(), name


@given(shapes_and_layouts())
def test_what_a_rank_owns_it_also_holds(drawn: tuple[ModelShape, ParallelLayout]):
    shape, layout = drawn
    for rank in layout.ranks():
        assert set(owned(shape, layout, rank)) <= set(held(shape, layout, rank))


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


@settings(max_examples=30)
@given(shapes_and_layouts())
def test_loaded_and_written_back_is_bit_equal(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[ModelShape, ParallelLayout]
):
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
    target, written = image.writable(path), 0
    for rank in layout.ranks():
        own = {name: torch.full(size, torch.nan) for name, size in param_shapes(shape, layout, rank).items()}
        image.load_slices(source, own, held(shape, layout, rank))
        written += image.write_slices(target, own, owned(shape, layout, rank))
    assert written == 4 * sum(torch.Size(size).numel() for size in shape.tensors().values())
    return path
