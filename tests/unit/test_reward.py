"""The reward table, EM and F1, against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_tree.rollout.episode import Turn
from megatron_tree.rollout.reward import SearchReward, exact_match, normalise, token_f1, well_formed
from megatron_tree.types import Row

SEARCH = Turn(
    "<think>a</think>\n<search>q</search>", "\n\n<information>Doc 1(Title: t) x\n</information>\n\n", "tool"
)
BAD_SEARCH = Turn("<search>q</search>", "\n\n<information>…</information>\n\n", "tool")
HINTED = Turn("hm", "hint", "invalid")


def answer(text: str, think: str = "<think>b</think>") -> Turn:
    return Turn(f"{think}<answer>{text}</answer>", "", "answer")


def row(*targets: str, source: str = "nq") -> Row:
    return Row("g", source, (), np.empty(0, np.int32), targets)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("a U.S. state", "us state"),
        ("  An\tapple, the pear ", "apple pear"),
        ("A", "a"),
        ("...", ""),
        ("Theodore", "theodore"),
    ],
)
def test_normalise(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("text", "targets", "em", "f1"),
    [
        ("the Paris.", ["Paris"], 1, 1),
        ("Paris", ["London", "paris"], 1, 1),
        ("Paris, France", ["Paris"], 0, 2 / 3),  # precision 1/2, recall 1
        (
            "new york city",
            ["york new", "city"],
            0,
            0.8,
        ),  # precision 2/3, recall 1; the other target gives 1/2
        ("b b c", ["b c c"], 0, 2 / 3),  # multisets: b once, c once; 2 of 3 both ways
        ("Rome", ["Paris"], 0, 0),
        ("...", ["A"], 0, 0),
        ("...", ["!"], 0, 0),
        ("a", ["A"], 1, 1),
        ("x", [], 0, 0),
    ],
)
def test_exact_match_and_f1(text, targets, em, f1) -> None:
    assert exact_match(text, targets) == em
    assert token_f1(text, targets) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("turns", "reward", "success", "found"),
    [
        ([SEARCH, answer("Bonn")], 1.0, 1.0, "Bonn"),
        ([answer("the bonn")], 1.0, 1.0, "the bonn"),
        ([BAD_SEARCH, answer("Bonn")], 0.8, 1.0, "Bonn"),
        ([HINTED, answer("Bonn")], 0.8, 1.0, "Bonn"),
        ([SEARCH, answer("Ulm")], 0.2, 0.0, "Ulm"),
        ([SEARCH, answer("Ulm", think="")], 0.1, 0.0, "Ulm"),
        ([SEARCH, Turn(SEARCH.action, "", "max_turns")], 0.2, 0.0, None),
        ([SEARCH, Turn("<think>long", "", "max_tokens")], 0.0, 0.0, None),
        # an answer that stands in an observation or an earlier turn is none
        (
            [Turn(SEARCH.action, "<answer>Bonn</answer>", "tool"), Turn("Bonn", "", "max_turns")],
            0.0,
            0.0,
            None,
        ),
    ],
)
def test_reward_table(turns, reward, success, found) -> None:
    score = SearchReward()(row("Bonn"), turns)
    assert (score.reward, score.success, score.answer) == (reward, success, found)
    assert score.metrics["em"] == success
    assert score.metrics["format"] == float(reward in (1.0, 0.2))


def test_f1_sources_are_monotone_and_never_negative() -> None:
    """Answers of rising F1 against `a b c d` (letters that are no articles): 0, 2/5, 2/3, 6/7, 1."""
    reward, target = SearchReward(f1_sources=["web"]), row("b c d e", source="web")
    f1s = [0, 2 / 5, 2 / 3, 6 / 7, 1]
    for think, wrong, right in (("<think>t</think>", 0.2, 1.0), ("", 0.1, 0.8)):
        scores = [reward(target, [answer(t, think)]) for t in ("x", "b", "b c", "b c d", "b c d e")]
        assert [s.success for s in scores] == pytest.approx(f1s)
        assert [s.reward for s in scores] == pytest.approx([wrong + (right - wrong) * f1 for f1 in f1s])
    assert (
        reward(row("b c", source="nq"), [answer("b")]).reward == 0.2
    )  # not a configured source: exact match
    assert reward(row("b c", source="nq"), [answer("b")]).metrics == {
        "em": 0.0,
        "f1": pytest.approx(2 / 3),
        "format": 1.0,
    }
    with pytest.raises(ValueError, match="f1_sources: must be a list of data sources, got 'web'"):
        SearchReward(f1_sources="web")


@pytest.mark.parametrize(
    ("action", "good"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("\n<think>a\nb</think>\n\n<answer> b </answer>\n", True),
        ("<think></think><answer>b</answer>", True),
        ("<answer>b</answer>", False),
        ("so <think>a</think><answer>b</answer>", False),
        ("<think>a</think> so <answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> so", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a<think>b</think><answer>b</answer>", False),
        ("<think>a</think><information>x</information><answer>b</answer>", False),
        ("<think>a <information>x</information></think><answer>b</answer>", False),
        ("<think>a</think><think>b</think><answer>b</answer>", False),
        ("<think>a</think><answer>b<search></answer>", False),
        ("<think>a</think><search>b</answer>", False),
    ],
)
def test_well_formed_turn(action: str, good: bool) -> None:
    assert well_formed([Turn(action, "", "answer")]) is good


def test_well_formed_turns() -> None:
    assert well_formed([SEARCH, SEARCH, answer("x")])
    assert not well_formed([SEARCH, HINTED, answer("x")])
    assert not well_formed([Turn(SEARCH.action, "no searches left", "invalid"), answer("x")])
    assert not well_formed([Turn(answer("x").action, "", "tool"), answer("x")])  # only the last may answer
