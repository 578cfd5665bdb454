"""What `model.dtype` and `train.fp8` mean to Megatron-Core and Transformer Engine, and what cannot run. Pure.

Without a GPU FP8 recipes are emulated (`fp8`), under the same rule for sizes. What a GPU must have is taken
from Transformer Engine's `check_fp8_support`, `check_fp8_block_scaling_support` and `check_mxfp8_support`,
which multiples from its quantisers. Not here: which layers compute it (`kernels`), rounding (`fp8`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_tree.config import Fp8Config
from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard.names import ModelShape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HISTORY = 1024  # steps that delayed scaling looks back: Transformer Engine's default, not Megatron-Core's

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes on, and what is installed there. See `kernels.here`."""

    capability: Version | None  # CUDA's compute capability; None: a CPU
    cuda: Version | None = None  # of torch's build
    transformer_engine: bool = False  # Megatron-Core imported its PyTorch part
    apex: bool = False  # Megatron-Core imported NVIDIA's FusedAdam from it
    fused_weight_gradients: bool = False  # Megatron-Core imported Apex's fused_weight_gradient_mlp_cuda

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None


@dataclass(frozen=True, slots=True)
class Recipe:
    least: Version  # compute capability
    nearest: tuple[str, ...]  # what to take instead, best first
    below: Version | None = None  # compute capability
    cuda: Version | None = None

    @property
    def capabilities(self) -> str:
        least = f"compute capability {_dotted(self.least)}"
        return (
            f"{least} or higher" if self.below is None else f"{least} or higher, below {_dotted(self.below)}"
        )


RECIPES = {
    "tensorwise": Recipe((8, 9), ()),
    "delayed": Recipe((8, 9), ("tensorwise",)),
    "blockwise": Recipe((9, 0), ("mxfp8", "tensorwise"), cuda=(12, 9)),
    "mxfp8": Recipe((10, 0), ("blockwise", "tensorwise"), below=(12, 0)),
}


def check(fp8: Fp8Config | None, device: Device | None, shape: ModelShape, layout: ParallelLayout) -> None:
    """ValueError where this device, model or layout cannot run the recipe, with the nearest that it can.
    Without a device what no device could run is refused."""
    if fp8 is None:
        return
    _check_layers(fp8, shape, layout)
    if fp8.param_gather and device is not None and not device.is_gpu:
        raise ValueError(
            "train.fp8.param_gather: must be false without a GPU, where FP8 is emulated, got true"
        )
    if device is not None and device.is_gpu and not device.transformer_engine:
        raise ValueError(
            f"train.fp8: needs Transformer Engine on a GPU, which does not import here; install it or set "
            f"train.fp8=null, got {fp8.recipe}"
        )
    fault = next(_faults(fp8, device, shape, layout), None)
    if fault is not None:
        runs = (
            f"train.fp8.recipe={other.recipe}"
            for other in _instead(fp8)
            if _runs(other, device, shape, layout)
        )
        raise ValueError(
            f"train.fp8.recipe: {fault}; the nearest that runs is {next(runs, 'train.fp8=null')}"
        )


def settings(dtype: Literal["fp32", "bf16"], fp8: Fp8Config | None) -> dict[str, Any]:
    """Fields of Megatron-Core's TransformerConfig. `fp8` is None where the products are not Transformer
    Engine's."""
    chosen = {
        "params_dtype": DTYPES[dtype],
        "pipeline_dtype": DTYPES[dtype],
        "bf16": dtype == "bf16",
    }
    if fp8 is None:
        return chosen
    ends = fp8.first_last_layers_bf16
    return chosen | {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.param_gather,
        "fp8_amax_history_len": HISTORY,
        "fp8_amax_compute_algo": "max",
        "tp_only_amax_red": False,  # amaxes of delayed scaling are those of all ranks that share a layer
        "first_last_layers_bf16": ends > 0,
        "num_layers_at_start_in_bf16": ends,
        "num_layers_at_end_in_bf16": ends,
    }


def runnable(device: Device) -> list[str]:
    """The recipes that a device runs where sizes fit."""
    return [name for name in RECIPES if not any(_device_faults(name, device))]


def of_layer(fp8: Fp8Config | None, num_layers: int, layer: int) -> Fp8Config | None:
    """None at either end of the model, where the config asks for it. Layers count over the model."""
    if fp8 is None or min(layer, num_layers - 1 - layer) < fp8.first_last_layers_bf16:
        return None
    return fp8


def _check_layers(fp8: Fp8Config, shape: ModelShape, layout: ParallelLayout) -> None:
    """Megatron-Core's rule, and that something is left to round."""
    ends = fp8.first_last_layers_bf16
    most = min(shape.num_layers // layout.pp, (shape.num_layers - 1) // 2)
    if ends > most:
        raise ValueError(
            f"train.fp8.first_last_layers_bf16: must be at most {most} with {shape.num_layers} layers in "
            f"{layout.pp} stages (a stage's, and one is left in FP8), got {ends}"
        )


def _faults(
    fp8: Fp8Config, device: Device | None, shape: ModelShape, layout: ParallelLayout
) -> Iterator[str]:
    if device is not None:
        yield from _device_faults(fp8.recipe, device)
    for name, size in _sizes(shape, layout):
        if size % fp8.multiple:
            yield f"{fp8.recipe} needs a rank's {name} to be a multiple of {fp8.multiple}, got {size}"


def _device_faults(name: str, device: Device) -> Iterator[str]:
    recipe, capability = RECIPES[name], device.capability
    too_new = capability is not None and recipe.below is not None and capability >= recipe.below
    if too_new or (capability is not None and capability < recipe.least):
        yield f"{name} needs {recipe.capabilities}, got {_dotted(capability)}"
    if device.cuda is not None and recipe.cuda is not None and device.cuda < recipe.cuda:
        yield f"{name} needs CUDA {_dotted(recipe.cuda)} or higher, got {_dotted(device.cuda)}"


def _instead(fp8: Fp8Config) -> Iterator[Fp8Config]:
    """The same with the recipes that come nearest, best first, where its other fields go with them."""
    for name in RECIPES[fp8.recipe].nearest:
        with suppress(ValueError):
            yield Fp8Config.model_validate(fp8.model_dump() | {"recipe": name})


def _runs(fp8: Fp8Config, device: Device | None, shape: ModelShape, layout: ParallelLayout) -> bool:
    return next(_faults(fp8, device, shape, layout), None) is None


def _sizes(shape: ModelShape, layout: ParallelLayout) -> Iterator[tuple[str, int]]:
    """Rows and columns of a rank's weights; `TrainConfig.token_multiple` sees to the tokens."""
    q, kv, tp = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, layout.tp
    yield "hidden size", shape.hidden
    yield "ffn rows", shape.ffn // tp
    yield "fused qkv rows", (q + 2 * kv) // tp
    yield "attention columns", q // tp


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
