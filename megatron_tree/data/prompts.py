"""Prompts: rows of parquet and JSONL files, and a seeded order over them that can be saved and resumed.

Schemas (see `parse_row`): Search-R1's, verl's variant of it, and plain JSONL. Tokenisation is passed in.

Invariants
- Group ids are unique over all files of a run, whatever the rows say of themselves (the authors number rows
  within one data source, so that merged sources collide).
- The order is a function of (seed, epoch) alone; `take` goes on over epochs and never returns one group id
  twice.
- A malformed row is an error that names file and line (parquet: row, from 1), field, rule and value; nothing
  is dropped but prompts that are too long, and these are counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_tree.types import IntArray, Row

Messages = tuple[dict[str, str], ...]
EncodeChat = Callable[[Messages], IntArray]

ROLES = ("system", "user", "assistant", "tool")
TARGET_FIELDS = ("reward_model", "targets", "golden_answers", "answers", "answer")


@dataclass(frozen=True, slots=True)
class PromptSet:
    rows: list[Row]
    num_skipped: int  # prompts longer than the limit


def load_prompts(
    paths: Sequence[str],
    *,
    split: str,
    encode_chat: EncodeChat,
    max_prompt_tokens: int,
    overlong: Literal["skip", "refuse"],
) -> PromptSet:
    """Reads all files in their order. A group id is `split/file index/file name:line`. Raises ValueError."""
    rows: list[Row] = []
    num_skipped = 0
    for index, path in enumerate(paths):
        for line, where, raw in read_records(Path(path)):
            row = parse_row(
                raw,
                where,
                group_id=f"{split}/{index}/{Path(path).name}:{line}",
                default_source=Path(path).stem,
            )
            ids = encode_prompt(row.messages, where, encode_chat)
            if len(ids) <= max_prompt_tokens:
                rows.append(replace(row, prompt_ids=ids))
            elif overlong == "skip":
                num_skipped += 1
            else:
                raise ValueError(
                    f"{where}: prompt: must have at most {max_prompt_tokens} tokens, got {len(ids)}"
                )
    if not rows:
        raise ValueError(
            f"data.{split}: must hold at least one prompt of at most {max_prompt_tokens} tokens, "
            f"got {num_skipped} longer ones in {list(paths)}"
        )
    return PromptSet(rows, num_skipped)


def read_records(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number from 1, "file:line N" for messages, record) of every record of a file; an empty file is
    refused."""
    if not path.is_file():
        raise ValueError(f"{path}: must be a .jsonl or .parquet file, got none")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path}: must end with .jsonl or .parquet, got {path.suffix!r}")
    empty = True
    for record in readers[path.suffix](path):
        empty = False
        yield record
    if empty:
        raise ValueError(f"{path}: must hold at least one row, got an empty file")


def _read_jsonl(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(raw.decode("utf-8"))
            except ValueError as error:
                raise ValueError(f"{where}: row: must be a JSON object in UTF-8: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: row: must be a JSON object, got {short(record)}")
            yield number, where, record


def _read_parquet(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield number, f"{path}: row {number}", record
    except pa.ArrowException as error:
        raise ValueError(f"{path}: must be a parquet file: {error}") from error


def parse_row(raw: dict[str, Any], where: str, *, group_id: str, default_source: str) -> Row:
    """One row, without its prompt ids.

    - `prompt`: [{role, content}], or a string that one user says.
    - answers: `reward_model.ground_truth` (a string or {target: string or strings}), or `targets`,
      `golden_answers`, `answers`, `answer` (a string or strings). `targets: []` says that the row has none.
    - `data_source`: a string; verl's prefix `searchR1_` is taken off. Missing: the file's name without its
      suffix.
    - everything else goes to `extra`.
    """
    if "prompt" not in raw:
        raise ValueError(f"{where}: prompt: missing, got the fields {sorted(raw)}")
    source = raw.get("data_source")
    if source is None:
        source = default_source
    if not isinstance(source, str) or not source:
        raise ValueError(f"{where}: data_source: must be a non-empty string, got {short(source)}")
    target_field, targets = _targets(raw, where)
    return Row(
        group_id=group_id,
        data_source=source.removeprefix("searchR1_"),
        messages=parse_messages(raw["prompt"], where),
        prompt_ids=np.empty(0, dtype=np.int32),
        targets=targets,
        extra={
            key: value for key, value in raw.items() if key not in ("prompt", "data_source", target_field)
        },
    )


def parse_messages(value: object, where: str) -> Messages:
    """A chat as {role, content} messages. Columns that are null are ignored (parquet has them in every
    row)."""
    if isinstance(value, str) and value:
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where}: prompt: must be a text or a list of {{role, content}}, got {short(value)}"
        )
    messages = []
    for index, message in enumerate(value):
        field = f"{where}: prompt[{index}]"
        if not isinstance(message, dict):
            raise ValueError(f"{field}: must be {{role, content}}, got {short(message)}")
        unknown = sorted(k for k, v in message.items() if k not in ("role", "content") and v is not None)
        if unknown:
            raise ValueError(f"{field}: must have role and content only, got also {unknown}")
        if message.get("role") not in ROLES:
            raise ValueError(
                f"{field}.role: must be one of {', '.join(ROLES)}, got {short(message.get('role'))}"
            )
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{field}.content: must be a string, got {short(message.get('content'))}")
        messages.append({"role": message["role"], "content": message["content"]})
    return tuple(messages)


def _targets(raw: dict[str, Any], where: str) -> tuple[str, tuple[str, ...]]:
    """The field that holds the golden answers, and the answers."""
    found = next((name for name in TARGET_FIELDS if raw.get(name) is not None), None)
    if found is None:
        raise ValueError(
            f"{where}: answers: one of {', '.join(TARGET_FIELDS)} must be there, got {sorted(raw)}"
        )
    value, field = raw[found], found
    if found == "reward_model":
        field = "reward_model.ground_truth"
        value = value.get("ground_truth") if isinstance(value, dict) else None
        if isinstance(value, dict):
            field, value = f"{field}.target", value.get("target")
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ValueError(
            f"{where}: {field}: must be a non-empty string or a list of them, got {short(value)}"
        )
    if not answers and found != "targets":
        raise ValueError(f"{where}: {field}: must hold at least one answer, got an empty list")
    return found, tuple(answers)


def encode_prompt(messages: Messages, where: str, encode_chat: EncodeChat) -> IntArray:
    try:
        ids = encode_chat(messages)
    except ValueError as error:
        raise ValueError(f"{where}: prompt: {error}") from error
    if len(ids) == 0:
        raise ValueError(f"{where}: prompt: must have at least one token, got none")
    return ids


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class PromptOrder:
    """Hands out rows epoch after epoch. The state is the position alone; the order is computed from the seed
    again.

    A row handed out in epoch e carries `@e` behind its group id: one `take` may span epochs, and two groups
    of one iteration never share an id (nor, therefore, their seeds).
    """

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0  # rows of the epoch handed out
        self._order = self._order_of(0)

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._rows)))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)).tolist()

    def take(self, num: int) -> list[Row]:
        taken: list[Row] = []
        while len(taken) < num:
            if self._position == len(self._rows):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            row = self._rows[self._order[self._position]]
            taken.append(replace(row, group_id=f"{row.group_id}@{self._epoch}"))
            self._position += 1
        return taken

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a saved position to mean the same."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(row.group_id.encode() + b"\0" + row.prompt_ids.tobytes() + b"\0")
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_rows": len(self._rows),
            "digest": digest.hexdigest(),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the position was saved over other rows or another order."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"data: to resume, {name} must be {state.get(name)!r} as it was saved, got {value!r}"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)
