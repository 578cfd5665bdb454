"""Prompts and demonstrations: schemas, errors that name file and line, order and resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_tree.data.demonstrations import batch_of, load_demonstrations
from megatron_tree.data.prompts import PromptOrder, PromptSet, load_prompts
from megatron_tree.types import IntArray, Row, Tree
from tests.unit.rollout_fakes import Letters


def encode_chat(messages) -> IntArray:
    if any(m["content"] == "refused" for m in messages):
        raise ValueError("the chat template refuses the messages")
    return Letters().encode("".join(m["content"] for m in messages))


def load(*paths: Path, limit: int = 50, overlong: Any = "skip") -> PromptSet:
    names = [str(p) for p in paths]
    return load_prompts(
        names, split="train", encode_chat=encode_chat, max_prompt_tokens=limit, overlong=overlong
    )


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


SEARCH_R1 = {
    "id": "train_0",
    "question": "who",
    "golden_answers": ["Bob"],
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "who"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Bob", "Rob"]}},
    "extra_info": {"split": "train", "index": 0},
}
VERL = {
    "data_source": "searchR1_hotpotqa",
    "prompt": [{"role": "system", "content": "sys"}, {"role": "user", "content": "what"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["x"]}},
    "extra_info": {"split": "train", "index": 0},
}


def check(row: Row, group_id: str, source: str, prompt: str, targets: tuple[str, ...]) -> None:
    assert (row.group_id, row.data_source, row.targets) == (group_id, source, targets)
    assert Letters().decode(row.prompt_ids) == prompt


def test_search_r1_and_verl_rows_from_parquet_and_jsonl(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([SEARCH_R1, SEARCH_R1]), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([VERL]), tmp_path / "v.parquet")
    (tmp_path / "sub").mkdir()
    jsonl(tmp_path / "sub" / "a.jsonl", SEARCH_R1, "", VERL)
    rows = load(tmp_path / "a.parquet", tmp_path / "v.parquet", tmp_path / "sub" / "a.jsonl").rows
    check(rows[0], "train/0/a.parquet:1", "nq", "who", ("Bob", "Rob"))
    check(rows[1], "train/0/a.parquet:2", "nq", "who", ("Bob", "Rob"))
    check(rows[2], "train/1/v.parquet:1", "hotpotqa", "syswhat", ("x",))
    check(rows[3], "train/2/a.jsonl:1", "nq", "who", ("Bob", "Rob"))
    check(rows[4], "train/2/a.jsonl:3", "hotpotqa", "syswhat", ("x",))  # the blank line counts
    assert rows[0].extra == {k: SEARCH_R1[k] for k in ("id", "question", "golden_answers", "extra_info")}
    assert rows[2].messages == tuple(VERL["prompt"])
    assert rows[0].prompt_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("answers", "targets"),
    [
        ({"answer": "y"}, ("y",)),
        ({"answers": ["y", "z"]}, ("y", "z")),
        ({"golden_answers": ["y"]}, ("y",)),
        ({"targets": []}, ()),
        ({"reward_model": {"ground_truth": "72"}}, ("72",)),
        ({"reward_model": {"ground_truth": {"target": "y"}}}, ("y",)),
    ],
)
def test_plain_rows(tmp_path: Path, answers: dict, targets: tuple) -> None:
    [row] = load(jsonl(tmp_path / "toy.jsonl", {"prompt": "ask", "hops": 2, **answers})).rows
    check(row, "train/0/toy.jsonl:1", "toy", "ask", targets)
    assert row.messages == ({"role": "user", "content": "ask"},)
    assert row.extra == {"hops": 2}


GOOD = {"prompt": "ask", "answer": "y"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "row: must be a JSON object in UTF-8"),
        ("[1]", r"row: must be a JSON object, got \[1\]"),
        ({"answer": "y"}, r"prompt: missing, got the fields \['answer'\]"),
        ({**GOOD, "prompt": 3}, r"prompt: must be a text or a list of {role, content}, got 3"),
        ({**GOOD, "prompt": []}, r"prompt: must be a text or a list of {role, content}, got \[\]"),
        ({**GOOD, "prompt": ["x"]}, r"prompt\[0\]: must be {role, content}, got 'x'"),
        (
            {**GOOD, "prompt": [{"role": "boss", "content": "x"}]},
            r"prompt\[0\].role: must be one of .*, got 'boss'",
        ),
        (
            {**GOOD, "prompt": [{"role": "user", "content": 1}]},
            r"prompt\[0\].content: must be a string, got 1",
        ),
        ({**GOOD, "prompt": [{"role": "user", "content": "x", "a": 1}]}, r"prompt\[0\]: .* got also \['a'\]"),
        ({**GOOD, "prompt": "refused"}, "prompt: the chat template refuses the messages"),
        (
            {**GOOD, "prompt": [{"role": "user", "content": ""}]},
            "prompt: must have at least one token, got none",
        ),
        ({"prompt": "ask"}, r"answers: one of reward_model, .* must be there, got \['prompt'\]"),
        ({**GOOD, "answer": 7}, "answer: must be a non-empty string or a list of them, got 7"),
        ({**GOOD, "answer": ["y", " "]}, r"answer: must be a non-empty string .*, got \['y', ' '\]"),
        ({**GOOD, "answer": []}, "answer: must hold at least one answer, got an empty list"),
        ({**GOOD, "reward_model": {"style": "rule"}}, r"reward_model.ground_truth: must be .*, got None"),
        (
            {**GOOD, "reward_model": {"ground_truth": {"target": 1}}},
            r"reward_model.ground_truth.target: .*, got 1",
        ),
        ({**GOOD, "data_source": 1}, "data_source: must be a non-empty string, got 1"),
        ({**GOOD, "prompt": "p" * 51}, "prompt: must have at most 50 tokens, got 51"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path: Path, bad: object, message: str) -> None:
    file = jsonl(tmp_path / "rows.jsonl", GOOD, bad)
    with pytest.raises(ValueError, match=rf"^{file}:2: {message}"):
        load(file, overlong="refuse")


def test_a_bad_parquet_row_names_its_number(tmp_path: Path) -> None:
    rows = [GOOD, {"prompt": "ask", "answer": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: row 2: answers: one of "):
        load(tmp_path / "a.parquet")


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl: must be a \.jsonl or \.parquet file, got none"):
        load(tmp_path / "none.jsonl")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"a\.csv: must end with \.jsonl or \.parquet, got '\.csv'"):
        load(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"e\.jsonl: must hold at least one row, got an empty file"):
        load(jsonl(tmp_path / "e.jsonl"))
    (tmp_path / "b.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: must be a parquet file"):
        load(tmp_path / "b.parquet")
    (tmp_path / "u.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"u\.jsonl:1: row: must be a JSON object in UTF-8"):
        load(tmp_path / "u.jsonl")
    with pytest.raises(ValueError, match=r"^data\.train: must hold at least one prompt .* got 0 longer ones"):
        load()


def test_long_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", GOOD, {**GOOD, "prompt": "p" * 51}, {**GOOD, "prompt": "p" * 50})
    found = load(file)
    assert [row.group_id for row in found.rows] == ["train/0/a.jsonl:1", "train/0/a.jsonl:3"]
    assert found.num_skipped == 1
    with pytest.raises(ValueError, match=r"at most 2 tokens, got 3 longer ones"):
        load(file, limit=2)


def rows(num: int) -> list[Row]:
    return [Row(f"r{i}", "s", (), np.array([i], np.int32), ("y",)) for i in range(num)]


def ids(taken: list[Row]) -> list[str]:
    return [row.group_id for row in taken]


def test_order() -> None:
    assert ids(PromptOrder(rows(3), seed=0, shuffle=False).take(5)) == [
        "r0@0",
        "r1@0",
        "r2@0",
        "r0@1",
        "r1@1",
    ]
    order = PromptOrder(rows(7), seed=4, shuffle=True)
    epochs = [ids(order.take(7)) for _ in range(3)]
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == [f"r{i}@{number}" for i in range(7)]  # every row once
    assert (
        len({tuple(i.split("@")[0] for i in epoch) for epoch in epochs}) == 3
    )  # each epoch in its own order
    again = PromptOrder(rows(7), seed=4, shuffle=True)
    assert ids(again.take(21)) == [i for epoch in epochs for i in epoch]
    assert ids(PromptOrder(rows(7), seed=5, shuffle=True).take(7)) != epochs[0]


@pytest.mark.parametrize("before", [0, 3, 7, 9, 14])
def test_resume_goes_on_where_it_stopped(before: int) -> None:
    order = PromptOrder(rows(7), seed=4, shuffle=True)
    order.take(before)
    state = json.loads(json.dumps(order.state_dict()))
    resumed = PromptOrder(rows(7), seed=4, shuffle=True)
    resumed.load_state_dict(state)
    assert ids(resumed.take(12)) == ids(order.take(12))


def test_resume_refuses_other_rows_or_another_order() -> None:
    state = PromptOrder(rows(7), seed=4, shuffle=True).state_dict()
    with pytest.raises(ValueError, match=r"^data: to resume, num_rows must be 7 as it was saved, got 8$"):
        PromptOrder(rows(8), seed=4, shuffle=True).load_state_dict(state)
    with pytest.raises(ValueError, match=r"to resume, seed must be 4 as it was saved, got 5"):
        PromptOrder(rows(7), seed=5, shuffle=True).load_state_dict(state)
    other = [*rows(6), Row("r6", "s", (), np.array([9], np.int32), ("y",))]
    with pytest.raises(ValueError, match="to resume, digest must be"):
        PromptOrder(other, seed=4, shuffle=True).load_state_dict(state)


def demonstrate(file: Path, path_tokens: int = 20):
    return load_demonstrations(
        [str(file)],
        encode_chat=encode_chat,
        encode=Letters().encode,
        max_prompt_tokens=5,
        max_path_tokens=path_tokens,
    )


DEMO = {
    "prompt": [{"role": "user", "content": "ask"}],
    "turns": [{"action": "look", "observation": "saw"}, {"action": "say"}],
}


def test_demonstrations_are_trees_of_one_path(tmp_path: Path) -> None:
    [first, second] = demonstrate(jsonl(tmp_path / "d.jsonl", DEMO, DEMO))
    assert (first.group_id, second.group_id) == ("sft/0/d.jsonl:1", "sft/0/d.jsonl:2")
    assert [n.parent for n in first.nodes] == [-1, 0, 1]
    assert [n.finish for n in first.nodes] == ["prompt", "tool", "answer"]
    texts = [(Letters().decode(n.action_ids), Letters().decode(n.observation_ids)) for n in first.nodes]
    assert texts == [("", "ask"), ("look", "saw"), ("say", "")]
    assert [n.engine_logprobs.tolist() for n in first.nodes] == [[], [0.0] * 4, [0.0] * 3]
    [leaf] = first.leaves
    assert (leaf.node, leaf.reward, leaf.success) == (2, 1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "too long"}, "prompt: must have at most 5 tokens, got 8"),
        ({"prompt": None}, "prompt: must be a text or a list"),
        ({"turns": []}, r"turns: must be a list of {action, observation}, got \[\]"),
        ({"turns": [{"act": "x"}]}, r"turns\[0\]: must be {action, observation}, got"),
        ({"turns": [{"action": ""}]}, r"turns\[0\]\.action: must be a text of at least one token, got ''"),
        (
            {"turns": [{"action": "a"}, {"action": "b"}]},
            r"turns\[0\]\.observation: must be a text .*, got None",
        ),
        (
            {"turns": [{"action": "a", "observation": "b"}]},
            r"turns\[0\]\.observation: the last turn must have none",
        ),
        ({"turns": [{"action": "a" * 21}]}, "turns: must have at most 20 tokens, got 21"),
    ],
)
def test_a_bad_demonstration_names_file_and_line(tmp_path: Path, change: dict, message: str) -> None:
    file = jsonl(tmp_path / "d.jsonl", DEMO, {**DEMO, **change})
    with pytest.raises(ValueError, match=rf"^{file}:2: {message}"):
        demonstrate(file)


def test_batches_of_demonstrations_are_epochs_without_their_remainder() -> None:
    """Seven in twos: three batches of six different ones, then another order; the same for the same seed."""
    trees = [Tree(str(i), 0, [], []) for i in range(7)]

    def drawn(step: int, seed: int = 3) -> list[str]:
        return [tree.group_id for tree in batch_of(trees, 2, seed, step)]

    first, second = ([name for step in steps for name in drawn(step)] for steps in ((0, 1, 2), (3, 4, 5)))
    assert len(set(first)) == len(set(second)) == 6
    assert first != second
    assert drawn(4) == drawn(4) != drawn(4, seed=4)
    assert len(batch_of(trees, 64, 3, 5)) == 7  # a batch holds all at most
