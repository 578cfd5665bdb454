"""Megatron's tensor-parallel linear layers with the products of `fp8`, and what they ask of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_tree.config import Fp8Config
from megatron_tree.reshard.names import ModelShape
from megatron_tree.train.fp8 import Product, Quantiser
from megatron_tree.train.group import RankSetup


def check(shape: ModelShape, setup: RankSetup, *, on_gpu: bool) -> None:
    """ValueError where the products of this model and layout do not fit the recipe."""
    if setup.fp8 is None:
        return
    if on_gpu:
        raise ValueError(f"train.fp8: must be null on a GPU, for it is emulated only, got {setup.fp8.recipe}")
    tp, multiple = setup.layout.tp, setup.fp8.multiple
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"hidden size": shape.hidden, "ffn rows": shape.ffn // tp}
    sizes |= {"fused qkv rows": (q + 2 * kv) // tp, "attention columns": q // tp}
    for name, size in sizes.items():
        if size % multiple:
            raise ValueError(
                f"train.fp8.recipe: {setup.fp8.recipe} needs a rank's {name} to be a multiple of {multiple}, "
                f"got {size}"
            )


class _Fp8Linear:
    """Takes the place of the product inside Megatron's tensor-parallel layers."""

    def __init__(self, *args: Any, fp8: Fp8Config, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quantise = Quantiser(fp8)

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: torch.distributed.ProcessGroup | None = None,
        **_: Any,
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        out = Product.apply(input.flatten(0, -2), weight, self.quantise)
        out = out.view(*input.shape[:-1], -1)
        return out if bias is None else out + bias


class Fp8ColumnParallelLinear(_Fp8Linear, ColumnParallelLinear):
    pass


class Fp8RowParallelLinear(_Fp8Linear, RowParallelLinear):
    pass


def end_step(chunks: Iterable[torch.nn.Module]) -> None:
    """Moves the history of delayed scaling on, by the largest amaxes of all ranks that share a layer."""
    modules = (module for chunk in chunks for module in chunk.modules())
    delayed = [
        module for module in modules if isinstance(module, Quantiser) and module.config.recipe == "delayed"
    ]
    if not delayed:
        return
    seen = torch.stack([quantiser.seen for quantiser in delayed])
    group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
    torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX, group=group)
    for quantiser, amax in zip(delayed, seen, strict=True):
        quantiser.roll(amax)
