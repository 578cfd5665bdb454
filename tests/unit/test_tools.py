"""Embedded search on a real tantivy index; the HTTP client against a real local server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree.rollout.tools.http import HttpSearch, SearchError, parse_results
from megatron_tree.rollout.tools.search import EmbeddedSearch, Hit, build_index

PASSAGES = [
    {"id": "a", "title": "Otto Hahn", "text": "A German chemist who discovered nuclear fission."},
    {"id": "b", "title": "Germany", "text": "A country in Europe. Its capital is Berlin."},
    {"id": "c", "title": "Marie Curie", "text": "A chemist born in Warsaw; Polish and French."},
]


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("index")
    (folder / "p.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PASSAGES) + "\n")
    assert build_index(folder / "p.jsonl", folder / "built") == 3
    return str(folder / "built")


@pytest.fixture(scope="module")
def embedded(index: str) -> EmbeddedSearch:
    return EmbeddedSearch(index)


def ids(search: EmbeddedSearch, query: str, topk: int = 3) -> list[str]:
    return [hit.id for hit in asyncio.run(search.find(query, topk))]


def test_embedded_search(embedded: EmbeddedSearch) -> None:
    search = embedded
    assert ids(search, "capital of Germany", 1) == ["b"]
    assert ids(search, "Who discovered fission?") == ["a"]
    assert ids(search, "discovering") == ["a"]  # stemmed
    assert set(ids(search, "chemists")) == {"a", "c"}
    assert ids(search, "chemists", 1) == ids(search, "chemists")[:1]
    assert ids(search, 'title:"Curie" AND NOT (x') == ["c"]  # operators are words
    assert ids(search, "zebra") == ids(search, "?!") == ids(search, "") == []
    [hit] = asyncio.run(search.find("Berlin", 3))
    assert (hit.title, hit.text) == ("Germany", "A country in Europe. Its capital is Berlin.")
    assert hit.score > 0


@settings(max_examples=100, deadline=None)
@given(query=st.text(max_size=40) | st.text('+-&|!(){}[]^"~*?:\\/ANDORTOIN ', max_size=30))
def test_no_query_is_an_error(embedded: EmbeddedSearch, query: str) -> None:
    assert len(asyncio.run(embedded.find(query, 2))) <= 2


def test_index_errors(tmp_path: Path, index: str) -> None:
    passages = tmp_path / "p.jsonl"
    passages.write_text(json.dumps(PASSAGES[0]) + "\n" + '{"id": "x", "title": 3, "text": "t"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl:2: title: must be a string, got 3$"):
        build_index(passages, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    passages.write_text("{nope\n")
    with pytest.raises(ValueError, match=r"p\.jsonl:1: passage: must be a JSON object"):
        build_index(passages, tmp_path / "new")
    passages.write_text("\n")
    with pytest.raises(ValueError, match=r"must hold at least one passage, got none"):
        build_index(passages, tmp_path / "new")
    with pytest.raises(ValueError, match="must not exist yet"):
        build_index(passages, index)
    with pytest.raises(ValueError, match=r"^search\.index: must be a folder made by build_index"):
        EmbeddedSearch(str(tmp_path))


class Server(ThreadingHTTPServer):
    """Answers every query with one document that names it; `script` holds what the next calls do instead."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[dict[str, Any]] = []
        self.script: list[str | int] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/retrieve"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append(body)
        act = self.server.script.pop(0) if self.server.script else 200
        if act == "hang":
            time.sleep(1.2)
            return
        if act == "drip":  # each byte arrives in time, the whole never does
            self.send_response(200)
            self.end_headers()
            for _ in range(24):
                self.wfile.write(b" ")
                time.sleep(0.05)
            return
        status = act if isinstance(act, int) else 200
        found = [
            [{"document": {"id": "7", "contents": f'"{q}"\nabout {q}'}, "score": 1.5}] * body["topk"]
            for q in body["queries"]
        ]
        answer = act if isinstance(act, str) else json.dumps({"result": found})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def client(server: Server, **options: Any) -> HttpSearch:
    return HttpSearch(server.url, **{"backoff_s": 0.01, **options})


def limits(trouble: list) -> dict[str, float]:
    """A short time-out only where it is what the test waits for: elsewhere a busy machine may be slow."""
    return {"timeout_s": 0.5} if {"hang", "drip"} & set(trouble) else {}


async def ask(search: HttpSearch, *keys: tuple[str, int]) -> list[tuple[Hit, ...]]:
    try:
        return await asyncio.gather(*(search.find(query, topk) for query, topk in keys))
    finally:
        await search.close()


def test_one_call_for_all_that_wait(server: Server) -> None:
    """20 queries of topk 2, of which 5 are equal to others, and 1 of topk 3: one call for the most hits."""
    keys = [(f"q{i % 15}", 2) for i in range(20)] + [("q15", 3)]
    found = asyncio.run(ask(client(server), *keys))
    assert [hits[0].title for hits in found] == [query for query, _ in keys]
    assert [len(hits) for hits in found] == [2] * 20 + [3]
    assert found[4][0] == Hit("q4", "about q4", "7", 1.5)
    [call] = server.calls
    assert (len(call["queries"]), call["topk"], call["return_scores"]) == (16, 3, True)


def test_batches_are_bounded(server: Server) -> None:
    asyncio.run(ask(client(server, max_batch=4), *((f"q{i}", 1) for i in range(10))))
    assert sorted(len(c["queries"]) for c in server.calls) == [2, 4, 4]


def test_embedded_queries_that_wait_share_a_thread(index: str) -> None:
    """The answers are those of queries asked alone, and the event loop goes on meanwhile."""
    search, calls = EmbeddedSearch(index), []
    answer = search._call

    async def counted(keys: list[tuple[str, int]]) -> list[tuple[Hit, ...]]:
        calls.append(keys)
        return await answer(keys)

    search._batcher._call = counted
    queries = [f"{word} {i}" for i, word in enumerate(["chemist", "Berlin", "fission", "Warsaw"] * 10)]

    async def all_at_once() -> list[tuple[Hit, ...]]:
        return await asyncio.gather(*(search.find(query, 2) for query in queries))

    assert asyncio.run(all_at_once()) == [search._find(query, 2) for query in queries]
    assert [len(keys) for keys in calls] == [32, 8]


@pytest.mark.parametrize("trouble", [[500], [503, 429, 502], ["hang"], ["drip"]])
def test_retries(server: Server, trouble: list) -> None:
    server.script = list(trouble)
    [[hit]] = asyncio.run(ask(client(server, **limits(trouble)), ("q", 1)))
    assert hit.title == "q"
    assert len(server.calls) == len(trouble) + 1


@pytest.mark.parametrize(
    ("trouble", "calls", "message"),
    [
        ([500] * 3, 3, r"status 500 after 3 tries of 10 s$"),
        (["hang"] * 3, 3, r"(ReadTimeout|TimeoutError) after 3 tries of 0\.5 s$"),
        ([404], 1, r"status 404 after 1 tries"),  # will not pass
        (["<html>"], 1, r"Expecting value"),
        (['{"result": [[], []]}'], 1, r"result: must be a list of 1, one per query, got 2 results$"),
    ],
)
def test_errors_name_the_server(server: Server, trouble: list, calls: int, message: str) -> None:
    server.script = list(trouble)
    with pytest.raises(SearchError, match=rf"^search server {server.url}: .*{message}"):
        asyncio.run(ask(client(server, retries=2, **limits(trouble)), ("q", 1)))
    assert len(server.calls) == calls


def test_check_of_an_unreachable_server(server: Server) -> None:
    asyncio.run(client(server).check())
    with Server() as other:
        url = other.url  # closed again below: nobody listens there
    with pytest.raises(ValueError, match=rf"^search\.url: must be .*{url}: ConnectError .* after 2 tries"):
        asyncio.run(HttpSearch(url, retries=1, backoff_s=0.01).check())


def test_a_client_outlives_its_event_loop(server: Server) -> None:
    search = client(server)
    for query in ("one", "two"):
        assert asyncio.run(search.find(query, 1))[0].title == query


@pytest.mark.parametrize(
    ("found", "hits"),
    [
        ([{"document": {"id": 3, "contents": '"T"\nx\ny'}, "score": 0.5}], [Hit("T", "x\ny", "3", 0.5)]),
        ([{"id": "3", "contents": '"T"\nx'}], [Hit("T", "x", "3")]),
        ([{"id": "3", "title": "T", "text": " x "}], [Hit("T", "x", "3")]),
        ([{"document": "x", "score": 2.0}], [Hit("", "x", score=2.0)]),
        (["x"], [Hit("", "x")]),
        ("all in one string\n", [Hit("", "all in one string")]),
        (None, []),
        ([], []),
    ],
)
def test_odd_answers(found: object, hits: list[Hit]) -> None:
    assert parse_results({"result": [found, []]}, 2, 5) == [tuple(hits), ()]


@pytest.mark.parametrize("answer", [None, [], {"result": None}, {"result": [3]}, {"result": [[{"x": 1}]]}])
def test_nonsense_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match=r"^result: "):
        parse_results(answer, 1, 5)
