"""The table at the end of the output, when its cases ran as tests."""

from __future__ import annotations

import json

import pytest

TABLE = pytest.StashKey[dict]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (report := config.stash.get(TABLE, None)) is not None:
        terminalreporter.write_line(json.dumps(report))
