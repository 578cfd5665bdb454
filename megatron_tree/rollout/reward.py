"""`SearchReward`: right or wrong answer, and whether the turns kept to the protocol of `agent`.

| | well-formed | broken |
|---|---|---|
| right | 1.0 | 0.8 |
| wrong | 0.2 | 0.1 |
| no answer | 0.2 | 0.0 |

Right is an exact match after SQuAD's normalisation. Data sources named in `f1_sources` are scored between
wrong and right by their token F1, so the reward never falls when F1 rises and is never negative.

Departures from the authors' code: the answer is read from the policy's own last action (theirs finds the
example in the prompt), F1 is monotone, and the format check knows turns instead of ChatML.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from megatron_tree.rollout.agent import TAGS, parse_action
from megatron_tree.rollout.episode import Score, Turn
from megatron_tree.types import Row

RIGHT = {True: 1.0, False: 0.8}  # by well-formed
WRONG = {True: 0.2, False: 0.1}
NO_ANSWER = {True: 0.2, False: 0.0}

_TURN = re.compile(r"\s*<think>(.*?)</think>\s*<(search|answer)>(.*?)</\2>\s*", re.DOTALL)
_TAG = re.compile(rf"</?(?:{'|'.join(TAGS)})>")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces. A text of articles only keeps them: blood group
    `A`."""
    words = text.lower().translate(_NO_PUNCTUATION).split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


def exact_match(answer: str, targets: Sequence[str]) -> float:
    """1.0 if the answer is one of the targets. An answer of punctuation only is none."""
    normal = normalise(answer)
    return float(normal != "" and normal in {normalise(target) for target in targets})


def token_f1(answer: str, targets: Sequence[str]) -> float:
    """Best F1 over the targets, of the normalised words as multisets."""
    return max((_f1(normalise(answer).split(), normalise(target).split()) for target in targets), default=0.0)


def _f1(answer: list[str], target: list[str]) -> float:
    common = (Counter(answer) & Counter(target)).total()
    return 2 * common / (len(answer) + len(target)) if common else 0.0


def well_formed(turns: Sequence[Turn]) -> bool:
    """Every turn thinks, then searches or answers, with no other tags or text, and none needed a hint. Only
    the last may answer."""
    for index, turn in enumerate(turns):
        match = _TURN.fullmatch(turn.action)
        if match is None or turn.finish == "invalid":
            return False
        thought, kind, content = match.groups()
        if _TAG.search(thought) or _TAG.search(content) or not content.strip():
            return False
        if kind == "answer" and index < len(turns) - 1:
            return False
    return True


class SearchReward:
    """Reports `em`, `f1` and `format` (0 or 1) beside the reward. `success` is F1 for `f1_sources`, else
    exact match."""

    def __init__(self, f1_sources: Sequence[str] = ()) -> None:
        if isinstance(f1_sources, str):
            raise ValueError(f"f1_sources: must be a list of data sources, got {f1_sources!r}")
        self._f1_sources = frozenset(f1_sources)

    def __call__(self, row: Row, turns: Sequence[Turn]) -> Score:
        formed = well_formed(turns)
        action = parse_action(turns[-1].action)
        if action.kind != "answer":
            return Score(NO_ANSWER[formed], 0.0, None, {"em": 0.0, "f1": 0.0, "format": float(formed)})
        em, f1 = exact_match(action.content, row.targets), token_f1(action.content, row.targets)
        success = f1 if row.data_source in self._f1_sources else em
        reward = WRONG[formed] + (RIGHT[formed] - WRONG[formed]) * success
        return Score(reward, success, action.content, {"em": em, "f1": f1, "format": float(formed)})
