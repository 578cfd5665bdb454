"""Does FP8 training end where fp32 training does? The quickstart, several seeds, under both. JSON comes last.

    python -m tools.study_fp8 --out runs/study_fp8

Every run is a `megatron-tree train` of its own: the quickstart's config on one rank, blocks of 128 need feed
forward layers of 512 instead of 544, in both precisions. A seed draws the questions, the demonstrations, the
first weights and the run. The trainer's products are rounded, engines serve the unrounded weights. A run
whose summary is there is not repeated, one that was cut off goes on from its last checkpoint. Left out: time,
which emulation says nothing about.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the quickstart is found however this is started
from examples.quickstart.prepare import prepare
from megatron_tree.evaluate import Z95
from megatron_tree.train.precision import RECIPES

CONFIG = Path(__file__).parents[1] / "examples/quickstart/config.yaml"
FFN = 512
CHECKPOINT_EVERY = 5  # iterations
T95 = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060, 9: 2.2622}
"""Two-sided 95 % of Student's distribution by its degrees of freedom."""


def overrides(folder: Path, run: Path, seed: int, fp8: str) -> list[str]:
    return [
        f"run.dir={run}",
        f"run.seed={seed}",
        f"model.path={folder / 'model'}",
        f"data.train=[{folder / 'train.jsonl'}]",
        f"data.eval=[{folder / 'test.jsonl'}]",
        f"sft.data=[{folder / 'demonstrations.jsonl'}]",
        "train.parallel={}",  # one rank
        f"train.checkpoint_every={CHECKPOINT_EVERY}",
        "train.export_checkpoints=true",
        f"train.fp8={fp8}",
    ]


def train(folder: Path, run: Path, seed: int, fp8: str, before: Sequence[str], more: Sequence[str]) -> None:
    """One run, unless it is done. Its own output is in `train.log` beside its folder."""
    if (run / "summary.json").exists():
        return
    if not (folder / "model" / "config.json").exists():
        prepare(folder, seed, FFN)
    command = [*before, sys.executable, "-m", "megatron_tree.cli", "train", str(CONFIG)]
    command += [*overrides(folder, run, seed, fp8), *more, "--resume"]
    print(shlex.join(command), file=sys.stderr, flush=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_suffix(".log").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of a mean over seeds, each an independent draw: Student's. None of one seed."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return None
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    half = T95[n - 1] * math.sqrt(variance / n)
    return mean - half, mean + half


def compare(exact: Sequence[Mapping[str, Any]], rounded: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the summaries of runs in the order of their seeds.

    Two intervals of the difference in success, both paired by seed: over seeds (Student's; new seeds would
    end in it) and over questions (the normal one; new questions to these very runs would).
    """
    differences = [b["success_after"] - a["success_after"] for a, b in zip(exact, rounded, strict=True)]
    mean = sum(differences) / len(differences)
    variances = [((s["success_ci"][1] - s["success_ci"][0]) / 2 / Z95) ** 2 for s in (*exact, *rounded)]
    half = Z95 * math.sqrt(sum(variances)) / len(differences)
    over_seeds, over_questions = mean_interval(differences), (mean - half, mean + half)
    return {
        "success_difference": round(mean, 4),
        "difference_ci_over_seeds": _rounded(over_seeds),
        "difference_ci_over_questions": _rounded(over_questions),
        "differ": None if over_seeds is None else not over_seeds[0] <= 0 <= over_seeds[1],
    }


def report(summaries: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    (_, exact), (_, rounded) = summaries.items()
    return compare(exact, rounded) | {name: _of_precision(runs) for name, runs in summaries.items()}


def _of_precision(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    after = [run["success_after"] for run in runs]
    return {
        "success_before": [round(run["success_before"], 4) for run in runs],
        "success_after": [round(value, 4) for value in after],
        "success_after_ci": [_rounded(run["success_ci"]) for run in runs],
        "mean_success_after": round(sum(after) / len(after), 4),
        "mean_ci_over_seeds": _rounded(mean_interval(after)),
        "max_logprob_gap": [run["max_logprob_gap"] for run in runs],
        "wall_s": [run["wall_s"] for run in runs],
    }


def _rounded(pair: Sequence[float] | None) -> list[float] | None:
    return None if pair is None else [round(value, 4) for value in pair]


def summaries_of(args: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for name, fp8 in (("fp32", "null"), (args.recipe, f"{{recipe: {args.recipe}}}")):
        runs = {seed: args.out / f"{name}_seed{seed}" for seed in args.seeds}
        for seed, run in runs.items():
            train(args.out / f"data_seed{seed}", run, seed, fp8, shlex.split(args.before), args.overrides)
        yield name, [json.loads((run / "summary.json").read_text(encoding="utf-8")) for run in runs.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = "a run that is whole there is not done again, whatever its settings were"
    parser.add_argument("--out", type=Path, default=Path("runs/study_fp8"), help=out)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", choices=RECIPES, default="blockwise", help="of train.fp8")
    parser.add_argument("--before", default="", help="put before the command of every run, e.g. a queue's")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, for all runs")
    args = parser.parse_args()
    print(json.dumps(report(dict(summaries_of(args)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
