"""Which implementation a rank uses for each operation, and why: one decision, which `doctor` shows.

    linear            te | local | emulated  Transformer Engine's, Megatron-Core's, those of `fp8_layers`
    norm              te | ours
    optimizer         te | apex | ours       fused AdamW, or torch's in `adamw`
    weight_gradients  fused | separate       added to their buffer by the product itself, or after it
    attention         node | flex | varlen   those of `backends`

`choose` is pure. `here` takes Megatron-Core's word for what imports: it tried at its own import, so that
nothing is imported for the decision, and the unrelated package named apex, which lacks FusedAdam, is never
taken for NVIDIA's. Departures from Megatron-Core's spec for Transformer Engine: norms are not fused into the
linear layers, so that parameters keep the names of the slice plan; core attention is the trees'; embedding
and output layer are Megatron-Core's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from megatron_tree.config import Fp8Config, KernelsConfig
from megatron_tree.train import backends
from megatron_tree.train.group import RankSetup
from megatron_tree.train.precision import DTYPES, Device

ABSENT = "Transformer Engine does not import"


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Kernels:
    linear: Choice
    norm: Choice
    optimizer: Choice
    weight_gradients: Choice
    attention: Choice


NORMS = {
    "te": Choice("te", "with its linear layers"),
    "ours": Choice("ours", "Megatron-Core's own refuses sequence parallelism"),
}


def of(setup: RankSetup) -> Kernels:
    """The choices of a rank of this process."""
    return choose(setup.kernels, setup.attention, setup.dtype, setup.fp8, here())


def choose(
    wanted: KernelsConfig,
    attention: str,
    dtype: Literal["fp32", "bf16"],
    fp8: Fp8Config | None,
    device: Device,
) -> Kernels:
    """ValueError where something that the config asks for is not here."""
    backend = backends.choose(attention, "cuda" if device.is_gpu else "cpu", DTYPES[dtype])
    linear = _linear(wanted.layers, fp8, device)
    return Kernels(
        linear=linear,
        norm=NORMS["te" if linear.name == "te" else "ours"],
        optimizer=_optimizer(wanted.optimizer, device),
        weight_gradients=_weight_gradients(wanted.weight_gradients, device),
        attention=Choice(*backend),
    )


def _linear(wanted: str, fp8: Fp8Config | None, device: Device) -> Choice:
    if wanted == "te" and not (device.is_gpu and device.transformer_engine):
        lacks = ABSENT if device.is_gpu else "there is no GPU"
        raise ValueError(f"train.kernels.layers: must be auto or local where {lacks}, got te")
    if fp8 is not None and device.is_gpu and wanted == "local":
        raise ValueError(
            "train.kernels.layers: must be auto or te with train.fp8 on a GPU, where FP8 products are "
            "Transformer Engine's, got local"
        )
    if fp8 is not None and not device.is_gpu:
        return Choice("emulated", f"no GPU: operands are rounded as {fp8.recipe} scales them")
    if wanted != "auto":
        return Choice(wanted, "set by train.kernels.layers")
    if not device.is_gpu:
        return Choice("local", "no GPU")
    if not device.transformer_engine:
        return Choice("local", ABSENT)
    return Choice("te", "a GPU is here and Transformer Engine imports")


def _optimizer(wanted: str, device: Device) -> Choice:
    """Megatron-Core takes Transformer Engine's before Apex's."""
    fused = "te" if device.transformer_engine else "apex"
    possible = device.is_gpu and (device.transformer_engine or device.apex)
    lacks = "neither Transformer Engine nor NVIDIA's Apex imports" if device.is_gpu else "no GPU"
    if wanted == "fused" and not possible:
        raise ValueError(f"train.kernels.optimizer: must be auto or torch here ({lacks}), got fused")
    if wanted != "auto":
        return Choice("ours" if wanted == "torch" else fused, "set by train.kernels.optimizer")
    return Choice(fused, "a GPU is here and it imports") if possible else Choice("ours", lacks)


def _weight_gradients(wanted: str, device: Device) -> Choice:
    """Transformer Engine's layers could add them up without Apex; Megatron-Core's output layer cannot, and
    one setting holds for both."""
    extension = "Apex's fused_weight_gradient_mlp_cuda"
    possible = device.is_gpu and device.fused_weight_gradients
    lacks = f"{extension} does not import" if device.is_gpu else "no GPU"
    if wanted == "fused" and not possible:
        raise ValueError(
            f"train.kernels.weight_gradients: must be auto or separate here ({lacks}), got fused"
        )
    if wanted != "auto":
        return Choice(wanted, "set by train.kernels.weight_gradients")
    return Choice("fused", f"{extension} imports") if possible else Choice("separate", lacks)


@cache
def here() -> Device:
    """Of this process, decided once."""
    if not torch.cuda.is_available():
        return Device(None)
    from megatron.core import optimizer
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel import layers

    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return Device(
        capability=torch.cuda.get_device_capability(),
        cuda=(int(major), int(minor)),
        transformer_engine=transformer_engine.HAVE_TE,
        apex=optimizer.Adam.__module__.partition(".")[0] == "apex",
        fused_weight_gradients=layers._grad_accum_fusion_available,
    )
