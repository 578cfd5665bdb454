"""The story of a run: one verb per stage, no branch on a back end.

    prompts -> grow trees -> score -> learn (advantages, packing, pipeline step) -> publish -> next iteration

Departures from the paper: weights are published after every iteration, and old log-probs are the trainer's
own. With `rollout.async_depth` 1 the order of the verbs is the same; `grow` then finds trees that grew while
the last iteration was trained.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from megatron_tree.evaluate import Result, gain_interval
from megatron_tree.metrics import Metrics, merge, values
from megatron_tree.rollout import budget
from megatron_tree.rollout import report as trees
from megatron_tree.session import Session
from megatron_tree.train.group import TrainerFailed

SAMPLE_TREES = 2  # shown in TensorBoard, per iteration


@dataclass
class Story:
    """What the summary tells beside the logged numbers."""

    start: float = field(default_factory=time.perf_counter)
    before: Result | None = None
    after: Result | None = None
    ended: bool = False


async def train(run: Session) -> dict[str, object]:
    """Warm-up, then iterations until `train.iterations`. Returns the summary. StopRequested, and the failure
    of engines or tools, leave a checkpoint."""
    story = Story()
    await survived(run, begin(run))
    run.progress.start_clock()
    while not story.ended:
        await survived(run, go_on(run, story))
    return summary(run, story)


async def begin(run: Session) -> None:
    """To where the first iteration can start."""
    if not await run.restore():
        await run.warm_up()
    run.log.restart_after(run.iteration)
    await run.publish()


async def go_on(run: Session, story: Story) -> None:
    """From the last whole iteration to the end."""
    config = run.config
    if config.eval.at_start and run.iteration == 0 and story.before is None:
        story.before = await evaluate(run)
    while run.iteration < config.train.iterations:
        await iterate(run)
    if config.eval.at_end:
        story.after = await evaluate(run)
    await run.save(wait=True)
    story.ended = True


async def survived(run: Session, work: Awaitable[None]) -> None:
    """`work`, or as much as is done when the trainer fails, and then a new one, at the latest checkpoint."""
    try:
        await work
    except TrainerFailed as failure:
        await recover(run, failure)


@asynccontextmanager
async def kept(run: Session) -> AsyncIterator[None]:
    """What is trained by now is saved where the rest, which trains nothing, fails or is cut short."""
    try:
        yield
    except TrainerFailed:
        raise
    except Exception:  # a stop, or what engines, tools and the user's own classes raise: anything
        if run.trains:
            await run.save(wait=True)
        raise


async def recover(run: Session, failure: TrainerFailed) -> None:
    """Until a new trainer group stands, or the restarts are used up: a new one may fail too."""
    try:
        await run.recover(failure)
    except TrainerFailed as again:
        if again is failure:
            raise  # no restart is left
        await recover(run, again)


async def iterate(run: Session) -> None:
    run.progress.timer.seconds.clear()
    begun = time.perf_counter()
    async with kept(run):
        async for ended in run.grow():
            await run.settle()  # a checkpoint that was written meanwhile counts from here on
            await run.score(ended)  # while others still grow
    learned = await run.learn()
    await run.publish()
    run.iteration += 1
    tell(run, learned, time.perf_counter() - begun)
    if run.config.eval.every and run.iteration % run.config.eval.every == 0:
        await evaluate(run)
    if run.config.train.checkpoint_every and run.iteration % run.config.train.checkpoint_every == 0:
        await run.save()


async def evaluate(run: Session) -> Result:
    async with kept(run):
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


def tell(run: Session, learned: Metrics, seconds: float) -> None:
    """Everything that is logged of one iteration."""
    groups = run.groups
    found = merge(
        [trees.metrics(groups), budget.metrics(groups, run.config.rollout), learned, run.pool.metrics()]
    )
    scalars = values(found) | run.progress.timer.metrics()
    tokens = sum(tree.num_unique_tokens for group in groups for tree in group.trees)
    scalars |= {
        "time/iteration_s": seconds,
        "throughput/tokens_per_s": tokens / seconds,
        "policy/version": float(run.publisher.version),
    }
    run.log.scalars(run.iteration, scalars)
    for group in groups:
        for tree in group.trees:
            run.log.tree(run.iteration, trees.record(tree, run.tokens))
    for index, group in enumerate(groups[:SAMPLE_TREES]):
        text = trees.describe(group.trees[0], run.tokens)
        run.log.text(run.iteration, f"trees/{index}", f"```\n{text}\n```")
    run.progress.iteration_done(run.iteration, scalars)


def summary(run: Session, story: Story) -> dict[str, object]:
    """From the run's own log, so that a resumed run tells the whole story. Null: the config asked for no
    evaluation; the start's intervals are null also after a resume, for the log keeps no single questions."""
    records, before, after = run.log.records(), story.before, story.after
    steps = [record for record in records if "rollout/reward" in record]
    start = next((r["eval/success"] for r in records if r["step"] == 0 and "eval/success" in r), None)
    sharing = [record["packing/copied_over_unique"] for record in steps]
    layout = run.config.train.parallel
    return {
        "iterations": run.iteration,
        "success_before": start,
        "success_after": after.success if after else None,
        "success_ci": list(after.interval) if after else None,
        "success_before_ci": list(before.interval) if before else None,
        "success_gain_ci": list(gain_interval(before, after)) if before and after else None,
        "greedy_before": before.greedy.get("success") if before else None,
        "greedy_after": after.greedy.get("success") if after else None,
        "reward_first": steps[0]["rollout/reward"] if steps else None,
        "reward_last": steps[-1]["rollout/reward"] if steps else None,
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "engines": run.config.engine.count,
        "policy_version": run.publisher.version,
        "best_iteration": run.best[0] if run.best else None,
        "max_logprob_gap": max((record["policy/logprob_gap_max"] for record in steps), default=None),
        "copied_over_unique_tokens": sum(sharing) / len(sharing) if sharing else None,
        "wall_s": round(time.perf_counter() - story.start, 1),
        "run_dir": str(run.folder.path),
    }
