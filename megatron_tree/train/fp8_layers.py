"""FP8 in Megatron's layers: its tensor-parallel linear layers with the emulated products of `fp8`, and
weights that Transformer Engine keeps in FP8 (`param_gather`), read and filled as numbers. Not here: which
recipes run where (`precision`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_tree.config import Fp8Config
from megatron_tree.train.fp8 import Product, Quantiser


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
    """Moves the history of delayed scaling on, by the largest amaxes of all ranks that share a layer. Drops
    the copies in FP8 of their weights that Transformer Engine's layers made for the step: they take as much
    memory as the weights, which engines may need meanwhile, and the next step makes them anew."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    for module in modules:
        getattr(module, "_fp8_workspaces", {}).clear()
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


def numbers(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters by name, to be read: slices of a weight in FP8 would be views of nothing."""
    return {
        name: dequantize_fp8_tensor(param) if is_float8tensor(param) else param
        for name, param in model.named_parameters()
    }


def forget_taken(model: torch.nn.Module) -> None:
    """Of weights in FP8, for a second optimizer: the first one took the values that they had before rounding,
    and what gives them now gives None. Without it Megatron starts from the weights."""
    for param in model.parameters():
        given = getattr(param, "get_high_precision_init_val", None)
        if given is not None and given() is None:
            del param.get_high_precision_init_val


@contextmanager
def filled(model: torch.nn.Module) -> Iterator[dict[str, Tensor]]:
    """The parameters by name, to be written in slices. At the end a weight in FP8 takes what was written, and
    so does the value that Transformer Engine keeps for the optimizer to start from."""
    found = numbers(model)
    yield found
    for name, param in model.named_parameters():
        if found[name] is not param:
            param.copy_(found[name])
            if hasattr(param, "get_high_precision_init_val"):
                param.get_high_precision_init_val().copy_(found[name])
