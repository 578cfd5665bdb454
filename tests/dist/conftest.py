"""Ends the ranks of `harness` after the last test of this folder; prints the table of layouts that
test_layout_invariance measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.table import Table

from tests.dist import harness


@pytest.fixture(scope="package", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    harness.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]
    rows = [value for report in reports for name, value in report.user_properties if name == "layout"]
    if not rows:
        return
    table = Table("layout", "ranks", "loss, difference", "norm, relative", "worst gradient, relative")
    for name, ranks, *differences in rows:
        table.add_row(name, str(ranks), *(f"{difference:.1e}" for difference in differences))
    Console(width=120).print(table)
