"""The cases of `tests/gpu` on a CPU at toy size: the same functions, all in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.cases import CASES
from tests.gpu.table import CASES_S

ROOT = Path(__file__).parents[2]
SKIPPED = {"attention_varlen", "fp8_training_tensorwise", "fp8_training_blockwise", "fp8_engine"}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("table") / "rows.jsonl"
    command = [sys.executable, "-m", "tests.gpu.table", "--toy", "--together", "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    report = json.loads(ended.stdout.splitlines()[-1])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row.pop("case"): row for row in rows} == report["cases"]  # written as they came
    return report["cases"]


def test_every_case_ran_or_says_why_not(table: dict) -> None:
    assert list(table) == list(CASES) == list(CASES_S)
    assert {name for name, row in table.items() if row["status"] == "skipped"} == SKIPPED
    assert {row["status"] for name, row in table.items() if name not in SKIPPED} == {"ok"}
    assert table["fp8_engine"]["reason"] == "vLLM's FP8 on a CPU is the end-to-end tests' matter"
    assert table["fp8_training_blockwise"]["reason"] == "Transformer Engine is not installed"


def test_gradients(table: dict) -> None:
    """fp32 rounds at 6e-8, bf16 at 4e-3: packed and copied differ in the order of sums only."""
    differences = table["gradients"]["difference_from_fp32_copied"]
    assert differences["fp32_packed"] < 1e-5
    assert 1e-3 < differences["bf16_copied"] < 0.1
    assert table["gradients"]["of_the_worst_parameter"]["fp32_packed"] < 1e-4


def test_attention(table: dict) -> None:
    assert list(table["attention_flex"]["errors"]) == ["output"]  # forward only
    errors = table["attention_node"]["errors"]
    assert list(errors) == ["output", "query_gradient", "key_gradient", "value_gradient"]
    assert 0 < max(errors.values()) < 1e-5
    assert 0 < table["attention_in_a_step"]["by_attention"]["node"]["difference_from_dense"] < 1e-4


def test_speed(table: dict) -> None:
    """A chain is 6 + 2 * 9 + 3 = 27 tokens; 7 leaves copy 189. Unique are 27 and for each of six branches 12
    tokens from the first turn's end or 3 from the second's: 45 to 99."""
    for name in ("speed_8k", "speed_16k", "speed_32k"):
        row = table[name]
        assert row["tokens"]["copied"] % 189 == 0
        assert row["token_ratio"] == pytest.approx(row["tokens"]["copied"] / row["tokens"]["packed"])
        assert 189 / 99 < row["token_ratio"] < 189 / 45
        assert row["micro_batches"]["packed"] == 1
        assert row["packed"]["peak_gib"] is None  # not measured on a CPU


def test_a_run(table: dict) -> None:
    norms = table["a_run"]["grad_norms"]
    assert all(norm > 0 for norm in norms)
    assert norms[2] == pytest.approx(norms[3], rel=1e-6)  # the third step, before and after loading
    assert norms[0] != norms[1] != norms[2]
