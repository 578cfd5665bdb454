"""`SearchAgent`: the search protocol of Search-R1 and of the Tree-GRPO authors, as an environment.

An action is `<think>…</think>` and then `<search>query</search>` or `<answer>text</answer>`; both closing
tags stop the generation. A search is answered by `<information>…</information>`, anything else by a hint that
uses up the turn. A search is refused when no tool call is left, and on the last turn, whose observation
nobody would read.

Departures from the authors' code: stop strings exist, and what is found cannot forge the protocol's tags or
control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_tree.rollout.episode import Reply
from megatron_tree.rollout.tools.http import HttpSearch
from megatron_tree.rollout.tools.search import EmbeddedSearch, Hit, Search
from megatron_tree.types import Row

INSTRUCTION = (
    "Answer the question below. Whenever you get new information, first reason inside <think> and </think>. "
    "If you lack knowledge, call a search engine by <search> query </search>; what it finds is given to you "
    "between <information> and </information>. You can search as often as you are allowed to. "
    "When you need no more knowledge, give the answer inside <answer> and </answer>, without explanation. "
    "Question: "
)
"""What a prompt says before the question; data builders append the question."""

TAGS = ("think", "search", "information", "answer")
STOP = ("</search>", "</answer>")
END = "</information>\n\n"
HINT = (
    "\n\nMy action is not valid. To search, I put the query between <search> and </search>. "
    "To answer, I put the answer between <answer> and </answer>.\n\n"
)
NO_CALLS_HINT = "\n\nI have no searches left. I must give the answer between <answer> and </answer>.\n\n"

# what a found text must not bring in: the protocol's tags, and control tokens like <|im_end|>
_FORGED = re.compile(r"</?(?:think|search|information|answer)>|<\|[^|<>]*\|>|</?s>")


@dataclass(frozen=True, slots=True)
class Action:
    kind: Literal["search", "answer", "invalid"]
    content: str = ""


def parse_action(text: str) -> Action:
    """The first closing tag of a search or an answer decides, with the last such opening tag before it; text
    around them is the format's concern (see `reward`), not the action's. No pair or nothing inside: invalid.

    Worked example: `<think>a</think> <search> x y </search>` is a search for `x y`.
    """
    closing = re.search(r"</(search|answer)>", text)
    if closing is None:
        return Action("invalid")
    kind = closing[1]
    _, opening, content = text[: closing.start()].rpartition(f"<{kind}>")
    content = " ".join(content.split())
    if not opening or not content:
        return Action("invalid")
    return Action("search" if kind == "search" else "answer", content)


def format_hits(hits: Sequence[Hit]) -> str:
    """`Doc i(Title: …) text` line by line."""
    found = "".join(
        f"Doc {i}(Title: {_harmless(hit.title)}) {_harmless(hit.text)}\n"
        for i, hit in enumerate(hits, start=1)
    )
    return f"\n\n<information>{found or 'Nothing found.'}{END}"


def _harmless(text: str) -> str:
    while (cleaned := _FORGED.sub("", text)) != text:  # again, for `<|<|x|>y|>`
        text = cleaned
    return text


class SearchAgent:
    """The environment; episodes keep no state, so it is its own episode.

    `search` is `{kind: embedded, index, topk, …}` or `{kind: http, url, topk, …}`; the rest are the options
    of `EmbeddedSearch` and `HttpSearch`. `topk` hits are shown per search.
    """

    stop: tuple[str, ...] = STOP

    def __init__(self, search: Mapping[str, Any]) -> None:
        kinds = {"embedded": EmbeddedSearch, "http": HttpSearch}
        options = dict(search)
        kind, self._topk = options.pop("kind", None), options.pop("topk", 3)
        if kind not in kinds:
            raise ValueError(f"search.kind: must be one of {', '.join(kinds)}, got {kind!r}")
        if not isinstance(self._topk, int) or self._topk < 1:
            raise ValueError(f"search.topk: must be an integer of at least 1, got {self._topk!r}")
        self.search: Search = kinds[kind](**options)

    def begin(self, row: Row) -> SearchAgent:
        return self

    def fork(self) -> SearchAgent:
        return self

    async def act(self, action: str, *, turns_left: int, tool_calls_left: int) -> Reply:
        parsed = parse_action(action)
        if parsed.kind == "answer":
            return Reply("", done=True)
        if parsed.kind == "invalid":
            return Reply(HINT, valid=False)
        if turns_left == 0 or tool_calls_left == 0:
            return Reply(NO_CALLS_HINT, valid=False)
        hits = await self.search.find(parsed.content, self._topk)
        return Reply(format_hits(hits), num_tool_calls=1, keep_end=END)

    async def check(self) -> None:
        """Raises ValueError when the search does not work, before anything else is started."""
        await self.search.check()

    async def close(self) -> None:
        await self.search.close()
