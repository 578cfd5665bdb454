"""Processes that must end with the one that started them."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def assert_gone(processes: Iterable[psutil.Process], *, but: str = "no process is called so") -> None:
    """Waits for their end, half a minute at most; those whose name ends in `but` may take longer."""
    deadline = time.monotonic() + 30
    while alive := [name for process in processes if (name := _name(process)) and not name.endswith(but)]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.1)


def _name(process: psutil.Process) -> str | None:
    """None once it has ended."""
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.name()
    except psutil.NoSuchProcess:
        return None
