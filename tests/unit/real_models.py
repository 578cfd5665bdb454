"""Published models: what their `config.json` says of sizes, and how many parameters the Hub counts in their
safetensors files (the second source for every shape here)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_tree.reshard.names import ModelShape, read_shape

_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
_ROWS: dict[str, tuple[Any, ...]] = {
    "Qwen2.5-7B": ("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False),
    "Qwen2.5-14B": ("qwen2", 48, 5120, 13824, 40, 8, 128, 152064, False),
    "Qwen2.5-32B": ("qwen2", 64, 5120, 27648, 40, 8, 128, 152064, False),
    "Qwen2.5-72B": ("qwen2", 80, 8192, 29568, 64, 8, 128, 152064, False),
    "Qwen3-8B": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False),
    "Qwen3-32B": ("qwen3", 64, 5120, 25600, 64, 8, 128, 151936, False),
    "Llama-3.1-8B": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, False),
    "Llama-3.1-70B": ("llama", 80, 8192, 28672, 64, 8, 128, 128256, False),
    "Mistral-7B-v0.3": ("mistral", 32, 4096, 14336, 32, 8, 128, 32768, False),
    "SmolLM2-135M": ("llama", 30, 576, 1536, 9, 3, 64, 49152, True),
}
PARAMETERS: dict[str, int] = {
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Mistral-7B-v0.3": 7_248_023_552,
    "SmolLM2-135M": 134_515_008,
}
CONFIGS: dict[str, dict[str, Any]] = {
    model: dict(zip(_FIELDS, row, strict=True))
    | {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": None}
    for model, row in _ROWS.items()
}


def real_shape(model: str, folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]), encoding="utf-8")
    return read_shape(folder)
