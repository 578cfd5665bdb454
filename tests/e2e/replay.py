"""A run whose rollouts are prepared beforehand: `python -m tests.e2e.replay CONFIG.yaml [key=value …]`.

Everything but growing trees and serving them is the program's own: session, loop, trainer ranks, checkpoints.
The trees of a prompt are drawn from its group id, so that a prompt that is lost, repeated or out of order
shows in the weights.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from megatron_tree import loop
from megatron_tree.config import Config, load
from megatron_tree.data.prompts import PromptOrder
from megatron_tree.metrics import Metrics
from megatron_tree.report import write_summary
from megatron_tree.session import Session
from megatron_tree.types import Group, Row
from tests.toy_trees import random_group


class NoEngines:
    def metrics(self) -> Metrics:
        return {}


class Versions:
    """Of a publisher."""

    version = 0


class ReplaySession(Session):
    def __init__(self, config: Config) -> None:
        super().__init__(config, rolls_out=False)
        self.order = PromptOrder(self._rows("train"), seed=config.run.seed, shuffle=True)
        self._first_prompts = self.order.state_dict()
        self.trees = self._iterations()
        self.pool, self.publisher = NoEngines(), Versions()  # type: ignore[assignment]

    async def _grown(
        self, rows: Sequence[Row], *_: object, on_group: Callable[[Group], None], **__: object
    ) -> list[Group]:
        groups = [self._drawn(row) for row in rows]
        for group in groups:
            on_group(group)
        return groups

    def _drawn(self, row: Row) -> Group:
        rng = np.random.default_rng(zlib.crc32(row.group_id.encode()))
        trees = random_group(rng, vocab=self.shape.vocab, group_id=row.group_id).trees
        for node in (node for tree in trees for node in tree.nodes):
            node.policy_version = self.publisher.version
        return Group(row, trees)

    async def publish(self) -> None:
        self.publisher.version += 1


async def main(config: Config) -> None:
    async with ReplaySession(config) as run:
        write_summary(run.folder.path, await loop.train(run))


if __name__ == "__main__":
    asyncio.run(main(load(sys.argv[1], sys.argv[2:])))
