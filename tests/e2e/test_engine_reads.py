"""What the plan says an engine worker reads, against what vLLM's own layers take of a tensor they are handed.

The layers are built as any worker of any engine size would build them, in this process and without a group.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding

from megatron_tree.reshard.names import ModelShape
from megatron_tree.reshard.plan import engine_reads
from tests.unit.shapes import engine_tps, small_shape

SHAPES = {
    "more KV heads than workers": small_shape(
        family="qwen2",
        num_layers=1,
        heads=16,
        kv_heads=8,
        head_dim=2,
        hidden=6,
        ffn=24,
        vocab=300,
        tied=False,
    ),
    "fewer KV heads than workers": small_shape(
        family="qwen3",
        num_layers=1,
        heads=24,
        kv_heads=2,
        head_dim=4,
        hidden=8,
        ffn=48,
        vocab=130,
        tied=False,
    ),
}
CASES = [
    (name, tp, worker) for name, shape in SHAPES.items() for tp in engine_tps(shape) for worker in range(tp)
]


def numbered(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Every element of the model is a number of its own, from 1 on (vLLM fills padding with 0)."""
    found, first = {}, 1
    for name, size in shape.tensors().items():
        count = torch.Size(size).numel()
        found[name] = torch.arange(first, first + count, dtype=torch.float32).view(size)
        first += count
    return found


def layers(shape: ModelShape) -> dict[str, Any]:
    """vLLM's layers by the last part of the module that they are loaded from."""
    sizes = {"hidden_size": shape.hidden, "head_size": shape.head_dim}
    qkv = linear.QKVParallelLinear(
        **sizes, total_num_heads=shape.heads, total_num_kv_heads=shape.kv_heads, bias=shape.qkv_bias
    )
    gate_up = linear.MergedColumnParallelLinear(shape.hidden, [shape.ffn] * 2, bias=False)
    return {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), qkv),
        **dict.fromkeys(("gate_proj", "up_proj"), gate_up),
        "o_proj": linear.RowParallelLinear(shape.heads * shape.head_dim, shape.hidden, bias=False),
        "down_proj": linear.RowParallelLinear(shape.ffn, shape.hidden, bias=False),
        "embed_tokens": vocab_parallel_embedding.VocabParallelEmbedding(shape.vocab, shape.hidden),
        "lm_head": vocab_parallel_embedding.ParallelLMHead(shape.vocab, shape.hidden),
    }


SHARDS = {"q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "gate_proj": (0,), "up_proj": (1,)}


@pytest.mark.parametrize(("name", "tp", "worker"), CASES)
def test_workers_read_what_vllms_loaders_take(
    monkeypatch: pytest.MonkeyPatch, name: str, tp: int, worker: int
):
    shape = SHAPES[name]
    for module in (linear, vocab_parallel_embedding, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: worker)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: tp)
    tensors = numbered(shape)
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        built = layers(shape)
        taken = {}
        for tensor, values in tensors.items():
            module, kind = tensor.split(".")[-2:]
            if module in built:
                param = getattr(built[module], kind)
                param.zero_()
                param.weight_loader(param, values, *SHARDS.get(module, ()))
                taken[tensor] = sorted(param[param != 0].tolist())
    planned: dict[str, list[float]] = {tensor: [] for tensor in tensors}
    for region in engine_reads(shape, tp, worker):
        planned[region.tensor] += tensors[region.tensor][region.index].flatten().tolist()
    assert {tensor: sorted(planned[tensor]) for tensor in taken} == taken
    assert all(
        planned[tensor] == tensors[tensor].tolist() for tensor in tensors.keys() - taken.keys()
    )  # norms
