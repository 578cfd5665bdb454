"""What an engine needs of a GPU, and vLLM would only find out in another process, while it loads weights."""

from __future__ import annotations

from megatron_tree.config import EngineConfig

FP8_CAPABILITY = (8, 9)  # multiplies FP8 matrices with a scale per row and column


def check(config: EngineConfig) -> None:
    """ValueError where this GPU cannot serve as configured. The driver is asked: CUDA, once started in this
    process, could not be used in one that vLLM forks."""
    from vllm.platforms import current_platform

    check_capability(config, tuple(current_platform.get_device_capability()))


def check_capability(config: EngineConfig, capability: tuple[int, int]) -> None:
    """ValueError where a GPU of this compute capability lacks what `engine.quantization` asks for."""
    if config.quantization is not None and capability < FP8_CAPABILITY:
        needed, got = (".".join(map(str, pair)) for pair in (FP8_CAPABILITY, capability))
        raise ValueError(
            f"engine.quantization: {config.quantization} needs a GPU of compute capability {needed} or "
            f"above, got {got}"
        )
