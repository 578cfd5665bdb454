"""Recipes against devices, sizes and layers. Second source: Transformer Engine 2.x, `quantization.py`, the
three `_compute_…_support`, and its quantisers' `is_quantizable`."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from megatron_tree.config import Fp8Config
from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard.names import ModelShape
from megatron_tree.train import precision
from megatron_tree.train.precision import Device

CPU, ONE = Device(None), ParallelLayout()
SHAPE = ModelShape(
    family="llama",
    num_layers=8,
    hidden=512,
    ffn=1024,
    heads=4,
    kv_heads=2,
    head_dim=128,
    vocab=1000,
    tied=False,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=512,
)


def gpu(major: int, minor: int, cuda: tuple[int, int] = (13, 0)) -> Device:
    return Device((major, minor), cuda, transformer_engine=True)


def recipe(name: str, **more: object) -> Fp8Config:
    return Fp8Config.model_validate({"recipe": name, **more})


@pytest.mark.parametrize(
    ("device", "runs"),
    [
        (CPU, "tensorwise delayed blockwise mxfp8"),  # emulated
        (gpu(8, 0), ""),
        (gpu(8, 6), ""),
        (gpu(8, 9), "tensorwise delayed"),
        (gpu(9, 0, (12, 8)), "tensorwise delayed"),
        (gpu(9, 0, (12, 9)), "tensorwise delayed blockwise"),
        (gpu(10, 0), "tensorwise delayed blockwise mxfp8"),
        (gpu(10, 3), "tensorwise delayed blockwise mxfp8"),
        (gpu(12, 0), "tensorwise delayed blockwise"),
        (gpu(99, 0), "tensorwise delayed blockwise"),  # no upper end
    ],
)
def test_what_runs_on_a_device(device: Device, runs: str) -> None:
    assert precision.runnable(device) == runs.split()
    for name in precision.RECIPES:
        refused = pytest.raises(ValueError, match=f"train.fp8.recipe: {name} needs ")
        with contextlib.nullcontext() if name in runs.split() else refused:
            precision.check(recipe(name), device, SHAPE, ONE)


@pytest.mark.parametrize(
    ("name", "device", "shape", "message"),
    [
        (
            "mxfp8",
            gpu(9, 0),
            {},
            "mxfp8 needs compute capability 10.0 or higher, below 12.0, got 9.0; the nearest that runs is "
            "train.fp8.recipe=blockwise",
        ),
        ("mxfp8", gpu(9, 0), {"ffn": 1056}, "got 9.0; the nearest that runs is train.fp8.recipe=tensorwise"),
        ("mxfp8", gpu(8, 0), {}, "got 8.0; the nearest that runs is train.fp8=null"),
        ("delayed", gpu(8, 0), {}, "delayed needs compute capability 8.9 or higher, got 8.0"),
        (
            "blockwise",
            gpu(9, 0, (12, 4)),
            {},
            "blockwise needs CUDA 12.9 or higher, got 12.4; the nearest that runs is "
            "train.fp8.recipe=tensorwise",
        ),
        (
            "blockwise",
            CPU,
            {"ffn": 1056},  # 33 x 32
            "blockwise needs a rank's ffn rows to be a multiple of 128, got 1056; the nearest that runs is "
            "train.fp8.recipe=mxfp8",
        ),
        (
            "blockwise",
            gpu(9, 0),
            {"ffn": 1056},
            "got 1056; the nearest that runs is train.fp8.recipe=tensorw",
        ),
        (
            "tensorwise",
            CPU,
            {"hidden": 520},
            "rank's hidden size to be a multiple of 16, got 520; .*fp8=null",
        ),
        ("mxfp8", CPU, {"head_dim": 20}, "attention columns to be a multiple of 32, got 80"),  # qkv: 5 x 32
    ],
)
def test_refusals_name_the_rule_and_the_nearest(
    name: str, device: Device | None, shape: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        precision.check(recipe(name), device, replace(SHAPE, **shape), ONE)


def test_the_nearest_goes_with_the_other_fields() -> None:
    """Blackwell would run mxfp8, which cannot keep its weights in FP8 (the config's rule)."""
    kept, odd = recipe("blockwise", param_gather=True), replace(SHAPE, ffn=1056)
    with pytest.raises(ValueError, match=r"the nearest that runs is train\.fp8\.recipe=tensorwise$"):
        precision.check(kept, gpu(10, 0), odd, ONE)


def test_sizes_are_those_of_a_rank() -> None:
    """1024 ffn rows over 16 ranks are 64: too few for blocks of 128, enough for blocks of 32."""
    wide = replace(SHAPE, heads=16, kv_heads=16)
    precision.check(recipe("mxfp8"), CPU, wide, ParallelLayout(tp=16))
    with pytest.raises(ValueError, match="ffn rows to be a multiple of 128, got 64"):
        precision.check(recipe("blockwise"), CPU, wide, ParallelLayout(tp=16))


def test_a_gpu_without_transformer_engine_is_refused_and_bf16_is_not() -> None:
    bare = Device((9, 0), (13, 0))
    precision.check(None, bare, SHAPE, ONE)
    with pytest.raises(ValueError, match="needs Transformer Engine on a GPU, which does not import here"):
        precision.check(recipe("blockwise"), bare, SHAPE, ONE)


@pytest.mark.parametrize(
    ("ends", "pp", "most"),
    [
        (2, 4, None),
        (3, 4, 2),  # 8 layers in 4 stages: Megatron-Core takes no more than a stage's
        (3, 1, None),
        (4, 1, 3),  # nothing would be left
    ],
)
def test_layers_at_the_ends(ends: int, pp: int, most: int | None) -> None:
    refused = pytest.raises(
        ValueError, match=f"first_last_layers_bf16: must be at most {most} with 8 layers in"
    )
    with contextlib.nullcontext() if most is None else refused:
        precision.check(recipe("mxfp8", first_last_layers_bf16=ends), CPU, SHAPE, ParallelLayout(pp=pp))


def test_weights_in_fp8_need_a_gpu() -> None:
    kept = recipe("blockwise", param_gather=True)
    precision.check(kept, gpu(9, 0), SHAPE, ONE)
    precision.check(kept, None, SHAPE, ONE)  # of the driver, which may have none
    with pytest.raises(ValueError, match="param_gather: must be false without a GPU"):
        precision.check(kept, CPU, SHAPE, ONE)


def test_settings() -> None:
    assert precision.settings("bf16", None) == {
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
    }
    found = precision.settings("fp32", recipe("delayed", format="e4m3"))
    assert (found["params_dtype"], found["bf16"]) == (torch.float32, False)
    assert (found["fp8"], found["fp8_recipe"], found["first_last_layers_bf16"]) == ("e4m3", "delayed", False)
    assert (found["fp8_amax_history_len"], found["fp8_amax_compute_algo"]) == (1024, "max")
