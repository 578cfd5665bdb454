"""Runs the cases on one GPU and prints one JSON table last; rows are written as they come.

    python -m tests.gpu.table                  # at most eight minutes; --case NAME for some of them
    python -m tests.gpu.table --toy            # the same code on a CPU, small

Each case is a process of its own with a time limit: one that fails, hangs or leaves the device broken costs
its own row. Exit code 1 where a case failed. `pytest tests/gpu` runs the same as tests.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.gpu.bench import Bench, Skipped

LIMIT_S = 480.0
CASES_S = {
    "process_group": 60,
    "gradients": 100,
    "speed_8k": 75,
    "speed_16k": 75,
    "speed_32k": 100,
    "attention_flex": 90,
    "attention_varlen": 60,
    "attention_node": 60,
    "attention_in_a_step": 75,
    "a_run": 75,
    "lent_memory": 60,
    "fp8_training_tensorwise": 75,
    "fp8_training_blockwise": 75,
    "fp8_engine": 150,
}
"""What each case may take; the most important first, for all together may take LIMIT_S only."""
ROOT = Path(__file__).parents[2]
Row = dict[str, Any]


class Table:
    """The rows so far. `folder` holds the model; `together`: all cases in one process, without limits."""

    def __init__(self, folder: Path, out: Path | None = None, *, toy: bool = False) -> None:
        self.rows: dict[str, Row] = {}
        self._folder, self._out, self._toy = folder, out, toy
        self._began = time.monotonic()
        Bench.make(folder, toy=toy).make_model()

    def run(self, names: list[str], *, together: bool = False) -> None:
        for batch in [names] if together else [[name] for name in names]:
            for name, row in self._process(batch).items():
                self.rows[name] = row
                line = json.dumps({"case": name, **row})
                print(line, file=sys.stderr, flush=True)
                if self._out is not None:
                    with self._out.open("a") as file:
                        file.write(line + "\n")

    def report(self) -> dict[str, Any]:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        return {
            "device": "cpu" if self._toy else gpu,
            "torch": torch.__version__,
            "seconds": time.monotonic() - self._began,
            "cases": self.rows,
        }

    def _process(self, names: list[str]) -> dict[str, Row]:
        """Rows of cases that share a process."""
        left = LIMIT_S - (time.monotonic() - self._began)
        limit = min(left, sum(CASES_S[name] for name in names))
        if limit < 15:
            return {name: {"status": "not run", "reason": f"{LIMIT_S:g} s are over"} for name in names}
        command = [sys.executable, "-m", "tests.gpu.table", "--worker", str(self._folder), *_flags(names)]
        began = time.monotonic()
        with (
            tempfile.TemporaryFile("w+") as said,
            subprocess.Popen(
                command + ["--toy"] * self._toy,
                cwd=ROOT,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if self._toy else {}),
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                start_new_session=True,
            ) as worker,
        ):
            try:
                output, _ = worker.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(worker.pid, signal.SIGKILL)
                output, _ = worker.communicate()
                fault = f"no end within {limit:.0f} s"
            else:
                fault = f"ended with {worker.returncode}"
            said.seek(0)
            last = said.read()[-2000:]
        found = dict(json.loads(line) for line in output.splitlines() if line.startswith('["'))
        seconds = (time.monotonic() - began) / len(names)
        for name in names:
            found.setdefault(name, {"status": "failed", "reason": fault, "stderr": last})
            found[name]["process_seconds"] = seconds
        return found


def work(folder: Path, names: list[str], *, toy: bool) -> None:
    """In a worker: prints `[name, row]` of each case."""
    warnings.filterwarnings("ignore")
    bench = Bench.make(folder, toy=toy)
    if toy:
        torch.set_num_threads(1)
    for name in names:
        print(json.dumps([name, _row(bench, name)]), flush=True)


def _row(bench: Bench, name: str) -> Row:
    from tests.gpu.cases import CASES  # imports Megatron, which the parent does without

    try:
        figures = CASES[name](bench)
    except Skipped as why:
        return {"status": "skipped", "reason": str(why)}
    except Exception as error:  # noqa: BLE001 - whatever a driver, a compiler or a kernel may raise
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500], "stderr": _trace()}
    wrong = [rule for rule, held in figures["holds"].items() if not held]
    if wrong:
        return {"status": "failed", "reason": f"does not hold: {', '.join(wrong)}", **figures}
    return {"status": "ok", **figures}


def _trace() -> str:
    return traceback.format_exc()[-2000:]


def _flags(names: list[str]) -> list[str]:
    return [flag for name in names for flag in ("--case", name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES_S), help="may be given again; all")
    parser.add_argument("--toy", action="store_true", help="on a CPU, small")
    parser.add_argument("--together", action="store_true", help="all cases in one process")
    parser.add_argument("--out", type=Path, help="rows are appended to this file as they come")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.case or list(CASES_S)
    if args.worker is not None:
        work(args.worker, names, toy=args.toy)
        return 0
    if not args.toy and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --toy runs the same on a CPU")
    with tempfile.TemporaryDirectory(prefix="megatron-tree-gpu-") as folder:
        table = Table(Path(folder), args.out, toy=args.toy)
        table.run(names, together=args.together)
    print(json.dumps(table.report()))
    return int(any(row["status"] in ("failed", "not run") for row in table.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
