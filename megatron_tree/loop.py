"""The story of a run: one verb per stage, no branch on a back end.

    prompts -> grow trees -> score -> learn (advantages, packing, pipeline step) -> publish -> next iteration

Departures from the paper: weights are published after every iteration, and old log-probs are the trainer's
own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megatron_tree.config import Config
from megatron_tree.evaluate import Result, gain_interval
from megatron_tree.metrics import Metrics, merge, values
from megatron_tree.rollout import budget
from megatron_tree.rollout import report as trees
from megatron_tree.session import Session, StopRequested
from megatron_tree.train.group import TrainerFailed
from megatron_tree.types import Group

SAMPLE_TREES = 2  # shown in TensorBoard, per iteration


@dataclass
class Story:
    """What the summary tells of a run."""

    start: float = field(default_factory=time.perf_counter)
    before: Result | None = None
    after: Result | None = None
    rewards: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    sharing: list[float] = field(default_factory=list)


async def train(run: Session) -> dict[str, object]:
    """Warm-up, then iterations until `train.iterations`. Returns the summary. StopRequested leaves a
    checkpoint."""
    story, config = Story(), run.config
    try:
        if not await run.restore():
            await run.warm_up()
        run.log.restart_after(run.iteration)
        await run.publish()
        if config.eval.at_start and run.iteration == 0:
            story.before = await evaluate(run)
        run.progress.start_clock()
        while run.iteration < config.train.iterations:
            try:
                await iterate(run, story)
            except TrainerFailed as failure:
                await run.recover(failure)
        if config.eval.at_end:
            story.after = await evaluate(run)
        await run.save(wait=True)
    except StopRequested:
        await run.save(wait=True)
        raise
    return summary(run, story)


async def iterate(run: Session, story: Story) -> None:
    run.progress.timer.seconds.clear()
    begun = time.perf_counter()
    groups = await run.grow()
    await run.score(groups)
    learned = await run.learn(groups)
    await run.publish()
    await run.settle()
    run.iteration += 1
    tell(run, story, groups, learned, time.perf_counter() - begun)
    if run.config.eval.every and run.iteration % run.config.eval.every == 0:
        await evaluate(run)
    if run.config.train.checkpoint_every and run.iteration % run.config.train.checkpoint_every == 0:
        await run.save()


async def evaluate(run: Session) -> Result:
    result = await run.evaluate()
    if run.trains:
        await run.mark_best(result)
    run.log.scalars(run.iteration, result.scalars())
    low, high = result.interval
    greedy = f"  greedy {result.greedy['success']:.3f}" if result.greedy else ""
    run.progress.say(
        f"evaluation after {run.iteration}  success {result.success:.3f} [{low:.3f}, {high:.3f}]{greedy}"
    )
    return result


async def warm_up(run: Session) -> dict[str, object]:
    """The command `sft`: the warm-up alone; the weights are in the run folder's reference/."""
    if await run.restore():
        raise ValueError(f"run.dir: {run.folder.reference} is there already")
    await run.warm_up()
    return {"weights": str(run.folder.reference), "steps": run.config.sft.steps if run.config.sft else 0}


async def evaluate_only(run: Session) -> dict[str, object]:
    """The command `eval`: the model folder's weights on the held-out rows."""
    await run.engines_ready()
    result = await evaluate(run)
    return {"success": result.success, "success_ci": list(result.interval), **result.scalars()}


def tell(run: Session, story: Story, groups: list[Group], learned: Metrics, seconds: float) -> None:
    """Everything that is logged of one iteration."""
    found = merge(
        [trees.metrics(groups), budget.metrics(groups, run.config.rollout), learned, run.pool.metrics()]
    )
    scalars = values(found) | run.progress.timer.metrics()
    tokens = sum(tree.num_unique_tokens for group in groups for tree in group.trees)
    scalars |= {
        "time/iteration_s": seconds,
        "throughput/tokens_per_s": tokens / seconds,
        "policy/version": float(run.version),
    }
    run.log.scalars(run.iteration, scalars)
    for group in groups:
        for tree in group.trees:
            run.log.tree(run.iteration, trees.record(tree, run.tokens))
    for index, group in enumerate(groups[:SAMPLE_TREES]):
        text = trees.describe(group.trees[0], run.tokens)
        run.log.text(run.iteration, f"trees/{index}", f"```\n{text}\n```")
    story.rewards.append(scalars["rollout/reward"])
    story.gaps.append(scalars["policy/logprob_gap_max"])
    story.sharing.append(scalars["rollout/copied_over_unique_tokens"])
    run.progress.iteration_done(run.iteration, scalars)


def summary(run: Session, story: Story) -> dict[str, object]:
    """Numbers are null where the config asked for no evaluation or a resumed run had nothing left to do."""
    before, after, config = story.before, story.after, run.config
    return {
        "iterations": run.iteration,
        "success_before": before.success if before else None,
        "success_after": after.success if after else None,
        "success_ci": list(after.interval) if after else None,
        "success_before_ci": list(before.interval) if before else None,
        "success_gain_ci": list(gain_interval(before, after)) if before and after else None,
        "greedy_before": before.greedy.get("success") if before else None,
        "greedy_after": after.greedy.get("success") if after else None,
        "reward_first": story.rewards[0] if story.rewards else None,
        "reward_last": story.rewards[-1] if story.rewards else None,
        "tp": config.train.parallel.tp,
        "pp": config.train.parallel.pp,
        "dp": config.train.parallel.dp,
        "engines": config.engine.count,
        "policy_version": run.version,
        "best_iteration": run.best[0] if run.best else None,
        "max_logprob_gap": max(story.gaps, default=None),
        "copied_over_unique_tokens": sum(story.sharing) / len(story.sharing) if story.sharing else None,
        "wall_s": round(time.perf_counter() - story.start, 1),
        "run_dir": str(run.folder.path),
    }


def settings(config: Config) -> str:
    """One line that says what is about to run."""
    rollout, layout = config.rollout, config.train.parallel
    return (
        f"{rollout.prompts} prompts x M {rollout.trees} N {rollout.expand_nodes} L {rollout.expand_rounds}, "
        f"trainer TP {layout.tp} PP {layout.pp} DP {layout.dp}, "
        f"{config.engine.count} engines TP {config.engine.tp}"
    )
