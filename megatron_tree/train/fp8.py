"""FP8 products emulated by quantising and dequantising: what Transformer Engine's recipes do to numbers, not
to time. Pure torch, on any device.

The operands of the three matrix products of a linear layer are rounded to FP8 as the recipe scales them; the
products are then those of the model's own dtype. Scales, with `top` the largest finite value of the format:

    tensorwise   top / amax of the tensor
    delayed      top / largest amax of the tensor's last steps, 1 before the first; larger values saturate
    blockwise    top / amax, rounded down to a power of two: of 1 x 128 values along the product's inner
                 dimension, of 128 x 128 for weights
    mxfp8        2^-e with e = ceil(log2(amax / top)), of 1 x 32 values along the inner dimension

`hybrid` rounds output gradients to E5M2, everything else to E4M3. Departures from Transformer Engine:
products are accumulated in the model's dtype, the amax of a tensor is that of one rank's part (tensorwise),
and the history of delayed scaling moves on once a step, also where that only scores. Not here: the layers
(`fp8_layers`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from megatron_tree.config import Fp8Config
from megatron_tree.train.precision import HISTORY

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK, MX_BLOCK = 128, 32
Role = Literal["input", "weight", "grad"]
ROLES: tuple[Role, ...] = ("input", "weight", "grad")


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as FP8 stores it under a scale, saturating, and back."""
    top = torch.finfo(dtype).max
    stored = (x.float() * scale).clamp(-top, top).to(dtype)
    return (stored.float() / scale).to(x.dtype)


def tensor_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """top / amax in fp32; 1 where amax is 0 or not finite."""
    top = torch.full_like(amax, torch.finfo(dtype).max, dtype=torch.float32)
    scale = top / amax.float()  # a number over a tensor would be a product with its reciprocal
    usable = (amax > 0) & amax.isfinite()
    return torch.where(usable, scale.clamp(max=torch.finfo(torch.float32).max), torch.ones_like(scale))


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that is no larger than `tensor_scale`."""
    mantissa, exponent = torch.frexp(tensor_scale(amax, dtype))
    return torch.ldexp(torch.ones_like(mantissa), exponent - 1)


def mx_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """2^-e, e = ceil(log2(amax / top)) as an 8-bit exponent holds it: of an empty block the largest scale, of
    one with an infinity the smallest."""
    mantissa, exponent = torch.frexp(amax.float() / torch.finfo(dtype).max)
    e = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    e = torch.where(amax.isinf(), 127, e)
    return torch.ldexp(torch.ones_like(mantissa), torch.where(amax > 0, -e, 127))


def block_amax(x: Tensor, rows: int, columns: int) -> Tensor:
    """[R, C]: at each value the largest magnitude of its block; the last blocks may be smaller."""
    height, width = x.shape
    padded = torch.nn.functional.pad(x.abs(), (0, -width % columns, 0, -height % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    amax = blocks.amax((1, 3), keepdim=True).expand_as(blocks)
    return amax.reshape(padded.shape)[:height, :width]


class Quantiser(torch.nn.Module):
    """The operands of one linear layer. Delayed scaling remembers, also in checkpoints; the others do not."""

    amax_history: Tensor  # [3, HISTORY] of ROLES, the last step last
    seen: Tensor  # [3] of the step that runs

    def __init__(self, config: Fp8Config) -> None:
        super().__init__()
        self.config = config
        if config.recipe == "delayed":
            self.register_buffer("amax_history", torch.zeros(len(ROLES), HISTORY))
            self.register_buffer("seen", torch.zeros(len(ROLES)), persistent=False)

    def forward(self, x: Tensor, role: Role, inner: int) -> Tensor:
        """[R, C] rounded; `inner` is the dimension that the product sums over."""
        dtype = E5M2 if role == "grad" and self.config.format == "hybrid" else E4M3
        return rounded(x, self._scale(x, role, inner, dtype), dtype) if x.numel() else x

    def roll(self, amax: Tensor) -> None:
        """Ends a step: `amax` [3] counts from the next one on."""
        self.amax_history.copy_(torch.cat([self.amax_history[:, 1:], amax.unsqueeze(1)], dim=1))
        self.seen.zero_()

    def _scale(self, x: Tensor, role: Role, inner: int, dtype: torch.dtype) -> Tensor:
        recipe, at = self.config.recipe, ROLES.index(role)
        if recipe == "tensorwise":
            return tensor_scale(x.abs().amax(), dtype)
        if recipe == "delayed":
            # one step's infinity would otherwise spoil the scale of the next HISTORY steps
            self.seen[at] = torch.maximum(self.seen[at], x.abs().amax().nan_to_num(0.0, 0.0))
            return tensor_scale(self.amax_history[at].amax(), dtype)
        size = BLOCK if recipe == "blockwise" else MX_BLOCK
        shape = (1, size) if inner == 1 else (size, 1)
        if recipe == "mxfp8":
            return mx_scale(block_amax(x, *shape), dtype)
        return power_of_two_scale(block_amax(x, *((size, size) if role == "weight" else shape)), dtype)


class Product(torch.autograd.Function):
    """input [M, K] x weight [N, K] -> [M, N]; each of the three products has operands of its own, because
    blocks lie along the dimension that is summed over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, quantise: Quantiser) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.quantise = quantise
        return quantise(x, "input", 1) @ quantise(weight, "weight", 1).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,), quantise = grads, ctx.quantise
        d_x = quantise(grad, "grad", 1) @ quantise(weight, "weight", 0)
        d_weight = quantise(grad, "grad", 0).T @ quantise(x, "input", 0)
        return d_x, d_weight, None
