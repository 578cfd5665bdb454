"""What a user sees while a run goes on: the progress line; and at its end: the summary.

Not here: curves and trees (`metrics.RunLog`, `rollout.report`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_tree.metrics import PhaseTimer

PLAIN_EVERY_S = 30.0


class Progress:
    """One live line on a terminal; elsewhere a plain line per iteration. Everything goes to stderr: stdout is
    for data."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.timer = PhaseTimer()
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._start = time.perf_counter()
        self._done_here = 0
        self._state = self._at = self._phase = ""
        self._told = self._since = self._start

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, refresh_per_second=4, transient=True, get_renderable=self._line
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def phase(self, name: str, at: str = "") -> Iterator[None]:
        """Times a phase and shows it. `at` says where in the run, e.g. `iteration 3/20`."""
        self._at, self._phase, self._state, self._since = at or self._at, name, "", time.perf_counter()
        with self.timer(name):
            yield
        self._phase = ""

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def detail(self, text: str) -> None:
        """What the live line says behind the phase; off a terminal a line of its own, now and then."""
        self._state = text
        if self._live is None and time.perf_counter() - self._told > PLAIN_EVERY_S:
            self._told = time.perf_counter()
            self.say(str(self._line()))

    def iteration_done(self, iteration: int, scalars: dict[str, float]) -> None:
        self._done_here += 1
        left = (time.perf_counter() - self._start) / self._done_here * (self.total - iteration)
        self.say(
            f"iteration {iteration}/{self.total}  reward {scalars['rollout/reward']:.3f}  "
            f"success {scalars['rollout/success']:.3f}  loss {scalars['policy/loss']:+.4f}  "
            f"grad {scalars['train/grad_norm']:.2f}  gap {scalars['policy/logprob_gap_max']:.1e}  "
            f"{scalars['throughput/tokens_per_s']:.0f} tok/s  {scalars['time/iteration_s']:.1f} s  "
            f"ETA {_clock(left)}"
        )

    def start_clock(self) -> None:
        """ETA counts from here: start-up and warm-up are no measure of an iteration."""
        self._start, self._done_here = time.perf_counter(), 0

    def _line(self) -> Text:
        seconds = f"{self._phase} {time.perf_counter() - self._since:.0f} s" if self._phase else ""
        return Text("  ".join(filter(None, (self._at, seconds, self._state))), style="bold")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def write_summary(folder: Path, summary: dict[str, object]) -> None:
    """`summary.json` in the run folder, and the same object as the last line of stdout."""
    aside = folder / "summary.json.tmp"
    aside.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    aside.replace(folder / "summary.json")
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.stdout.flush()
