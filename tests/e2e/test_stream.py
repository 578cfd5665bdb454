"""Trainer ranks on TP 2 x PP 2 send their weights to a vLLM engine: through gloo, as if it were on another
host, or with `ipc` through memory that rank 0 lends. The trainer's own log-probs are the second source.

About three minutes. In `make test` a colocated run (`test_run`) borrows its versions, and `tests/dist` shows
both wires.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import ray

from megatron_tree import cluster
from megatron_tree.algo.batch import PackingSpec, scoring_batch, sft_batch
from megatron_tree.algo.packing import scatter
from megatron_tree.config import AlgoConfig, EngineConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_tree.engine.engine import Engine
from megatron_tree.engine.pool import EnginePool
from megatron_tree.metrics import values
from megatron_tree.placement import Placement, Spot
from megatron_tree.reshard import source
from megatron_tree.train.group import RankSetup, TrainerFailed, TrainerGroup
from megatron_tree.types import FloatArray, GenerateResult, Leaf, Node, Tree, Update
from tests.e2e.engines import PROMPT, ask
from tests.tiny_models import make_model

PARALLEL = ParallelConfig(tp=2, pp=2)
SPLIT = 16  # tokens of the prompt that are only context


def one_chain() -> Tree:
    none, tokens = np.array([], np.int32), PROMPT[SPLIT:]
    prompt = Node(-1, none, PROMPT[:SPLIT], none.astype(np.float32), "prompt", 0)
    answer = Node(0, tokens, none, np.zeros(len(tokens), np.float32), "answer", 0)
    return Tree("chain", 0, [prompt, answer], [Leaf(1, 1.0, 1.0, None)])


@dataclass
class Streaming:
    loop: asyncio.Runner
    trainer: TrainerGroup
    pool: EnginePool
    made: list[cluster.RayEngine]
    version: int = 0
    tree: Tree = field(default_factory=one_chain)
    spec: PackingSpec = field(default_factory=lambda: PackingSpec(1, 128, 1, 128))

    def train(self) -> None:
        batch, _ = sft_batch([self.tree], self.spec)
        assert not self.loop.run(self.trainer.train(batch, "sft")).skipped

    def offer(self) -> Update:
        engine = self.pool.config
        lends = engine.transport == "ipc"
        return self.loop.run(self.trainer.keep(self.version + 1, engine.dtype, engine.tp, 60.0, lends=lends))

    def publish(self) -> None:
        update = self.offer()
        self.version += 1
        self.loop.run(self.pool.update(update))

    def trained(self) -> FloatArray:
        """The trainer's log-probs of the chain's answer."""
        batch, spans = scoring_batch([self.tree], self.spec)
        scatter(spans, self.loop.run(self.trainer.score(batch, "actor")), "old_logprobs")
        found = self.tree.nodes[1].old_logprobs
        assert found is not None
        return found

    def served(self) -> FloatArray:
        """The newest engine's, under the current version; a request through the pool comes first, which waits
        for an engine that is ready."""
        name = f"score {self.version} {len(self.made)} {self.pool._counters.requests}"
        result = self.loop.run(self.pool(ask(name, max_tokens=1)))
        assert result.policy_version == self.version
        return self.loop.run(self.made[-1].score(name, PROMPT))[SPLIT - 1 :]

    def kill_engine(self) -> None:
        info = self.made[-1].info
        assert info is not None
        os.kill(info.pids[0], signal.SIGKILL)


pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=["stream", "ipc"])
def streaming(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _ray: None
) -> Iterator[Streaming]:
    folder = tmp_path_factory.mktemp("stream")
    make_model(folder, family="qwen2", tied=True, seed=7)
    setup = RankSetup(str(folder), PARALLEL, "fp32", 1.0, AlgoConfig(), 120.0, 1)
    config = EngineConfig(
        dtype="fp32", max_model_len=512, kv_cache_gib=0.1, transport=request.param, update_timeout_s=60.0
    )
    here, layout = Spot(cluster.nodes()[0]), PARALLEL.layout
    places = cluster.Places(Placement("cpu", (here,) * layout.world_size, (here,)), layout)
    made: list[cluster.RayEngine] = []

    def spawn(index: int) -> cluster.RayEngine:
        made.append(cluster.RayEngine(str(folder), config, index, places))
        return made[-1]

    trainer = TrainerGroup(layout, TrainConfig(), cluster.trainer_transport(setup, places))
    pool = EnginePool(config, spawn, feed=trainer)

    async def start() -> None:
        await asyncio.gather(trainer.start(str(folder)), pool.start())
        await trainer.begin(OptimizerConfig(lr=3e-3), 10)

    with asyncio.Runner() as loop:
        loop.run(start())
        yield Streaming(loop, trainer, pool, made)
        loop.run(pool.stop())
        loop.run(trainer.stop())


def test_versions_reach_the_engine_and_its_replacement(streaming: Streaming) -> None:
    """Two versions; then the engine is killed, the trainers take a step of their own, and the replacement
    gets the published version, not what the trainers have by then."""
    run, published = streaming, [streaming.trained()]
    assert np.abs(published[0] - run.served()).max() <= 1e-4
    for _ in range(2):
        run.train()
        run.publish()
        published.append(run.trained())
        assert np.abs(published[-1] - run.served()).max() <= 1e-4
        assert np.abs(published[-1] - published[-2]).max() > 1e-2
    run.pool.metrics()
    run.kill_engine()
    run.train()
    after = run.served()
    assert np.abs(published[-1] - after).max() <= 1e-4
    assert np.abs(run.trained() - after).max() > 1e-2
    assert values(run.pool.metrics())["engine/restarts"] == 1


def test_another_models_stream_is_refused(streaming: Streaming) -> None:
    """Names and shapes are compared before a byte is sent: the engine goes on as it was."""
    run, engines = streaming, len(streaming.made)
    before = run.served()
    offered = run.offer()
    assert offered.stream is not None
    first, *rest = offered.stream.segments
    for name, segment, says in (
        (
            "narrow",
            replace(first, shapes=((128, 64), *first.shapes[1:])),
            r"must have shape \(128, 128\), got",
        ),
        ("short", replace(first, names=first.names[1:], shapes=first.shapes[1:]), "lacks model.embed_tokens"),
    ):
        stream = replace(offered.stream, segments=(segment, *rest))
        with pytest.raises(ValueError, match=f"stream of version {offered.version}: .*{says}"):
            run.loop.run(run.pool.update(replace(offered, stream=stream)))
        assert np.array_equal(run.served(), before), name
    assert len(run.made) == engines


def test_an_engine_that_dies_while_it_receives_is_replaced(streaming: Streaming) -> None:
    """The trainers drop its wire, end their send, and send again to the replacement."""
    run = streaming
    engines = len(run.made)
    ray.get(run.made[-1]._actor.__ray_call__.remote(die_after_a_segment))
    run.train()
    run.publish()
    assert len(run.made) == engines + 1
    assert np.abs(run.trained() - run.served()).max() <= 1e-4


def test_trainers_that_die_while_they_send_are_replaced_and_publish_again(streaming: Streaming) -> None:
    """The engine is half loaded and ends with the send; its replacement waits for other trainers."""
    run = streaming
    engines, folder = len(run.made), run.made[0]._model
    rank = run.trainer._ranks[3]
    ray.get(rank._actor.__ray_call__.remote(die_while_it_contributes))  # type: ignore[attr-defined]
    with pytest.raises(TrainerFailed, match="send_version: rank 3 failed"):
        run.publish()

    async def recover() -> None:
        await run.trainer.kill()
        await run.trainer.start(folder)

    waiting = run.loop.get_loop().create_task(run.pool(ask("waits", max_tokens=1)))
    run.loop.run(recover())
    assert not waiting.done()
    run.publish()
    assert run.loop.run(_ended(waiting)).policy_version == run.version
    assert len(run.made) == engines + 1
    assert np.abs(run.trained() - run.served()).max() <= 1e-4


async def _ended(task: asyncio.Task[GenerateResult]) -> GenerateResult:
    return await task


def die_after_a_segment(engine: Engine) -> None:
    """Once the first stage's weights are there."""
    update = engine._llm.update_weights

    async def die(request: object) -> None:
        await update(request)
        os.kill(os.getpid(), signal.SIGKILL)

    engine._llm.update_weights = die


def die_while_it_contributes(_: object) -> None:
    source.SliceSource._contribute = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
