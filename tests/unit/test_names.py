"""The name tables against transformers' own models, and what of a `config.json` is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard.names import RopeScaling, check_model, read_shape
from tests.tiny_models import make_model
from tests.unit.shapes import small_shape

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "vocab_size": 10,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {  # of Llama 3.1
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_tensors_are_those_that_transformers_saves(tmp_path: Path, family: str, tied: bool):
    own = {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 4}}.get(family, {})
    make_model(tmp_path, family=family, tied=tied, num_layers=2, hidden_size=16, ffn_size=24, **own)
    shape = read_shape(tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert shape.tensors() == saved
    assert (shape.family, shape.tied, shape.num_layers, shape.hidden) == (family, tied, 2, 16)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.ffn) == (4, 2, 4, 24)


def test_tensors_come_in_layer_order():
    """Engines load them in this order and finish a layer at a time."""
    names = list(small_shape(tied=False).tensors())
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert len(layers) == 2 * 9  # q k v o, gate up down, two norms


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, {"kv_heads": 4, "head_dim": 2, "rope_theta": 10000.0, "tied": False}),
        (
            {"num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": True},
            {"kv_heads": 2, "head_dim": 6, "tied": True},
        ),
        ({"rope_theta": 1e6}, {"rope_theta": 1e6}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"model_type": "mistral", "sliding_window": None}, {"family": "mistral"}),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32}, {"qkv_bias": True}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": RopeScaling("linear", 2.0)}),
        (
            {"rope_parameters": LLAMA3_ROPE},
            {"rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)},
        ),
        ({"head_dim": None, "num_key_value_heads": None}, {"head_dim": 2, "kv_heads": 4}),
    ],
)
def test_fields_of_older_and_newer_configs(tmp_path: Path, changes: dict[str, Any], read: dict[str, Any]):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    shape = read_shape(tmp_path)
    assert {name: getattr(shape, name) for name in read} == read


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_fields_that_are_absent_are_what_transformers_takes(tmp_path: Path, family: str):
    config = CONFIG | {"model_type": family, "hidden_size": 256, "num_attention_heads": 64}
    window = {"sliding_window": None} if family == "mistral" else {}
    (tmp_path / "config.json").write_text(json.dumps(config | window))
    shape, theirs = read_shape(tmp_path), AutoConfig.from_pretrained(tmp_path)
    # a Qwen2 config has no such field; its attention takes the quotient
    assert shape.head_dim == getattr(theirs, "head_dim", 256 // 64)
    assert shape.kv_heads == theirs.num_key_value_heads
    assert shape.tied == theirs.tie_word_embeddings
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type must be one of llama, mistral, qwen2, qwen3, got 'gemma2'"),
        ({"model_type": None}, "model_type must be one of llama, mistral, qwen2, qwen3, got None"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 8}},
            "rope_type must be default, linear or llama3, got 'yarn'",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        # transformers fills a window that is not given; Mistral needs no switch
        ({"use_sliding_window": True, "sliding_window": 32}, "sliding_window must be None, got 32"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding_window must be None, got 4096"),
        ({"model_type": "mistral"}, "sliding_window must be None, got 4096"),
        ({"hidden_size": None}, "a size is not a number: int() argument must be"),
        ({"vocab_size": "many"}, "a size is not a number: invalid literal for int()"),
    ],
)
def test_refused_configs(tmp_path: Path, changes: dict[str, Any], message: str):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ValueError, match=r"config\.json") as refusal:
        read_shape(tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path / 'config.json'}: {message}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "intermediate_size", "rms_norm_eps", "max_position_embeddings"]
)
def test_missing_field(tmp_path: Path, field: str):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != field}))
    with pytest.raises(ValueError, match=rf"config\.json: {field} is missing$"):
        read_shape(tmp_path)


def test_no_config_and_no_json(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"^model\.path: cannot read .*config\.json: No such file or directory$"
    ):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^model\.path: .*config\.json is not JSON: "):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: must be a JSON object, got list$"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({"heads": 9, "kv_heads": 3}, {"tp": 2}, "train.parallel.tp: must divide the model's 9 heads, got 2"),
        ({"ffn": 9}, {"tp": 2}, "train.parallel.tp: must divide the model's 9 ffn rows, got 2"),
        (
            {"heads": 12, "kv_heads": 3, "ffn": 12},
            {"tp": 2},
            "train.parallel.tp: must divide the model's 3 KV heads or be a multiple of them, got 2",
        ),
        # one KV group of 8 queries, their key and value: 10 heads of 2 are 20 rows, which 8 ranks cannot
        # share
        (
            {"heads": 8, "kv_heads": 1},
            {"tp": 8},
            "train.parallel.tp: must divide the model's 20 fused qkv rows, got 8",
        ),
        ({"num_layers": 6}, {"pp": 4}, "train.parallel.pp: must divide the model's 6 layers, got 4"),
        (
            {"num_layers": 6},
            {"pp": 2, "vpp": 2},
            "train.parallel.pp: must divide the model's 6 layers, got 4",
        ),
    ],
)
def test_models_that_a_layout_does_not_fit(changes: dict[str, int], layout: dict[str, int], message: str):
    with pytest.raises(ValueError, match=r"^train\.parallel") as refusal:
        check_model(small_shape(**changes), ParallelLayout(**layout))
    assert str(refusal.value) == message


def test_smollm2_fits_tp_3():
    """9 heads, 3 KV heads, 30 layers (FACTS section 7)."""
    shape = small_shape(heads=9, kv_heads=3, head_dim=64, hidden=576, ffn=1536, num_layers=30, vocab=49152)
    check_model(shape, ParallelLayout(tp=3, pp=2))
    assert sum(torch.Size(size).numel() for size in shape.tensors().values()) == 134_515_008


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(10, 1, 10), (10, 2, 10), (10, 3, 12), (10, 4, 12), (1, 8, 8)]
)
def test_padded_vocabulary(vocab: int, tp: int, padded: int):
    assert small_shape(vocab=vocab).padded_vocab(tp) == padded
