"""transformers with the decoder's linear layers rounded as vLLM's `fp8_per_channel` rounds them: the second
source of FP8 engines.

Weights get a scale per output channel, inputs one per token, both the largest magnitude over E4M3's 448. The
products are exact in fp32. Embedding, head, norms and attention stay in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.e2e.engines import Served

E4M3_MAX = 448.0
NEARER = 0.8
"""An FP8 engine's mean gap to transformers with the same rounding, over that without, is below it. It is far
from 0: a value that differs in bf16 may round to another number of E4M3."""


@contextmanager
def rounded(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the decoder's linear layers round."""
    layers = [module for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    for layer in layers:
        layer.forward = partial(_forward, layer)
    yield
    for layer in layers:
        del layer.forward


def mean_gaps(served: Served, tag: str) -> tuple[float, float]:
    """Of the engine's log-probs, to transformers' with and without the rounding."""
    with rounded(served.model):
        same = served.gaps(f"{tag} rounded").mean()
    return float(same), float(served.gaps(f"{tag} plain").mean())


def linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    weight, weight_scale = _round(weight)
    tokens, token_scale = _round(x)
    out = (tokens @ weight.T) * token_scale * weight_scale.T
    return (out if bias is None else out + bias).to(x.dtype)


def _forward(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    return linear(layer.weight, layer.bias, x)


def _round(rows: Tensor) -> tuple[Tensor, Tensor]:
    """In fp32: the rows as E4M3 holds them over their scales, and the scales."""
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(1 / (E4M3_MAX * 512))
    return (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float(), scale
