"""Evaluation: chains on held-out rows, sampled and greedy, scored per data source with a confidence interval.

The same rows and seeds every time, so that two evaluations of a run are paired. Not here: when it runs
(`loop`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_tree.config import EvalConfig, RolloutConfig
from megatron_tree.rollout.grow import SeedPath
from megatron_tree.rollout.reward import exact_match, token_f1
from megatron_tree.types import Group, Row

Z95 = 1.959964  # two-sided 95 % of the normal distribution


@dataclass(frozen=True, slots=True)
class Result:
    """One evaluation. `by_question` holds each question's mean success, in the rows' order."""

    sampled: dict[str, float]  # metric name -> value
    greedy: dict[str, float]  # empty when not asked for
    by_question: tuple[float, ...]

    @property
    def success(self) -> float:
        return self.sampled["success"]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the success rate."""
        return interval(self.by_question)

    def scalars(self) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in self.sampled.items()} | {
            f"eval_greedy/{name}": value for name, value in self.greedy.items()
        }


class Grow(Protocol):
    def __call__(
        self, rows: Sequence[Row], rollout: RolloutConfig, seed: SeedPath, *, temperature: float
    ) -> Awaitable[list[Group]]: ...


async def run(grow: Grow, rows: Sequence[Row], rollout: RolloutConfig, config: EvalConfig) -> Result:
    """Chains on `rows`: `config.samples` a row, and one greedy if asked for."""
    seed = SeedPath((config.seed, "eval"))
    chains = rollout.model_copy(update={"expand_rounds": 0, "trees": config.samples})
    sampled = await grow(rows, chains, seed, temperature=config.temperature)
    greedy: list[Group] = []
    if config.greedy:
        one = chains.model_copy(update={"trees": 1})
        greedy = await grow(rows, one, seed / "greedy", temperature=0.0)
    return summarise(sampled, greedy)


def interval(by_question: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean over questions. The chains of a question are not independent; the questions
    are."""
    values = np.asarray(by_question)
    half = Z95 * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return float(values.mean() - half), float(values.mean() + half)


def gain_interval(before: Result, after: Result) -> tuple[float, float]:
    """95 % interval of the rise in success, paired by question."""
    return interval(np.subtract(after.by_question, before.by_question).tolist())


def summarise(sampled: Sequence[Group], greedy: Sequence[Group]) -> Result:
    by_question = tuple(float(np.mean([leaf.success for t in g.trees for leaf in t.leaves])) for g in sampled)
    return Result(_scores(sampled), _scores(greedy) if greedy else {}, by_question)


def _scores(groups: Sequence[Group]) -> dict[str, float]:
    """Success, reward, exact match, F1 and turns: over everything, then success, exact match and F1 per
    source."""
    everything: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        source = group.row.data_source
        for tree in group.trees:
            for leaf in tree.leaves:
                answer = leaf.answer or ""
                scores = {
                    "success": leaf.success,
                    "exact_match": exact_match(answer, group.row.targets),
                    "f1": token_f1(answer, group.row.targets),
                }
                for name, value in scores.items():
                    everything[name].append(value)
                    everything[f"{source}/{name}"].append(value)
                everything["reward"].append(leaf.reward)
                everything["turns"].append(float(len(tree.path(leaf.node)) - 1))
    return {name: float(np.mean(values)) for name, values in everything.items()}
