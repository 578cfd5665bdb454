"""The parts of a run put together, and one method per verb of `loop`: warm up, grow, score, learn, publish,
save, restore.

Everything that needs no process is checked before the first one starts. Not here: the order of the verbs
(`loop`), files (`runfolder`), what is shown (`report`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from megatron_tree import cluster, evaluate
from megatron_tree.algo import batch as batching
from megatron_tree.algo.packing import scatter
from megatron_tree.config import Config, RolloutConfig
from megatron_tree.data.demonstrations import batch_of, load_demonstrations
from megatron_tree.data.prompts import PromptOrder, load_prompts
from megatron_tree.metrics import Metrics, RunLog, Sum, mean, merge
from megatron_tree.placement import place
from megatron_tree.planner.estimate import train_state
from megatron_tree.planner.limits import check_kernels, check_memory
from megatron_tree.publishing import Publisher, with_transport
from megatron_tree.report import Progress
from megatron_tree.reshard import image
from megatron_tree.reshard.image import Folder
from megatron_tree.reshard.names import check_model, read_shape
from megatron_tree.rollout.episode import build
from megatron_tree.rollout.grow import SeedPath, grow_groups
from megatron_tree.rollout.iterations import Iterations
from megatron_tree.rollout.report import version_metrics
from megatron_tree.rollout.tokens import Tokens
from megatron_tree.runfolder import RunFolder
from megatron_tree.stopping import Stopping, StopRequested, cancel
from megatron_tree.train import precision
from megatron_tree.train.group import Objective, RankSetup, StepResult, TrainerFailed, TrainerGroup
from megatron_tree.turns import SharedTurns, Turns
from megatron_tree.types import Group, Row, StepBatch, Tree

SCORED_AT_ONCE = 4  # micro-batches per stage of a rank's pipeline: fewer would leave it mostly empty


class Session:
    """`trains` and `rolls_out` say which processes a command needs."""

    def __init__(self, config: Config, *, trains: bool = True, rolls_out: bool = True) -> None:
        self.config, self.trains, self.rolls_out = config, trains, rolls_out
        self.layout = config.train.parallel.layout
        self.shape = read_shape(config.model.path)
        Folder(config.model.path).check(self.shape)
        self.tokens = Tokens(config.model.path)
        self.skipped_prompts: dict[str, int] = {}
        if trains:
            check_model(self.shape, self.layout)
            precision.check(config.train.fp8, None, self.shape, self.layout)
        if rolls_out:
            self.environment = build(config.environment, "environment")
            self.reward = build(config.reward, "reward")
        if trains and rolls_out:
            self.order = PromptOrder(self._rows("train"), seed=config.run.seed, shuffle=config.data.shuffle)
            self._first_prompts = self.order.state_dict()
            self.trees = self._iterations()
        self.eval_rows = self._rows("eval")[: config.eval.max_rows] if rolls_out and config.data.eval else []
        self.demonstrations = self._demonstrations() if trains and config.sft is not None else []
        self.folder = RunFolder(config)
        self.iteration = 0  # whole ones
        self.groups: list[Group] = []  # of the iteration under way, once they have all ended
        self.best: tuple[int, float] | None = None  # (iteration, success)
        self.stopping = Stopping()
        self._turns = Turns()  # on the devices
        self._restarts = self._skipped_in_a_row = 0
        self._warm = False  # the warm-up is over, or there is none
        self._saving: tuple[int, dict[str, Any]] | None = None  # the checkpoint that is being written
        self._opened = contextlib.AsyncExitStack()

    # -- opening and closing: processes

    async def __aenter__(self) -> Self:
        self.folder.claim()
        async with self._opened:  # what was started is stopped where the rest does not start
            await self._open()
            self._opened = self._opened.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is asyncio.CancelledError and self.trains:
            await self.trainer.kill()  # asked to stop at once
        await self._opened.aclose()

    async def _open(self) -> None:
        enter, later = self._opened.enter_context, self._opened.push_async_callback
        if self.rolls_out:
            # a server that is not there is said before anything starts
            await self._check_environment()
            later(_maybe, self.environment, "close")
        self.log = enter(contextlib.closing(RunLog(self.folder.path, self.config.run.wandb_project)))
        self.progress = enter(Progress(self.config.train.iterations))
        with self.progress.phase("start"):
            enter(cluster.running_ray())
            places = self._places()
        if self.rolls_out:
            self.engine = self.config.engine
            if self.trains:
                self.engine = with_transport(self.engine, places, self.progress.say)
                if not self.engine.is_sent:
                    image_bytes = image.size(self.shape, precision.DTYPES[self.engine.dtype])
                    places.check_room(self.engine.image_dir, self.folder.run_id, image_bytes)
            self.pool = cluster.engine_pool(self.config.model.path, self.engine, places)
            self.pool.say = self.progress.say
            later(self.pool.stop)
            # engines start while the trainer starts and warms up
            self._pool_start = asyncio.ensure_future(self.pool.start())
            later(cancel, self._pool_start)
            if self.trains:
                later(self.trees.drop, 0)
        if self.trains:
            transport = cluster.trainer_transport(RankSetup.of(self.config), places)
            self.trainer = TrainerGroup(self.layout, self.config.train, transport)
            later(self._stop_trainer)
        if self.trains and self.rolls_out:
            if self.engine.is_sent:
                self.pool.feed = self.trainer
            if places.placement.mode == "colocated":
                self._turns = SharedTurns(self.pool, self.trainer, self._pool_start)
            self.publisher = Publisher(
                self.trainer, self.pool, self._turns, self.folder.run_id, self.progress.say
            )
        for split, count in self.skipped_prompts.items():
            if count:
                self.progress.say(f"data.{split}: {count} prompts over data.max_prompt_tokens skipped")

    def _places(self) -> cluster.Places:
        """ValueError for what this cluster cannot hold."""
        nodes = cluster.nodes()
        found = place(self.config, nodes, trains=self.trains, rolls_out=self.rolls_out)
        if self.trains and not found.ranks[0].gpus:
            check_kernels(self.config, self.shape, precision.Device(None))
        if found.mode == "colocated":
            if any(node.num_gpus for node in nodes):
                check_memory(self.config, self.shape, train_state(self.config))
            else:
                self.progress.say("colocated on a CPU: engines take turns, but keep their memory meanwhile")
        return cluster.Places(found, self.layout)

    async def _check_environment(self) -> None:
        try:
            await _maybe(self.environment, "check")
        except RuntimeError as error:
            raise ValueError(f"environment: {error}") from error

    async def _stop_trainer(self) -> None:
        try:
            await self.trainer.stop()
        except (TrainerFailed, ValueError) as failure:
            self.progress.say(f"while stopping: {failure}")

    # -- weights: where they come from, where they go

    async def restore(self) -> bool:
        """Starts the trainer where the run folder left off. False: before the warm-up that the config asks
        for."""
        latest, warm_up = self.folder.latest(), self.config.sft is not None
        self._warm = not warm_up or self.folder.reference.exists()
        base = str(self.folder.reference) if warm_up and self._warm else self.config.model.path
        with self.progress.phase("start"):
            await self._turns.train(then_publish=True)
            await self.trainer.start(base)
            if not self._warm:
                return False
            if self.config.algo.kl_coef > 0:
                await self.trainer.take_reference(base)
            await self._begin()
            if latest is not None:
                folder, state = latest
                await self.trainer.load(str(folder / "megatron"))
                self._set_state(state)
        return True

    async def warm_up(self) -> None:
        """SFT on the demonstrations; what comes out is the reference model and iteration 0."""
        sft = self.config.sft
        assert sft is not None, "restore said so"
        self.log.restart_after(-sft.steps)  # an earlier try was not finished
        await self.trainer.begin(sft.optimizer, sft.steps)
        with self.progress.phase("warm-up"):
            for step in range(sft.steps):
                self.stopping.check()
                batch, packing = batching.sft_batch(
                    batch_of(self.demonstrations, sft.batch_size, self.config.run.seed, step), self.spec
                )
                result = await self._step(batch, packing, "sft")
                loss = result.metrics["sft/nll"].value
                self.progress.detail(f"step {step + 1}/{sft.steps}  loss {loss:.4f}")
                scalars = {"sft/loss": loss, "sft/grad_norm": result.grad_norm}
                self.log.scalars(step + 1 - sft.steps, scalars)
        await self.trainer.export(str(self.folder.reference))
        if self.config.algo.kl_coef > 0:
            await self.trainer.take_reference(None)
        await self._begin()
        self._warm = True

    async def engines_ready(self) -> None:
        with self.progress.phase("start"):
            await self._pool_start

    async def publish(self) -> None:
        """The actor's weights, as a new version, into every engine. Trees that grow ahead end first, for a
        tree holds one version; a stop drops them."""
        with self.progress.phase("grow"):
            try:
                await self.stopping.unless(self.trees.idle())
            except StopRequested:
                await self.trees.drop(self.iteration + 1)
        with self.progress.phase("publish"):
            await self._pool_start
            await self.publisher.publish()

    async def save(self, *, wait: bool = False) -> None:
        """Begins a checkpoint, which becomes the latest once it is whole: see `settle`."""
        with self.progress.phase("checkpoint"):
            await self.settle(wait=True)
            if self.folder.has(self.iteration) or not self._warm:
                return  # nothing new: the warm-up has no checkpoints
            aside = self.folder.partial(self.iteration)
            aside.mkdir(parents=True)
            await self._turns.train(then_publish=False)
            await self.trainer.save(str(aside / "megatron"))
            if self.config.train.export_checkpoints:
                await self.trainer.export(str(aside / "hf"))
            self._saving = (self.iteration, self._state())
            if wait:
                await self.settle(wait=True)

    async def settle(self, *, wait: bool = False) -> None:
        """Names the checkpoint that is being written the latest, if it is whole by now."""
        if self._saving is not None and await self.trainer.saved(blocking=wait):
            self.folder.finish(*self._saving)
            self._saving = None

    async def recover(self, failure: TrainerFailed) -> None:
        """A new trainer group from the latest checkpoint, a bounded number of times; the engines stay."""
        await self.trainer.kill()
        await self.trees.drop(0)
        self._saving = None  # its ranks are gone
        self._restarts += 1
        if self._restarts > self.config.train.max_restarts:
            raise failure
        self.progress.say(
            f"{failure}; restarting the trainer ({self._restarts} of {self.config.train.max_restarts})"
        )
        self.iteration, version = 0, self.publisher.version
        self.order.load_state_dict(self._first_prompts)
        if not await self.restore():
            await self.warm_up()
        self.publisher.version = version  # engines count on, whatever the checkpoint says
        self.log.restart_after(self.iteration)
        await self.publish()

    # -- one iteration

    async def grow(self) -> AsyncIterator[list[Group]]:
        """The groups of this iteration's prompts as they end, some at a time; then all are in `groups`. Cut
        short by a stop; the prompts are then taken again."""
        self.stopping.check()  # trees that grew ahead would not be waited for
        await self._turns.generate()
        chunks = self.trees.groups(self.iteration)
        while True:
            with self.progress.phase(
                "grow", f"iteration {self.iteration + 1}/{self.config.train.iterations}"
            ):
                async with contextlib.AsyncExitStack() as cut_short:
                    cut_short.push_async_callback(self.trees.drop, self.iteration)
                    chunk = await self.stopping.unless(anext(chunks, None))
                    cut_short.pop_all()
            if chunk is None:
                self.groups = self.trees.grown(self.iteration)
                return
            yield chunk

    async def score(self, groups: Sequence[Group]) -> None:
        """Old and reference log-probs of every node, by forward passes over packed trees."""
        trees = [tree for group in groups for tree in group.trees]
        with self.progress.phase("score"):
            await self._turns.train(then_publish=True)
            batch, spans = batching.scoring_batch(trees, self.spec)
            scatter(spans, await self.trainer.score(batch, "actor"), "old_logprobs")
            if self.config.algo.kl_coef > 0:
                scatter(spans, await self.trainer.score(batch, "reference"), "ref_logprobs")

    async def learn(self) -> Metrics:
        """The iteration's optimizer steps; metrics are reduced over them."""
        found = [version_metrics(self.groups, self.publisher.version)]
        lag = found[0]["rollout/version_lag"].value
        assert lag <= self.config.rollout.async_depth, f"trees are {lag} versions old"
        with self.progress.phase("train"):
            for part in batching.split(self.groups, self.config.train.mini_batches):
                result = await self._step(*batching.step_batch(part, self.config.algo, self.spec), "policy")
                found.append(result.metrics)
        return merge(found)

    async def evaluate(self) -> evaluate.Result:
        """Sampled, and if asked for greedy, chains on the held-out rows."""
        with self.progress.phase("evaluate"):
            await self._turns.generate()
            work = evaluate.run(self._grown, self.eval_rows, self.config.rollout, self.config.eval)
            return await self.stopping.unless(work)

    async def mark_best(self, result: evaluate.Result) -> None:
        """Keeps the weights of the best evaluation as a Hugging Face folder."""
        if self.best is not None and result.success <= self.best[1]:
            return
        self.best = (self.iteration, result.success)
        await self.trainer.export(str(self.folder.best))

    # -- details

    async def _grown(
        self,
        rows: Sequence[Row],
        rollout: RolloutConfig,
        seed: SeedPath,
        *,
        temperature: float | None = None,
        on_group: Callable[[Group], None] = lambda _: None,
    ) -> list[Group]:
        engine, leaves = self.config.engine, len(rows) * rollout.trees * rollout.leaves_per_tree
        ended = 0

        def count(group: Group) -> None:
            nonlocal ended
            ended += sum(len(tree.leaves) for tree in group.trees)
            self.progress.detail(f"{ended}/{leaves} leaves")
            on_group(group)

        return await grow_groups(
            rows,
            config=rollout,
            environment=self.environment,
            reward=self.reward,
            generate=self.pool,
            tokens=self.tokens,
            seed=seed,
            temperature=temperature,
            max_concurrent_trees=2 * engine.count * engine.max_num_seqs,
            on_group=count,
        )

    def _iterations(self) -> Iterations:
        config = self.config
        at_once = SCORED_AT_ONCE * self.layout.dp * self.layout.pp * config.train.micro_batch_tokens
        if config.cluster.placement == "colocated":
            at_once = sys.maxsize  # the trainer cannot score while others still grow
        return Iterations(
            lambda rows, iteration, on_group: self._grown(
                rows, config.rollout, SeedPath((config.run.seed, iteration)), on_group=on_group
            ),
            self.order,
            prompts=config.rollout.prompts,
            total=config.train.iterations,
            depth=config.rollout.async_depth,
            chunk_tokens=at_once,
            in_order=config.run.deterministic,
        )

    async def _step(self, batch: StepBatch, packing: Metrics, objective: Objective) -> StepResult:
        result = await self.trainer.train(batch, objective)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            self.progress.say(
                f"non-finite loss or gradient (norm {result.grad_norm}): step skipped on all ranks"
            )
        if self._skipped_in_a_row >= self.config.train.max_skipped_steps:
            raise ValueError(f"train.max_skipped_steps: {self._skipped_in_a_row} non-finite steps in a row")
        steps = merge([packing, result.metrics, _step_metrics(result)])
        return StepResult(steps, result.grad_norm, result.learning_rate, result.skipped)

    async def _begin(self) -> None:
        train = self.config.train
        await self.trainer.begin(train.optimizer, train.iterations * train.mini_batches)

    def _state(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "version": self.publisher.version,
            "best": self.best,
            "order": self.trees.order_state(self.iteration),
            "tokenizer": self.tokens.fingerprint,
        }

    def _set_state(self, state: dict[str, Any]) -> None:
        if state["tokenizer"] != self.tokens.fingerprint:
            raise ValueError(
                f"model.path: the tokenizer must be the run's ({state['tokenizer']}), got another"
            )
        self.iteration, self.publisher.version = state["iteration"], state["version"]
        self.best = tuple(state["best"]) if state["best"] else None
        self.order.load_state_dict(state["order"])

    def _rows(self, split: str) -> list[Row]:
        paths = self.config.data.train if split == "train" else self.config.data.eval
        if not paths:
            raise ValueError(f"data.{split}: must name at least one file, got none")
        prompts = load_prompts(
            paths,
            split=split,
            encode_chat=self.tokens.chat,
            max_prompt_tokens=self.config.data.max_prompt_tokens,
            overlong=self.config.data.overlong,
        )
        self.skipped_prompts[split] = prompts.num_skipped
        return prompts.rows

    def _demonstrations(self) -> list[Tree]:
        assert self.config.sft is not None
        return load_demonstrations(
            self.config.sft.data,
            encode_chat=self.tokens.chat,
            encode=self.tokens.encode,
            max_prompt_tokens=self.config.data.max_prompt_tokens,
            max_path_tokens=self.config.rollout.max_path_tokens,
        )

    @property
    def spec(self) -> batching.PackingSpec:
        return batching.PackingSpec(
            dp=self.layout.dp,
            micro_batch_tokens=self.config.train.micro_batch_tokens,
            pad_to=self.config.train.token_multiple,
            hidden_size=self.shape.hidden,
            count_multiple=self.layout.pp if self.layout.vpp > 1 else 1,
        )


def _step_metrics(result: StepResult) -> Metrics:
    return {
        "train/grad_norm": mean([result.grad_norm] if not result.skipped else []),
        "train/learning_rate": mean([result.learning_rate]),
        "train/skipped_steps": Sum(float(result.skipped)),
    }


async def _maybe(owner: object, method: str) -> None:
    """Calls an optional asynchronous method of a user's class."""
    found = getattr(owner, method, None)
    if found is not None:
        await found()
