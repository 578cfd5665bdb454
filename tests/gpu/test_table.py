"""Each case of the GPU table as a test.

Skipped without a GPU: there `tests/dist/test_gpu_table.py` runs the same code at toy size.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.conftest import TABLE
from tests.gpu.table import CASES_S, Table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch finds none")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Table]:
    table = Table(tmp_path_factory.mktemp("gpu"))
    yield table
    request.config.stash[TABLE] = table.report()


@pytest.mark.parametrize("name", CASES_S)
def test_case(table: Table, name: str) -> None:
    table.run([name])
    row = table.rows[name]
    if row["status"] == "skipped":
        pytest.skip(row["reason"])
    assert row["status"] == "ok", f"{row['reason']}\n{row.get('stderr', '')}"
