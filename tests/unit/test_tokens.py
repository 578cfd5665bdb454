"""The tokenizer's owner, on real tokenizers made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_tree.rollout.tokens import Tokens

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


def make(folder: Path, template: str | None = TEMPLATE, bos: bool = False, extra: str = "") -> Path:
    """A byte-level vocabulary without merges: one token per byte, and the specials <s>, </s>, <search>."""
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<search>", *([extra] if extra else [])]
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in specials])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return folder


def test_encode_and_decode(tmp_path: Path) -> None:
    tokens = Tokens(make(tmp_path, bos=True))
    assert tokens.eos_id == 257
    text = "  a  b ,c\n<search>Ü</s>"
    ids = tokens.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist()[-1] == 257
    assert 258 in ids.tolist()
    assert 256 not in ids.tolist()  # no beginning of sequence: nothing is added
    assert len(ids) == len("  a  b ,c\n") + 1 + 2 + 1  # <search> is one token, Ü two bytes, </s> one
    assert tokens.decode(ids) == "  a  b ,c\n<search>Ü"  # tags kept, spaces as they were, the end dropped
    assert tokens.decode(np.array([257, *tokens.encode("x"), 257, 257], np.int32)) == "</s>x"
    assert len(tokens.encode("")) == 0
    assert tokens.decode(np.empty(0, np.int32)) == ""


def test_generation_config_names_more_ends(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    tokens = Tokens(tmp_path)
    assert tokens.decode(tokens.encode("a<search>b<search>")) == "a<search>b"


def test_chat(tmp_path: Path) -> None:
    tokens = Tokens(make(tmp_path))
    ids = tokens.chat([{"role": "user", "content": "hi"}])
    assert ids.tolist() == [256, *tokens.encode("user:hi"), 257, 256]
    with pytest.raises(ValueError, match=r"^the chat template refuses the messages: no tools$"):
        tokens.chat([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("bos", [False, True])
def test_chat_without_a_template_joins_the_contents(tmp_path: Path, bos: bool) -> None:
    tokens = Tokens(make(tmp_path, template=None, bos=bos))
    ids = tokens.chat([{"role": "system", "content": "be "}, {"role": "user", "content": "good"}])
    assert ids.tolist() == [256] * bos + tokens.encode("be good").tolist()


def test_fingerprint_tells_tokenizers_apart(tmp_path: Path) -> None:
    def made(name: str, **options) -> str:
        return Tokens(make(tmp_path / name, **options)).fingerprint

    same = {made("a"), made("b")}
    assert len(same) == 1
    others = {
        made("c", template=None),
        made("d", bos=True),
        made("e", extra="<x>"),
        made("f", template=TEMPLATE + " "),
    }
    assert len(others | same) == 5


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model\.path: must be a folder with a tokenizer, got /nowhere$"):
        Tokens("/nowhere")
    with pytest.raises(ValueError, match=r"^model\.path: cannot load a tokenizer from "):
        Tokens(tmp_path)
    make(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"^model\.path: the tokenizer must have an eos_token, got none"):
        Tokens(tmp_path)
