"""Engines that serve FP8 (`engine.quantization`): versions are published in bf16, and vLLM rounds them while
it loads them, layer by layer. Second source: the same rounding by torch's casts (`rounding`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.model_loader import reload
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from megatron_tree.config import EngineConfig
from megatron_tree.engine import on_gpu
from megatron_tree.engine.engine import QUANTIZATIONS
from tests.e2e.engines import PROMPT, serving
from tests.e2e.rounding import NEARER, linear, mean_gaps
from tests.tiny_models import make_model


@torch._dynamo.config.patch(disable=True)  # as in an engine on a CPU
def test_a_layer_is_rounded_anew_in_every_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v have 8, 4 and 4 rows of 32; products of E4M3 numbers are exact in fp32, so that only their
    sums and the last rounding to bf16 may differ."""
    make_model(tmp_path, num_layers=1, dtype=torch.bfloat16)
    for module in (vllm_linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    how = resolve_quantization_config(QUANTIZATIONS["fp8"], None)
    assert how is not None
    settings = ModelConfig(str(tmp_path), dtype="bfloat16")
    generator = torch.Generator().manual_seed(0)
    with set_current_vllm_config(VllmConfig(model_config=settings)), torch.no_grad():
        online = OnlineQuantizationConfig(how)
        layer = vllm_linear.QKVParallelLinear(
            32, 2, 4, 2, bias=True, params_dtype=torch.bfloat16, quant_config=online
        )
        reload.record_metadata_for_reloading(layer)
        for version in range(3):
            if version:
                reload.initialize_layerwise_reload(layer)
            weight, bias, x = (
                torch.randn(*size, generator=generator).bfloat16() for size in ((16, 32), (16,), (5, 32))
            )
            for shard, rows in zip("qkv", ((0, 8), (8, 12), (12, 16)), strict=True):
                layer.weight.weight_loader(layer.weight, weight[slice(*rows)], shard)
                layer.bias.weight_loader(layer.bias, bias[slice(*rows)], shard)
            reload.finalize_layerwise_reload(layer, settings)
            assert layer.weight.dtype == torch.float8_e4m3fn
            got, expected = layer(x)[0].to(x.dtype), linear(weight, bias, x)
            torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-6)
            assert (got - torch.nn.functional.linear(x, weight, bias)).abs().max() > 0.05


@pytest.mark.full
@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize(("family", "tied_head", "tp"), [("qwen2", True, 1), ("llama", False, 2)])
def test_an_engine_takes_versions_in_fp8(tmp_path: Path, family: str, tied_head: bool, tp: int) -> None:
    with serving(tmp_path, family=family, tied=tied_head, tp=tp, quantization="fp8") as served:
        for version in range(3):
            before = served.reference(PROMPT)
            if version:
                served.loop.run(served.pool.update(served.publish()))
            same, plain = mean_gaps(served, f"v{version}")
            print(f"version {version}: gap {same:.3f} to the same rounding, {plain:.3f} to none")
            assert same < NEARER * plain
            scored = served.loop.run(served.made[-1].score(f"v{version} stale", PROMPT))
            assert version == 0 or np.abs(scored - before).mean() > 2 * plain  # nothing old is left


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_an_older_gpu_is_refused_before_vllm_starts(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(current_platform, "get_device_capability", lambda: DeviceCapability(*capability))
    on_gpu.check(EngineConfig())
    config = EngineConfig(quantization="fp8")
    if capability >= (8, 9):
        on_gpu.check(config)
        return
    with pytest.raises(ValueError, match=r"^engine\.quantization: fp8 needs .* 8\.9 or above, got 8\.0$"):
        on_gpu.check(config)
