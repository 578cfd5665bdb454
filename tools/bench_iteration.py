"""Where an iteration's time goes: a short run of the quickstart, real ranks and engine.

A phase is what the loop waits for (`time/…_s` of a run's metrics); its parts are the calls that it waited for
inside, and `driver`, which is the rest: packing, advantages, tree bookkeeping, tools. Requests overlap, so
that `grow` has none but how many were in flight. The first iteration compiles and is left out. On a machine
whose ranks and engines share the cores nothing follows about idle engines or about overlap. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))  # the quickstart is found however this is started
from examples.quickstart.prepare import prepare
from megatron_tree import loop
from megatron_tree.config import load
from megatron_tree.engine.pool import EnginePool
from megatron_tree.session import Session
from megatron_tree.types import GenerateRequest, GenerateResult, Update

T = TypeVar("T")
CONFIG = Path(__file__).parents[1] / "examples/quickstart/config.yaml"
PHASES = ("grow", "score", "train", "publish")


class Calls:
    """Seconds of the awaited calls, summed by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    async def timed(self, name: str, call: Awaitable[T]) -> T:
        begun = time.perf_counter()
        try:
            return await call
        finally:
            self.seconds[name] += time.perf_counter() - begun


class WatchedPool:
    """The pool, with its requests and updates timed."""

    def __init__(self, pool: EnginePool, calls: Calls) -> None:
        self._pool, self._calls = pool, calls
        self.metrics = pool.metrics

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        return await self._calls.timed("requests", self._pool(request))

    async def update(self, update: Update) -> None:
        await self._calls.timed("engines update", self._pool.update(update))


def watch(run: Session) -> Calls:
    """Times every call to the ranks and the engines of an open session."""
    calls = Calls()
    ask: Callable[..., Awaitable[list[Any]]] = run.trainer._all
    run.trainer._all = lambda method, *args, **more: calls.timed(method, ask(method, *args, **more))  # type: ignore[method-assign]
    run.pool = WatchedPool(run.pool, calls)  # type: ignore[assignment]
    return calls


async def measure(run: Session, profiler: cProfile.Profile | None) -> list[dict[str, Any]]:
    """Metrics of every iteration, with the seconds of its calls under `calls`."""
    found: list[dict[str, Any]] = []
    async with run:
        if not await run.restore():
            await run.warm_up()
        await run.publish()
        calls = watch(run)
        for iteration in range(run.config.train.iterations):
            calls.seconds.clear()
            if profiler is not None and iteration:
                profiler.enable()
            await loop.iterate(run)
            if profiler is not None:
                profiler.disable()
            found.append({**run.log.records()[-1], "calls": dict(calls.seconds)})
    return found


def report(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the iterations."""
    total = sum(record["time/iteration_s"] for record in found)
    phases = {phase: sum(record[f"time/{phase}_s"] for record in found) for phase in PHASES}
    calls: dict[str, float] = defaultdict(float)
    for record in found:
        for name, seconds in record["calls"].items():
            calls[name] += seconds
    tokens = sum(record["packing/unique_tokens"] for record in found)
    parts = {
        "score": {"ranks": calls["score"]},
        "train": {"ranks": calls["train"]},
        "publish": {
            "ranks write": calls["create_image"] + calls["write_version"],
            "engines update": calls["engines update"],
        },
    }
    return {
        "share": {phase: round(seconds / total, 4) for phase, seconds in phases.items()}
        | {"rest": round(1 - sum(phases.values()) / total, 4)},
        "share_inside": {
            phase: {name: round(seconds / phases[phase], 4) for name, seconds in inside.items()}
            | {"driver": round(1 - sum(inside.values()) / phases[phase], 4)}
            for phase, inside in parts.items()
        },
        "requests_in_flight_while_growing": round(calls["requests"] / phases["grow"], 2),
        "tokens_per_second": round(tokens / total, 1),
        "sampled_tokens_per_second_of_grow": round(
            sum(record["engine/sampled_tokens"] for record in found) / phases["grow"], 1
        ),
        "tokens_per_second_of_train": round(tokens / phases["train"], 1),
        "iteration_s": round(total / len(found), 3),
        "iterations": len(found),
        "unique_tokens": round(tokens / len(found)),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=4, help="beside the first, which compiles")
    parser.add_argument("--profile", action="store_true", help="print where the driver's time goes to stderr")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, for the quickstart's config")
    args = parser.parse_args()
    profiler = cProfile.Profile() if args.profile else None
    with tempfile.TemporaryDirectory(prefix="megatron-tree-bench-") as name:
        folder = Path(name)
        prepare(folder, seed=0)
        overrides = [
            f"run.dir={folder / 'run'}",
            f"model.path={folder / 'model'}",
            f"data.train=[{folder / 'train.jsonl'}]",
            "data.eval=[]",
            "eval={}",
            f"sft.data=[{folder / 'demonstrations.jsonl'}]",
            "sft.steps=40",
            f"train.iterations={args.iterations + 1}",
        ]
        run = Session(load(CONFIG, [*overrides, *args.overrides]))
        found = asyncio.run(measure(run, profiler))
    if profiler is not None:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    print(json.dumps(report(found[1:])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
