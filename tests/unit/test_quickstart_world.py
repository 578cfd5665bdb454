"""The lookup world: what the prompt may not tell, splits that share no fact, protocol, reward, files."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.quickstart import prepare, world
from examples.quickstart.world import Facts, LookupReward, LookupWorld, Question, draw_questions, split_of
from megatron_tree.config import load
from megatron_tree.data.demonstrations import load_demonstrations
from megatron_tree.data.prompts import load_prompts
from megatron_tree.rollout.episode import Reply, Turn
from megatron_tree.rollout.tokens import Tokens
from megatron_tree.types import Row

CONFIG = load(Path(prepare.__file__).with_name("config.yaml"))


def facts_of(question: Question) -> Iterator[tuple[int, int, int]]:
    path = question.path
    yield from zip(question.relations, path[:-1], path[1:], strict=True)


def row_of(question: Question) -> Row:
    raw = prepare.question_row(question, 0)
    targets = tuple(raw["reward_model"]["ground_truth"]["target"])
    return Row(
        "g", "lookup", tuple(raw["prompt"]), np.empty(0, np.int32), targets, {"extra_info": raw["extra_info"]}
    )


def act(row: Row, action: str, tool_calls_left: int = 5) -> Reply:
    episode = LookupWorld().begin(row).fork()
    return asyncio.run(episode.act(action, turns_left=3, tool_calls_left=tool_calls_left))


def test_no_fact_of_an_answer_path_is_in_both_splits() -> None:
    train = {fact for q in draw_questions("train", 2000, seed=0) for fact in facts_of(q)}
    test = {fact for q in draw_questions("test", 256, seed=0) for fact in facts_of(q)}
    assert not train & test
    # every fact follows the rule of the split, so that this holds for any number of questions
    assert all((r + a + b) % 4 != 0 for r, a, b in train)
    assert all((r + a + b) % 4 == 0 for r, a, b in test)
    assert split_of(1, 2, 5) == "test"  # 1 + 2 + 5 = 8
    assert split_of(1, 2, 6) == "train"


def test_a_world_never_leaves_its_split() -> None:
    """Wrong calls too: all 8 · 48 of them."""
    for split in ("train", "test"):
        facts = Facts(split, 7)
        reached = [(r, e, facts.hop(r, e)) for r in range(8) for e in range(48)]
        assert {split_of(*fact) for fact in reached} == {split}
        assert all(a != b for _, a, b in reached)


def test_paths_have_two_or_three_hops_and_visit_no_entity_twice() -> None:
    questions = draw_questions("test", 100, seed=3)
    assert [len(q.relations) for q in questions[:4]] == [2, 3, 2, 3]
    assert all(len(q.path) == len(set(q.path)) == len(q.relations) + 1 for q in questions)
    assert len({q.facts.seed for q in questions}) == 100


def test_the_prompt_tells_neither_answer_nor_facts() -> None:
    for question in draw_questions("train", 200, seed=1):
        row = prepare.question_row(question, 0)
        words = row["prompt"][0]["content"].split()
        entities = [word for word in words if word.startswith("e")]
        assert entities == [row["extra_info"]["path"][0]]
        assert row["reward_model"]["ground_truth"]["target"] == [row["extra_info"]["path"][-1]]


def test_the_same_question_has_other_facts_under_another_seed() -> None:
    reached = {Facts("train", seed).hop(3, 4) for seed in range(200)}
    assert len(reached) > 20  # of 36 or so


def test_following_the_path_reaches_the_answer() -> None:
    question = draw_questions("test", 2, seed=0)[1]
    row, entity = row_of(question), question.entity
    for relation, reached in zip(question.relations, question.path[1:], strict=True):
        reply = act(row, f"call r{relation} e{entity} ;")
        assert reply == Reply(f" got e{reached} ;", num_tool_calls=1)
        entity = reached
    assert act(row, f"answer e{entity} ;") == Reply("", done=True)
    assert row.targets == (f"e{entity}",)


@pytest.mark.parametrize(
    "action",
    ["call r1 ;", "call r8 e1 ;", "call r1 e48 ;", "call e1 r1 ;", "answer r1 ;", "answer e1", "e1 ;", ""],
)
def test_what_is_not_understood_is_answered_by_a_hint(action: str) -> None:
    reply = act(row_of(draw_questions("test", 1, seed=0)[0]), action)
    assert reply == Reply(" say call or answer ;", valid=False)


def test_no_call_is_made_when_none_is_left() -> None:
    reply = act(row_of(draw_questions("test", 1, seed=0)[0]), "call r1 e1 ;", tool_calls_left=0)
    assert reply == Reply(" no more call ;", valid=False)


def test_reward() -> None:
    row = Row("g", "s", (), np.empty(0, np.int32), ("e9",), {"extra_info": {"path": ["e1", "e5", "e9"]}})
    reward = LookupReward(wrong=0.1)

    def score(action: str, finish: str) -> tuple[float, float, str | None, dict[str, float]]:
        before = Turn("call r1 e1 ;", " got e5 ;", "tool")
        found = reward(row, [before, Turn(action, "", finish)])  # type: ignore[arg-type]
        return found.reward, found.success, found.answer, found.metrics

    assert score("answer e9 ;", "answer") == (1.0, 1.0, "e9", {"stopped_early": 0.0})
    assert score("answer e5 ;", "answer") == (0.1, 0.0, "e5", {"stopped_early": 1.0})
    assert score("answer e7 ;", "answer") == (0.1, 0.0, "e7", {"stopped_early": 0.0})
    assert score("call r1 e1 ;", "max_turns") == (0.0, 0.0, None, {"stopped_early": 0.0})
    with pytest.raises(ValueError, match=r"wrong: must be at least 0 and below 1, got 1\.0"):
        LookupReward(wrong=1.0)


def test_demonstrations_are_imperfect_as_declared() -> None:
    """Right without a mistake: not stopping early and no wrong call, 0.55 · (0.95² + 0.95³) / 2 = 0.484; a
    wrong call leads to the answer by luck in about 1 of 30 cases. Standard error of 2000: 0.011."""
    questions, draws = draw_questions("train", 2000, seed=0), random.Random(0)
    shown = [prepare.demonstration(question, draws) for question in questions]
    right = [
        one["turns"][-1]["action"] == f"answer e{question.path[-1]} ;"
        for one, question in zip(shown, questions, strict=True)
    ]
    assert sum(right) / len(right) == pytest.approx(0.49, abs=0.04)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All but the weights, with fewer records."""
    monkeypatch = pytest.MonkeyPatch()
    for name in ("NUM_TRAIN", "NUM_TEST", "NUM_DEMONSTRATIONS"):
        monkeypatch.setattr(prepare, name, 40)
    out = tmp_path_factory.mktemp("quickstart")
    prepare.prepare_data(out, seed=0)
    monkeypatch.undo()
    prepare.make_tokenizer(out / "model")
    (out / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    return out


def test_tokenizer_has_one_token_per_word_and_gives_the_text_back(made: Path) -> None:
    tokens = Tokens(made / "model")
    assert [len(tokens.encode(word)) for word in world.WORDS] == [1] * 69
    assert tokens.decode(tokens.encode("call r1 e5 ;")) == "call r1 e5 ;"
    assert tokens.chat([{"role": "user", "content": "Q r0 e1 ?"}]).tolist() == [3, 13, 22, 4]
    assert world.WORDS[tokens.eos_id] == "<end>"


def test_files_load_within_the_limits_of_the_config(made: Path) -> None:
    tokens = Tokens(made / "model")
    assert CONFIG.data.overlong == "refuse"
    sizes = {}
    for split in ("train", "test"):
        found = load_prompts(
            [str(made / f"{split}.jsonl")],
            split=split,
            encode_chat=tokens.chat,
            max_prompt_tokens=CONFIG.data.max_prompt_tokens,
            overlong="refuse",
        )
        sizes[split] = len(found.rows)
        assert LookupWorld().begin(found.rows[0]).facts.split == split
    assert sizes == {"train": 40, "test": 40}
    trees = load_demonstrations(
        [str(made / "demonstrations.jsonl")],
        encode_chat=tokens.chat,
        encode=tokens.encode,
        max_prompt_tokens=CONFIG.data.max_prompt_tokens,
        max_path_tokens=CONFIG.rollout.max_path_tokens,
    )
    assert len(trees) == 40


def test_the_run_sees_no_demonstration_and_no_question_twice() -> None:
    assert CONFIG.sft is not None
    assert CONFIG.sft.steps * CONFIG.sft.batch_size <= prepare.NUM_DEMONSTRATIONS
    assert CONFIG.train.iterations * CONFIG.rollout.prompts <= prepare.NUM_TRAIN
    assert prepare.NUM_TEST >= 200


def test_turns_and_observations_fit_the_config() -> None:
    assert max(len(text.split()) for text in (world.HINT, " got e1 ;", " no more call ;")) <= 8
    assert CONFIG.rollout.max_observation_tokens == CONFIG.rollout.max_turn_tokens == 8
    assert CONFIG.rollout.max_turns * (8 + 8) <= CONFIG.rollout.max_path_tokens
