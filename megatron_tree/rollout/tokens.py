"""The owner of the tokenizer: text to ids, ids to text, chat to prompt ids. Local files only.

Not here: what the text means (`agent`) and how ids are joined to contexts (`grow`). Ids that were sampled are
the truth; text is derived from them for parsing and is never encoded again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from jinja2.exceptions import TemplateError

from megatron_tree.types import IntArray


class Codec(Protocol):
    """What growth needs of a tokenizer."""

    def encode(self, text: str) -> IntArray: ...

    def decode(self, ids: IntArray) -> str: ...


class Tokens:
    """A Hugging Face tokenizer folder. Raises ValueError where the folder holds none or it has no
    end-of-sequence token."""

    def __init__(self, model_path: str | Path) -> None:
        from transformers import AutoTokenizer

        if not Path(model_path).is_dir():
            raise ValueError(f"model.path: must be a folder with a tokenizer, got {model_path}")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"model.path: cannot load a tokenizer from {model_path}: {reason}") from error
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"model.path: the tokenizer must have an eos_token, got none in {model_path}")
        self.eos_id: int = self.tokenizer.eos_token_id
        self._end_ids = frozenset({self.eos_id, *_generation_ends(Path(model_path))})

    def encode(self, text: str) -> IntArray:
        """Ids of `text` alone: nothing is added. Control tokens spelled in the text become control tokens,
        because environments and demonstrations may speak the chat format; tools must not pass them through
        (see `agent`)."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode(self, ids: IntArray) -> str:
        """The text of `ids`. Special tokens are kept, for a vocabulary may hold the protocol's own tags as
        such; only end-of-sequence tokens at the very end are dropped: they end an action and say nothing."""
        listed = [int(i) for i in ids]
        while listed and listed[-1] in self._end_ids:
            listed.pop()
        text = self.tokenizer.decode(listed, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def chat(self, messages: Sequence[dict[str, str]]) -> IntArray:
        """Prompt ids of a chat, up to where the assistant speaks. Without a chat template the contents are
        joined as they are, after the tokenizer's beginning-of-sequence token if it puts one. Raises
        ValueError where the template does."""
        if self.tokenizer.chat_template is None:
            return np.concatenate([self._begin, self.encode("".join(m["content"] for m in messages))])
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        assert isinstance(text, str)
        return self.encode(text)

    @cached_property
    def _begin(self) -> IntArray:
        bos = self.tokenizer.bos_token_id
        added = self.tokenizer.encode("")
        return np.asarray([bos] if bos is not None and added[:1] == [bos] else [], dtype=np.int32)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides which ids a text gets: vocabulary, merges, normalisers, chat
        template."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = json.loads(backend.to_str()) if backend is not None else self.tokenizer.get_vocab()
        for changed_by_use in ("truncation", "padding"):
            rules.pop(changed_by_use, None)
        template = self.tokenizer.chat_template
        text = json.dumps([rules, template, sorted(self._end_ids)], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _generation_ends(model_path: Path) -> list[int]:
    """The engine also stops at the ids that the model's generation_config.json lists."""
    file = model_path / "generation_config.json"
    if not file.exists():
        return []
    try:
        ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file}: must be a JSON object: {error}") from error
    return [ends] if isinstance(ends, int) else list(ends or [])
