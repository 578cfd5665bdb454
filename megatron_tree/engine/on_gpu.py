"""What an engine needs of a GPU, and vLLM would only find out in another process, while it loads weights."""

from __future__ import annotations

from megatron_tree.config import EngineConfig

FP8_CAPABILITY = (8, 9)  # multiplies FP8 matrices with a scale per row and column


def check(config: EngineConfig) -> None:
    """ValueError where the GPU lacks what `engine.quantization` asks for. The driver is asked: CUDA, once
    started in this process, could not be used in one that vLLM forks."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if config.quantization is not None and tuple(capability) < FP8_CAPABILITY:
        raise ValueError(
            f"engine.quantization: {config.quantization} needs a GPU of compute capability 8.9 or above, "
            f"got {capability.as_version_str()}"
        )
