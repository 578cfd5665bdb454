"""Stands in for Transformer Engine, which needs CUDA to be installed: as much of its Python surface as
Megatron-Core's wrappers touch on one rank, with torch's arithmetic and without FP8. What it shows is our use
of Megatron's wrappers, and which recipe they put around which layer; nothing about Transformer Engine.

`install` comes before Megatron-Core is imported. Signatures: Transformer Engine 2.x.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "2.3.0"  # the first with every recipe; later ones offer Megatron more to import
recipes: list[Any] = [None]  # of the contexts that are open, the innermost last


class Linear(torch.nn.Module):
    """One rank's part of a linear layer. Remembers the recipe that it last ran under, and keeps a copy of its
    weight from the first micro-batch of a step on."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        params_dtype: torch.dtype,
        parallel_mode: str,
        device: torch.device,
        **_: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode, self.use_bias, self.tp_size = parallel_mode, bias, 1
        self.weight = self._parameter((out_features, in_features), params_dtype, device)
        self.bias = self._parameter((out_features,), params_dtype, device) if bias else None
        self.recipe: Any = None
        self._fp8_workspaces: dict[str, Tensor] = {}
        self.num_copies = 0

    def _parameter(
        self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.nn.Parameter:
        """Marked as Transformer Engine's `reset_parameters` marks it."""
        param = torch.nn.Parameter(torch.full(size, float("nan"), dtype=dtype, device=device))
        param.tensor_model_parallel, param.partition_stride = True, 1  # type: ignore[attr-defined]
        param.partition_dim = 1 if self.parallel_mode == "row" else 0  # type: ignore[attr-defined]
        return param

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        self.recipe = recipes[-1]
        if self.recipe is not None and is_first_microbatch:
            self._fp8_workspaces["weight"] = self.weight.detach().clone()  # for all micro-batches
            self.num_copies += 1
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        pass


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        hidden_size: int = 0,  # so Megatron-Core 0.16 calls it
        *,
        normalized_shape: int = 0,  # and 0.19
        eps: float,
        sequence_parallel: bool,
        params_dtype: torch.dtype,
        device: torch.device,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size or normalized_shape, dtype=params_dtype, device=device)
        )
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        pass


class Recipe:
    def __init__(
        self, fp8_format: str, amax_history_len: int = 0, amax_compute_algo: str = "", **_: Any
    ) -> None:
        self.fp8_format = fp8_format
        self.amax_history_len, self.amax_compute_algo = amax_history_len, amax_compute_algo


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Iterator[None]:
    recipes.append(fp8_recipe if enabled else None)
    try:
        yield
    finally:
        recipes.pop()


class _Module(ModuleType):
    """Any other name that is asked for is there, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


def install() -> None:
    names = (
        "",
        ".common",
        ".common.recipe",
        ".pytorch",
        ".pytorch.fp8",
        ".pytorch.distributed",
        ".pytorch.ops",
    )
    names += (".pytorch.tensor",)
    modules = {name: _Module("transformer_engine" + name) for name in names}
    for name, module in modules.items():
        module.__path__ = []  # type: ignore[attr-defined]
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        sys.modules[module.__name__] = module
        parent, _, child = name.rpartition(".")
        if child:
            setattr(modules[parent], child, module)
    modules[""].__version__ = VERSION  # type: ignore[attr-defined]
    pytorch, recipe = modules[".pytorch"], modules[".common.recipe"]
    for kind in (Linear, RMSNorm):
        setattr(pytorch, kind.__name__, kind)
    for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"):
        setattr(recipe, name, type(name, (Recipe,), {}))
    recipe.Format = type("Format", (), {"E4M3": "e4m3", "HYBRID": "hybrid"})  # type: ignore[attr-defined]
    for module in (pytorch, modules[".pytorch.fp8"]):
        module.fp8_autocast = fp8_autocast  # type: ignore[attr-defined]
