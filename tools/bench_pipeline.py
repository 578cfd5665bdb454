"""Measures how long pipeline stages wait, beside what the schedule says. One JSON line comes last.

    python tools/bench_pipeline.py             # PP 2, one pinned thread per rank; minutes on two cores
    python tools/bench_pipeline.py --profile   # also where each stage waits, and a step drawn to scale

All figures are of one run, one random Llama of 16 layers in fp32 and one packed tree, the same in every
micro-batch; of each size the fastest of its steps, the one that others disturbed least. `bubble_over_formula`
is the share of the pipeline's time in which no pass runs, over (pp - 1) / (m vpp + pp - 1). `log_log_slope`
is that of a step's seconds, optimizer included, over its tokens; `of_formula` that of m vpp + pp - 1.

Two cores carry two stages. They show whether the stages wait as 1F1B and interleaved 1F1B say, and what
sends, unequal stages and the schedule's own Python add. They cannot show a network, sends that overlap with
computing (gloo's threads share the rank's core), nor more than two stages at once: larger pipelines are
replayed from the processor time of single layers, recorded at a layer a chunk, without sends. How far such a
replay is from the clock is measured at PP 2 (`measured_over_replayed`). `clock_over_processor_time` of the
passes is 1 where nobody else used the cores; the measured figures mean what they say only near that.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # its other half is found however it is started
from megatron_tree.layout import ParallelLayout
from megatron_tree.planner.schedule import Pass, Timeline, replay
from tools.bench_pipeline_ranks import Plan, Run, Runs, run_ranks
from tools.bench_reshard import machine, make_model

PP, LAYERS = 2, 16
FINE = LAYERS // PP  # a layer a chunk
SIZES = (2, 4, 8, 16)  # micro-batches of a step
LARGER = ((4, 1), (4, 2), (8, 1), (8, 2))  # (pp, vpp)
Layer = dict[tuple[int, bool], float]  # seconds of a layer's pass of a micro-batch, forward or not


def formula(pp: int, vpp: int, num_microbatches: int) -> float:
    """Bubble of equal passes."""
    return (pp - 1) / (num_microbatches * vpp + pp - 1)


def report(runs: Runs, tokens: int) -> dict[str, Any]:
    """The ratios first, then what they are made of."""
    most = max(SIZES)
    layers = recorded(runs[FINE][most])
    larger = {(pp, vpp): replayed(layers, pp, vpp, most) for pp, vpp in LARGER}
    found: dict[str, Any] = {"bubble_over_formula": {}, "log_log_slope": {}, "measured_over_replayed": {}}
    detail: dict[str, Any] = {}
    for vpp in (1, 2):
        fastest = [min(runs[vpp][m], key=lambda run: run.wall) for m in SIZES]
        bubbles = {m: run.bubble for m, run in zip(SIZES, fastest, strict=True)}
        seconds = [min(run.seconds for run in runs[vpp][m]) for m in SIZES]
        found["bubble_over_formula"][f"vpp{vpp}"] = {m: bubbles[m] / formula(PP, vpp, m) for m in SIZES}
        found["log_log_slope"][f"vpp{vpp}"] = {
            "measured": slope(SIZES, seconds),
            "of_formula": slope(SIZES, [m * vpp + PP - 1 for m in SIZES]),
        }
        expected = replayed(layers, PP, vpp, most)
        found["measured_over_replayed"][f"vpp{vpp}"] = fastest[-1].wall / expected.wall
        used = sum(ran.processor_s for run in fastest for stage in run.passes for ran in stage)
        detail[f"vpp{vpp}"] = {
            "bubble": bubbles,
            "step_seconds": dict(zip(SIZES, seconds, strict=True)),
            "clock_over_processor_time": sum(sum(run.busy) for run in fastest) / used,
        }
    return found | {
        "replayed_bubble_over_formula": {
            f"pp{pp}_vpp{vpp}": timeline.bubble / formula(pp, vpp, most)
            for (pp, vpp), timeline in larger.items()
        },
        "replayed_speedup_over_pp2": {
            f"pp{pp}_vpp{vpp}": replayed(layers, PP, 1, most).wall / timeline.wall
            for (pp, vpp), timeline in larger.items()
        },
        **detail,
        "tokens_of_a_micro_batch": tokens,
        "steps": len(runs[FINE][most]),  # of each size
        "machine": machine(),
        "load_average": os.getloadavg()[0],
    }


def recorded(runs: Sequence[Run]) -> list[Layer]:
    """Median processor seconds of every pass of every layer, from steps with a layer a chunk."""
    found: dict[int, dict[tuple[int, bool], list[float]]] = {}
    for run in runs:
        for stage, passes in enumerate(run.passes):
            for ran in passes:
                times = found.setdefault(ran.one.chunk * len(run.passes) + stage, {})
                times.setdefault((ran.one.micro_batch, ran.one.forward), []).append(ran.processor_s)
    return [{key: median(times) for key, times in found[layer].items()} for layer in sorted(found)]


def replayed(layers: Sequence[Layer], pp: int, vpp: int, num_microbatches: int) -> Timeline:
    """A pipeline whose chunks are equal runs of the recorded layers."""
    layout = ParallelLayout(pp=pp, vpp=vpp)

    def seconds(stage: int, one: Pass) -> float:
        chunk = layout.stage_layers(len(layers), stage, one.chunk)
        return sum(layers[layer][one.micro_batch, one.forward] for layer in chunk)

    return replay(layout, num_microbatches, seconds)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of log values over log sizes, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def drawn(run: Run, columns: int = 100) -> str:
    """A line per stage: chunks of forward passes as letters, of backward passes as capitals, `.` is waiting.
    Each column is what runs at its middle."""
    began, width = run.pipeline[0], run.wall / columns
    lines = []
    for stage in run.passes:
        line = ["."] * columns
        for ran in stage:
            letter = "abcdefghijklmnopqrstuvwxyz"[ran.one.chunk]
            for column in range(columns):
                if ran.span[0] <= began + (column + 0.5) * width < ran.span[1]:
                    line[column] = letter if ran.one.forward else letter.upper()
        lines.append("".join(line))
    return "\n".join(lines)


def waits(run: Run) -> list[tuple[float, float, float]]:
    """Seconds each stage waits before its first pass, between passes and behind the last one."""
    began, ended = run.pipeline
    found = []
    for stage, busy in zip(run.passes, run.busy, strict=True):
        first, last = stage[0].span[0], stage[-1].span[1]
        found.append((first - began, last - first - busy, ended - last))
    return found


def profile(runs: Runs, write: Callable[[str], object]) -> None:
    for vpp, by_size in runs.items():
        for size, steps in by_size.items():
            run = min(steps, key=lambda step: step.wall)
            write(f"\nPP {PP} x VPP {vpp}, {size} micro-batches, fastest step: {run.wall:.3f} s, ")
            write(f"bubble {run.bubble:.1%}, by the formula {formula(PP, vpp, size):.1%}\n")
            for stage, (busy, (before, between, behind)) in enumerate(zip(run.busy, waits(run), strict=True)):
                write(f"stage {stage}: busy {busy:.3f} s; waits {before:.3f} s before the first pass, ")
                write(f"{between:.3f} s between passes, {behind:.3f} s behind the last\n")
            if size <= 4 and vpp <= 2:
                write(drawn(run) + "\n")


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=288, help="of the model, a multiple of 24")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each size")
    parser.add_argument("--profile", action="store_true", help="print where stages wait to stderr")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and files go
    with tempfile.TemporaryDirectory(prefix="megatron-tree-bench-") as folder:
        make_model(Path(folder), LAYERS, args.hidden, vocab=2048, seed=1)
        plan = Plan(folder, {1: SIZES, 2: SIZES, FINE: SIZES[-1:]}, args.steps)
        runs, tokens = run_ranks(plan, PP)
    if args.profile:
        profile(runs, sys.stderr.write)
    print(json.dumps(rounded(report(runs, tokens))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
