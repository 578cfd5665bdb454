"""What vLLM needs on a CPU: environment variables and engine arguments, each with its measured reason."""

from __future__ import annotations

from typing import Any

from megatron_tree.config import EngineConfig
from megatron_tree.reshard.names import ModelShape

GIB = 1 << 30


def environment(config: EngineConfig) -> dict[str, str]:
    """Variables that vLLM and its child processes must find before vLLM is imported."""
    variables = {
        # An engine must not pin itself to cores: trainer ranks share them. Threads are an explicit choice
        # instead.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.cpu_threads),
        # Idle threads must sleep, not spin, for the same reason.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Some helpers are compiled even in eager mode, which would cost the first request about 18 s.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if config.tp == 1:
        # vLLM would start the one worker as a process of its own: 11 s of start-up and a /dev/shm queue for
        # nothing.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return variables


def check(config: EngineConfig, shape: ModelShape) -> None:
    """ValueError for what vLLM would only find out when it computes, or would answer with slower kernels."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if shape.head_dim not in sizes:
        raise ValueError(
            f"model.path: head_dim must be one of {sizes} for vLLM on a CPU, got {shape.head_dim}"
        )
    if config.block_size % 32:
        raise ValueError(f"engine.block_size: must be a multiple of 32 on a CPU, got {config.block_size}")


def arguments(config: EngineConfig) -> dict[str, Any]:
    return {
        "distributed_executor_backend": "uni" if config.tp == 1 else "mp",
        # Compilation makes decoding of small models a little faster and start-up a minute longer.
        "enforce_eager": True,
        # A seeded request in chunked prefill kills the engine ("CPU Generator does not use offset").
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.max_model_len, 4096),
        "kv_cache_memory_bytes": int(config.kv_cache_gib * GIB),
    }
