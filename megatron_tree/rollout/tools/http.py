"""Client of a Search-R1 retrieval server: `POST url {"queries", "topk", "return_scores"}`.

Queries that wait at the same moment travel in one call (see `batching`), which asks for the largest of their
`topk`. A call has a time-out, and bounded retries with exponential back-off and jitter for what may pass: no
connection, time-outs, status 429 and 5xx.

Answers it takes, per query: hits with or without scores (`{"document": {…}, "score"}` or the bare document),
null, or one string (web servers). A document has `contents` (`"Title"\\ntext`) or `title` and `text`.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from megatron_tree.rollout.tools.batching import Batcher
from megatron_tree.rollout.tools.search import Hit

Hits = tuple[Hit, ...]
Key = tuple[str, int]  # query, topk


class SearchError(RuntimeError):
    """The server cannot be reached or answers nonsense; one line naming its address."""


class HttpSearch:
    def __init__(
        self,
        url: str,
        timeout_s: float = 10.0,  # of one call as a whole
        retries: int = 4,  # after the first try
        backoff_s: float = 0.5,  # before the first retry; doubles, with jitter of a half to one and a half
        max_backoff_s: float = 16.0,
        max_batch: int = 128,  # queries of one call
        max_calls: int = 16,  # at once
        cache_size: int = 65536,  # queries
        seed: int = 0,  # of the jitter
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"search.url: must start with http:// or https://, got {url!r}")
        for name, value, least in (
            ("retries", retries, 0),
            ("max_batch", max_batch, 1),
            ("max_calls", max_calls, 1),
            ("cache_size", cache_size, 0),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"search.{name}: must be an integer of at least {least}, got {value!r}")
        for name, seconds in (
            ("timeout_s", timeout_s),
            ("backoff_s", backoff_s),
            ("max_backoff_s", max_backoff_s),
        ):
            if not seconds > 0:
                raise ValueError(f"search.{name}: must be above 0, got {seconds!r}")
        self.url = url
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._jitter = random.Random(seed)
        self._batcher: Batcher[Key, Hits] = Batcher(
            self._call, max_batch=max_batch, max_calls=max_calls, cache_size=cache_size
        )
        self._client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def find(self, query: str, topk: int) -> Hits:
        """Raises SearchError once the retries are used up."""
        return await self._batcher((query, topk))

    async def _call(self, keys: list[Key]) -> list[Hits]:
        most = max(topk for _, topk in keys)
        try:
            answer = await self._post([query for query, _ in keys], most)
            results = parse_results(answer, len(keys), most)
        except ValueError as error:
            raise SearchError(f"search server {self.url}: {error}") from error
        return [hits[:topk] for hits, (_, topk) in zip(results, keys, strict=True)]

    async def _post(self, queries: list[str], topk: int) -> object:
        """The answer's JSON, after retries. Raises SearchError, and ValueError where it is no JSON."""
        client = self._client_here()
        body = {"queries": queries, "topk": topk, "return_scores": True}
        for attempt in range(self._retries + 1):
            if attempt:
                wait_s = min(self._backoff_s * 2 ** (attempt - 1), self._max_backoff_s)
                await asyncio.sleep(wait_s * (0.5 + self._jitter.random()))
            try:
                async with asyncio.timeout(self._timeout_s):  # httpx limits each read, not the whole
                    response = await client.post(self.url, json=body)
            except (httpx.TransportError, TimeoutError) as error:
                failure = f"{type(error).__name__} {error}".strip()
                continue
            if response.status_code == 200:
                return response.json()
            failure = f"status {response.status_code}"
            if response.status_code != 429 and response.status_code < 500:
                break
        raise SearchError(
            f"search server {self.url}: {failure} after {attempt + 1} tries of {self._timeout_s:g} s"
        )

    def _client_here(self) -> httpx.AsyncClient:
        """A client belongs to one event loop: a run may use several, one after the other."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            self._client = loop, httpx.AsyncClient(timeout=self._timeout_s)
        return self._client[1]

    async def check(self) -> None:
        try:
            await self.find("test", 1)
        except SearchError as error:
            raise ValueError(f"search.url: must be a Search-R1 server that answers: {error}") from error

    async def close(self) -> None:
        await self._batcher.close()
        if self._client is not None and self._client[0] is asyncio.get_running_loop():
            await self._client[1].aclose()
        self._client = None


def parse_results(answer: object, num_queries: int, topk: int) -> list[Hits]:
    """Hits per query. Raises ValueError naming what is wrong."""
    results = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != num_queries:
        got = f"{len(results)} results" if isinstance(results, list) else repr(answer)[:80]
        raise ValueError(f"result: must be a list of {num_queries}, one per query, got {got}")
    return [_hits(found)[:topk] for found in results]


def _hits(found: object) -> Hits:
    if found is None:
        return ()
    if isinstance(found, str):
        return (Hit("", found.strip()),)
    if not isinstance(found, list):
        raise ValueError(f"result: each must be a list, a string or null, got {repr(found)[:80]}")
    return tuple(_hit(item) for item in found)


def _hit(item: Any) -> Hit:
    if isinstance(item, str):
        return Hit("", item.strip())
    score = item.get("score") if isinstance(item, dict) else None
    document = item.get("document", item) if isinstance(item, dict) else None
    if isinstance(document, str):
        return Hit("", document.strip(), score=score)
    if isinstance(document, dict) and isinstance(document.get("contents"), str):
        title, _, text = document["contents"].partition("\n")
        return Hit(title.strip().strip('"'), text.strip(), str(document.get("id", "")), score)
    if isinstance(document, dict) and isinstance(document.get("text"), str):
        title = document.get("title")
        return Hit(str(title or ""), document["text"].strip(), str(document.get("id", "")), score)
    raise ValueError(f"result: a hit must be a document with contents or text, got {repr(item)[:80]}")
