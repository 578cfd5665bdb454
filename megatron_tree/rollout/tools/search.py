"""What a search is, and one that runs in this process: BM25 over a folder built by `build_index` (tantivy).

Title and text are separate fields, stemmed for English, without a boost for the title. Queries are words:
punctuation and operators mean nothing. Queries that wait at the same moment are answered together, in a
thread of their own: tantivy lets the event loop run meanwhile. `http` holds the client of a search server.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tantivy

from megatron_tree.rollout.tools.batching import Batcher

_FIELDS = ("title", "text")
_WRITER_BYTES = 64 << 20
_MAX_BATCH = 32  # queries, of a millisecond each: the first should not wait long for the last


@dataclass(frozen=True, slots=True)
class Hit:
    title: str
    text: str
    id: str = ""
    score: float | None = None


class Search(Protocol):
    async def find(self, query: str, topk: int) -> tuple[Hit, ...]:
        """At most `topk` hits, best first."""
        ...

    async def check(self) -> None:
        """Raises ValueError when it cannot be used."""
        ...

    async def close(self) -> None: ...


def build_index(passages: str | Path, folder: str | Path) -> int:
    """Indexes a JSONL file of {id, title, text} into a new folder; returns how many. Raises ValueError naming
    the line.

    The folder appears only when it is complete.
    """
    target = Path(folder)
    if target.exists():
        raise ValueError(f"{target}: must not exist yet, got a folder or file")
    making = target.with_name(target.name + ".making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    index = tantivy.Index(_schema(), path=str(making))
    writer = index.writer(heap_size=_WRITER_BYTES, num_threads=1)  # one thread: ties keep the file's order
    num = 0
    with Path(passages).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                writer.add_document(tantivy.Document(**_passage(raw, f"{passages}:{number}")))
                num += 1
    if num == 0:
        raise ValueError(f"{passages}: must hold at least one passage, got none")
    writer.commit()
    writer.wait_merging_threads()
    making.rename(target)
    return num


def _passage(raw: bytes, where: str) -> dict[str, str]:
    try:
        passage = json.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{where}: passage: must be a JSON object in UTF-8: {error}") from error
    for field in ("id", *_FIELDS):
        value = passage.get(field) if isinstance(passage, dict) else None
        if not isinstance(value, str):
            raise ValueError(f"{where}: {field}: must be a string, got {value!r}")
    return {field: passage[field] for field in ("id", *_FIELDS)}


def _schema() -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw")
    for field in _FIELDS:
        builder.add_text_field(field, stored=True, tokenizer_name="en_stem")
    return builder.build()


class EmbeddedSearch:
    """Searches the folder `index`. Results of the latest `cache_size` queries are kept."""

    def __init__(self, index: str, cache_size: int = 4096) -> None:
        if not tantivy.Index.exists(index) if Path(index).is_dir() else True:
            raise ValueError(f"search.index: must be a folder made by build_index, got {index}")
        self._index = tantivy.Index.open(index)
        self._searcher = self._index.searcher()
        if self._searcher.num_docs == 0:
            raise ValueError(f"search.index: must hold at least one passage, got none in {index}")
        self._batcher: Batcher[tuple[str, int], tuple[Hit, ...]] = Batcher(
            self._call, max_batch=_MAX_BATCH, max_calls=1, cache_size=cache_size
        )

    async def find(self, query: str, topk: int) -> tuple[Hit, ...]:
        return await self._batcher((query, topk))

    async def _call(self, keys: list[tuple[str, int]]) -> list[tuple[Hit, ...]]:
        return await asyncio.to_thread(lambda: [self._find(*key) for key in keys])

    def _find(self, query: str, topk: int) -> tuple[Hit, ...]:
        words = re.sub(r"[\W_]+", " ", query).lower().strip()  # lower case: AND, OR, NOT, IN are operators
        if not words:
            return ()
        parsed = self._index.parse_query(words, list(_FIELDS))
        hits = []
        for score, address in self._searcher.search(parsed, limit=topk).hits:
            document = self._searcher.doc(address)
            hits.append(Hit(document["title"][0], document["text"][0], document["id"][0], score))
        return tuple(hits)

    async def check(self) -> None:
        """Opening it was the check."""

    async def close(self) -> None:
        await self._batcher.close()
