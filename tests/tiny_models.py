"""Tiny random Hugging Face models, made on the spot: the real config, weights and tokenizer of a family.

TP 1 and 2 divide the shapes (4 heads, 2 KV heads). Weights are drawn wide enough that greedy tokens and
log-probs differ between seeds; norms and biases are random too, so that a lost or swapped one shows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
SPECIAL = ("<|endoftext|>", "<s>", "</s>")  # padding, begin, end; Qwen2's tokenizer adds the first if missing


def make_tokenizer(vocab_size: int = 128) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline; the words `w0 w1 ...` fill the vocabulary.

    Byte-level BPE without merges, because transformers reads the vocabulary of a `qwen2` folder into
    Qwen2's own byte-level tokenizer, whatever was saved. The words are never encoded, only decoded.
    """
    space, newline = "\u0120", "\u010a"  # their names in the byte-level alphabet
    names = [*SPECIAL, space, newline, *(chr(i) for i in range(33, 127))]
    names += [f"w{i}" for i in range(vocab_size - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    folder: Path,
    *,
    family: str = "qwen2",
    tied: bool = True,
    seed: int = 0,
    num_layers: int = 4,
    hidden_size: int = 128,
    ffn_size: int = 192,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 128,
    max_positions: int = 512,
    dtype: torch.dtype = torch.float32,
    spread: float = 1.5,
    **overrides: object,
) -> PreTrainedModel:
    """Writes config, safetensors and tokenizer to `folder`; returns the transformers model. `overrides` are
    fields of the family's transformers config."""
    make = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}[
        family
    ]
    config = make(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=ffn_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=SPECIAL.index("<s>"),
        eos_token_id=SPECIAL.index("</s>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        **overrides,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    randomise(model, seed, spread)
    model.eval()
    model.save_pretrained(folder)
    make_tokenizer(vocab_size).save_pretrained(folder)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int, spread: float = 1.5) -> None:
    """Draws every parameter anew. Matrices get a spread of `spread`/sqrt(fan-in), embeddings
    0.4 (tied to the head, they make logits of a spread near 3), norms 1 ± 0.2, biases ± 0.2."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            value = draw * (0.4 if "embed_tokens" in name else spread / parameter.shape[1] ** 0.5)
        else:
            value = 0.2 * draw + (1.0 if "norm" in name else 0.0)
        parameter.copy_(value.to(parameter.dtype))
