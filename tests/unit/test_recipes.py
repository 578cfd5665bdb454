"""The cluster recipes: their configs load, their parts are made, `plan` accepts them and says what the
READMEs say of it; questions of other trainers become theirs.

Model shapes are the published ones (`real_models`); no weights.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatron_tree import cli
from megatron_tree.config import Config, load
from megatron_tree.data.prompts import load_prompts
from megatron_tree.planner.limits import GIB
from megatron_tree.rollout.agent import INSTRUCTION, SearchAgent
from megatron_tree.rollout.episode import build
from megatron_tree.rollout.reward import SearchReward
from tests.unit.real_models import CONFIGS
from tests.unit.rollout_fakes import Letters

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = {
    "qwen2.5_7b_search": "Qwen2.5-7B",
    "qwen2.5_14b_web": "Qwen2.5-14B",
    "qwen3_32b_search": "Qwen3-32B",
    "llama3.1_70b_search": "Llama-3.1-70B",
}


def recipe(name: str, *overrides: str) -> Config:
    return load(EXAMPLES / name / "config.yaml", overrides)


def said(name: str) -> dict[str, float]:
    """The README's table of what `plan` says."""
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\d+)[^|]*\|$", text, re.MULTILINE)
    return {label: float(number) for label, number in rows}


@pytest.mark.parametrize("name", RECIPES)
def test_plan_accepts_it_and_says_what_the_readme_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[RECIPES[name]]), encoding="utf-8")
    config = str(EXAMPLES / name / "config.yaml")
    monkeypatch.setattr(sys, "argv", ["megatron-tree", "plan", config, f"model.path={tmp_path}", "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    plan = json.loads(capsys.readouterr().out)
    engine = recipe(name).engine
    memory, copies = ("a version, kept by its owners", 1) if engine.is_sent else ("two images in /dev/shm", 2)
    found = {
        "GPUs": recipe(name).train.parallel.layout.world_size + engine.count * engine.tp,
        "fullest training rank": max(stage["memory"]["total"] for stage in plan["stages"]) / GIB,
        memory: copies * plan["image_bytes"] / GIB,
        "an iteration": plan["seconds"],
    }
    assert said(name) == pytest.approx(found, rel=0.05)
    assert said(name)["GPUs"] == found["GPUs"] == plan["num_gpus"]


@pytest.mark.parametrize("name", RECIPES)
def test_one_gpu_too_few_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[RECIPES[name]]), encoding="utf-8")
    short = int(said(name)["GPUs"]) - 1
    options = [f"model.path={tmp_path}", f"plan.devices={short}"]
    config = str(EXAMPLES / name / "config.yaml")
    monkeypatch.setattr(sys, "argv", ["megatron-tree", "plan", config, *options])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert re.match(
        rf"^megatron-tree: .*plan\.devices: must hold \d+ trainer ranks .*{short + 1}, got {short}", error
    )
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", RECIPES)
def test_one_rank_short_of_a_layout_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One tensor-parallel rank fewer cuts no head evenly; 70B on 7 ranks a stage, 32B on 1 do not fit."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[RECIPES[name]]), encoding="utf-8")
    tp = recipe(name).train.parallel.tp - 1
    options = [
        f"model.path={tmp_path}",
        f"train.parallel.tp={tp}",
        f"train.parallel.sequence_parallel={tp > 1}",
    ]
    config = str(EXAMPLES / name / "config.yaml")
    monkeypatch.setattr(sys, "argv", ["megatron-tree", "plan", config, *options])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    reason = r"^megatron-tree: .*train\.(parallel|micro_batch_tokens).*got [^\n]*\n$"
    assert re.match(reason, capsys.readouterr().err)


@pytest.mark.parametrize("name", RECIPES)
def test_its_environment_and_reward_are_made(name: str) -> None:
    config = recipe(name)
    assert isinstance(build(config.environment, "environment"), SearchAgent)
    assert isinstance(build(config.reward, "reward"), SearchReward)


def test_settings_are_the_authors() -> None:
    """FACTS section 5: arXiv 2509.21240 and the scripts beside it."""
    qa, web = recipe("qwen2.5_7b_search"), recipe("qwen2.5_14b_web")
    for config, prompts, context, turn, observation, turns in (
        (qa, 512, 4096, 500, 500, 4),
        (web, 128, 8000, 2000, 1000, 5),
    ):
        rollout, algo, optimizer = config.rollout, config.algo, config.train.optimizer
        assert (rollout.prompts, config.engine.max_model_len) == (prompts, context)
        assert config.data.max_prompt_tokens + rollout.max_path_tokens == context
        assert (rollout.max_turn_tokens, rollout.max_observation_tokens) == (turn, observation)
        assert (rollout.max_turns, rollout.max_tool_calls) == (turns, turns - 1)
        assert (rollout.trees, rollout.expand_nodes, rollout.expand_rounds) == (2, 2, 1)
        assert (algo.clip_low, algo.clip_high, algo.clip_dual, algo.kl_coef) == (0.2, 0.2, 3.0, 0.001)
        assert algo.normaliser == "token_mean"
        assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (1e-6, 0.9, 0.999)
        assert (optimizer.weight_decay, optimizer.clip_grad) == (0.01, 1.0)
    assert (qa.train.mini_batches, qa.train.iterations) == (8, 180)


def test_questions_of_search_r1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train rows all, test rows as many of each benchmark; prompts are ours, answers theirs."""
    prepare = EXAMPLES / "qwen2.5_7b_search" / "prepare.py"
    for name, sources in (("train", "nq nq hotpotqa"), ("test", "nq nq nq musique")):
        rows = [
            {
                "question": f"who {i}?",
                "data_source": source,
                "prompt": [{"role": "user", "content": "For example, <answer> Beijing </answer>."}],
                "reward_model": {"style": "rule", "ground_truth": {"target": [f"Bob {i}", "Rob"]}},
            }
            for i, source in enumerate(sources.split())
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--train", str(tmp_path / "train.jsonl"), "--test", str(tmp_path / "test.jsonl")]
    arguments += ["--out", str(tmp_path / "out"), "--test-per-source", "2"]
    monkeypatch.setattr(sys, "argv", [str(prepare), *arguments])
    runpy.run_path(str(prepare), run_name="__main__")
    made = load_prompts(
        [str(tmp_path / "out" / "train.parquet")],
        split="train",
        encode_chat=lambda messages: Letters().encode(messages[0]["content"]),
        max_prompt_tokens=10_000,
        overlong="refuse",
    ).rows
    assert [row.data_source for row in made] == ["nq", "nq", "hotpotqa"]
    assert made[2].targets == ("Bob 2", "Rob")
    assert made[2].messages == ({"role": "user", "content": f"{INSTRUCTION}who 2?"},)
    test = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert [row["data_source"] for row in test] == ["nq", "nq", "musique"]


def test_a_row_without_a_question_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = EXAMPLES / "qwen2.5_7b_search" / "prepare.py"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "who?", "answer": "Bob"}\n{"answer": "Bob"}\n')
    arguments = ["--train", str(rows), "--test", str(rows), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [str(prepare), *arguments])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(prepare), run_name="__main__")
    assert capsys.readouterr().err.endswith(
        f"error: {rows}:2: question: must be a non-empty string, got None\n"
    )
    assert not (tmp_path / "out").exists()
