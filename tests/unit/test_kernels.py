"""Which implementation is chosen where, as a table; and that nothing is imported to find out."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_tree.config import Fp8Config, KernelsConfig
from megatron_tree.train import kernels
from megatron_tree.train.precision import Device

FP8 = Fp8Config(recipe="blockwise")
CPU, BARE = Device(None), Device((9, 0), (13, 0))
TE = replace(BARE, transformer_engine=True)
APEX = replace(BARE, apex=True, fused_weight_gradients=True)
FULL = replace(TE, apex=True, fused_weight_gradients=True)
USELESS = replace(FULL, capability=None)  # everything imports, and there is no GPU


def names(wanted: KernelsConfig, device: Device, fp8: Fp8Config | None = None) -> str:
    chosen = kernels.choose(wanted, "auto", "bf16", fp8, device)
    parts = (chosen.linear, chosen.norm, chosen.optimizer, chosen.weight_gradients, chosen.attention)
    assert all(part.why for part in parts)
    return " ".join(part.name for part in parts)


@pytest.mark.parametrize(
    ("device", "fp8", "expected"),
    [
        (CPU, None, "local ours ours separate node"),
        (CPU, FP8, "emulated ours ours separate node"),
        (USELESS, None, "local ours ours separate node"),
        (BARE, None, "local ours ours separate flex"),
        (APEX, None, "local ours apex fused flex"),
        (TE, None, "te te te separate flex"),  # Megatron-Core's output layer could not add up
        (TE, FP8, "te te te separate flex"),
        (FULL, FP8, "te te te fused flex"),
    ],
)
def test_what_auto_is(device: Device, fp8: Fp8Config | None, expected: str) -> None:
    assert names(KernelsConfig(), device, fp8) == expected


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [
        ({"layers": "local"}, FULL, "local ours te fused flex"),
        ({"optimizer": "torch"}, FULL, "te te ours fused flex"),
        ({"optimizer": "fused"}, APEX, "local ours apex fused flex"),
        ({"weight_gradients": "separate"}, FULL, "te te te separate flex"),
    ],
)
def test_what_the_config_sets(wanted: dict[str, str], device: Device, expected: str) -> None:
    assert names(KernelsConfig.model_validate(wanted), device) == expected


@pytest.mark.parametrize(
    ("wanted", "device", "fp8", "message"),
    [
        ({"layers": "te"}, CPU, None, "layers: must be auto or local where there is no GPU, got te"),
        ({"layers": "te"}, APEX, None, "layers: .* where Transformer Engine does not import, got te"),
        ({"layers": "local"}, FULL, FP8, "layers: must be auto or te with train.fp8 on a GPU"),
        ({"optimizer": "fused"}, BARE, None, "optimizer: must be auto or torch here .neither"),
        ({"optimizer": "fused"}, USELESS, None, "optimizer: must be auto or torch here .no GPU"),
        (
            {"weight_gradients": "fused"},
            TE,
            None,
            "weight_gradients: .*fused_weight_gradient_mlp_cuda does not",
        ),
    ],
)
def test_what_is_refused(wanted: dict[str, str], device: Device, fp8: Fp8Config | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"train.kernels.{message}"):
        kernels.choose(KernelsConfig.model_validate(wanted), "auto", "bf16", fp8, device)


def test_the_unrelated_apex_is_neither_taken_nor_imported_by_us(tmp_path: Path) -> None:
    """On this machine, with a package of that name that only says that it was imported."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    code = "from megatron_tree.train import kernels; print(kernels.here())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "apex=False" in out.stdout
