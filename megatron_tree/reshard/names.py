"""One table per model family: Megatron-Core parameter <-> Hugging Face tensors, and the shape a folder
declares.

The tables are read both ways: loading, exporting and publishing all go through `plan`, which reads them. Not
here: which rank holds what (`plan`), bytes (`image`). Families: Llama 2 and 3.x (SmolLM2 is one), Mistral,
Qwen2 and 2.5, dense Qwen3; tied and untied.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_tree.layout import ParallelLayout

Rule = Literal["replicated", "rows", "columns", "qkv", "gate_up", "vocab"]
"""How a parameter is cut over tensor-parallel ranks and made of its Hugging Face tensors: `replicated` whole
on every rank; `rows`, `columns` equal parts of one tensor; `qkv` query, key and value rows interleaved by KV
group, then equal row parts; `gate_up` equal row parts of gate, then of up; `vocab` row parts of the padded
vocabulary."""

Place = Literal["first", "layer", "last"]


@dataclass(frozen=True, slots=True)
class Name:
    param: str  # Megatron-Core name; layers as `{layer}` (the stage's own number)
    tensors: tuple[str, ...]  # Hugging Face names; layers as `{layer}` (the model's number)
    rule: Rule
    place: Place = "layer"


_L, _H = "decoder.layers.{layer}.", "model.layers.{layer}."

EMBEDDING = Name("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", "first")
TIED_HEAD = Name("output_layer.weight", ("model.embed_tokens.weight",), "vocab", "last")
HEAD = Name("output_layer.weight", ("lm_head.weight",), "vocab", "last")

_LLAMA = (
    Name(_L + "input_layernorm.weight", (_H + "input_layernorm.weight",), "replicated"),
    Name(
        _L + "self_attention.linear_qkv.weight",
        (_H + "self_attn.q_proj.weight", _H + "self_attn.k_proj.weight", _H + "self_attn.v_proj.weight"),
        "qkv",
    ),
    Name(_L + "self_attention.linear_proj.weight", (_H + "self_attn.o_proj.weight",), "columns"),
    Name(_L + "pre_mlp_layernorm.weight", (_H + "post_attention_layernorm.weight",), "replicated"),
    Name(_L + "mlp.linear_fc1.weight", (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight"), "gate_up"),
    Name(_L + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",), "columns"),
    Name("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated", "last"),
)
_QWEN2 = (
    *_LLAMA[:2],
    Name(
        _L + "self_attention.linear_qkv.bias",
        (_H + "self_attn.q_proj.bias", _H + "self_attn.k_proj.bias", _H + "self_attn.v_proj.bias"),
        "qkv",
    ),
    *_LLAMA[2:],
)
_QWEN3 = (
    *_LLAMA[:2],
    Name(_L + "self_attention.q_layernorm.weight", (_H + "self_attn.q_norm.weight",), "replicated"),
    Name(_L + "self_attention.k_layernorm.weight", (_H + "self_attn.k_norm.weight",), "replicated"),
    *_LLAMA[2:],
)
FAMILIES: dict[str, tuple[Name, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
}
"""What transformers takes for fields that a `config.json` lacks, where families differ."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies, or `linear` division of all positions."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the plan and the model need of a Hugging Face `config.json`."""

    family: str
    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    rope_scaling: RopeScaling | None = None

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normed per head."""
        return self.family == "qwen3"

    @property
    def names(self) -> tuple[Name, ...]:
        return (EMBEDDING, *FAMILIES[self.family], TIED_HEAD if self.tied else HEAD)

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks: the next multiple of tp, no more."""
        return -(-self.vocab // tp) * tp

    def tensor_shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of a Hugging Face tensor by its name's last parts."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        module, kind = tensor.split(".")[-2:]
        if module in ("q_norm", "k_norm"):
            return (self.head_dim,)
        rows, columns = {
            "embed_tokens": (self.vocab, self.hidden),
            "lm_head": (self.vocab, self.hidden),
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.ffn, self.hidden),
            "up_proj": (self.ffn, self.hidden),
            "down_proj": (self.hidden, self.ffn),
        }.get(module, (self.hidden, 0))
        return (rows, columns) if columns and kind == "weight" else (rows,)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor and its shape, in layer order: embedding, layers, final norm, head."""
        first, layer, last = (
            [t for name in self.names if name.place == place for t in name.tensors]
            for place in ("first", "layer", "last")
        )
        listed = [*first, *(t.format(layer=i) for i in range(self.num_layers) for t in layer), *last]
        return {tensor: self.tensor_shape(tensor) for tensor in listed}


def read_shape(folder: str | Path) -> ModelShape:
    """Reads `config.json` of a Hugging Face folder. ValueError on anything the trainer would compute
    differently."""
    path = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"model.path: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"model.path: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must be a JSON object, got {type(config).__name__}")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{path}: model_type must be one of {', '.join(sorted(FAMILIES))}, got {family!r}")
    config = _DEFAULTS[family] | config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # Mistral's window is on whenever it is given; Qwen's has a switch
    windowed = config.get("use_sliding_window", family == "mistral")
    window = windowed and config.get("sliding_window")
    for field, got, allowed in (
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(config.get("attention_bias")), False),
        ("mlp_bias", bool(config.get("mlp_bias")), False),
        ("sliding_window", window or None, None),
    ):
        if got != allowed:
            raise ValueError(f"{path}: {field} must be {allowed!r}, got {got!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"{path}: rope_type must be default, linear or llama3, got {kind!r}")
    try:
        heads = int(config["num_attention_heads"])
        return ModelShape(
            family=family,
            num_layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            ffn=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            max_positions=int(config["max_position_embeddings"]),
            rope_scaling=_rope_scaling(kind, rope),
        )
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: a size is not a number: {error}") from error


def _rope_scaling(kind: str, rope: dict[str, Any]) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    return RopeScaling(
        "llama3",
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def check_model(shape: ModelShape, layout: ParallelLayout) -> None:
    """The rules that tie a model to a layout. ValueError names the field, the rule and the values."""
    qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    for field, count in (("heads", shape.heads), ("ffn rows", shape.ffn), ("fused qkv rows", qkv_rows)):
        if count % layout.tp:
            raise ValueError(f"train.parallel.tp: must divide the model's {count} {field}, got {layout.tp}")
    if shape.kv_heads % layout.tp and layout.tp % shape.kv_heads:
        raise ValueError(
            f"train.parallel.tp: must divide the model's {shape.kv_heads} KV heads or be a multiple of them, "
            f"got {layout.tp}"
        )
    chunks = layout.pp * layout.vpp
    if layout.stage_split is not None:
        layout.split(shape.num_layers)
    elif shape.num_layers % chunks:
        raise ValueError(
            f"train.parallel.pp: must divide the model's {shape.num_layers} layers, got {chunks}"
        )
