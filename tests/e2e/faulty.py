"""A run whose last trainer rank dies in the middle of publishing version 3: `python -m tests.e2e.faulty train
CONFIG.yaml`.

Everything is the program's own. The rank kills itself once its slices are written, before their digests are;
where trainers send the version, as soon as it is to give its part of the first bucket.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from megatron_tree import cli, session
from megatron_tree.reshard import digest
from megatron_tree.reshard.source import SliceSource
from megatron_tree.train.group import TrainerFailed
from megatron_tree.types import GenerateRequest

VERSION = 3


class FaultySession(session.Session):
    struck = False

    async def publish(self) -> None:
        if self.publisher.version + 1 == VERSION and not self.struck:
            self.struck = True
            fault = _die_while_sending if self.engine.is_sent else _die_before_digests
            await self.trainer._ranks[-1]._actor.__ray_call__.remote(fault)  # type: ignore[attr-defined]
        await super().publish()

    async def recover(self, failure: TrainerFailed) -> None:
        if self.engine.transport == "shm":  # else the engine waits for other trainers
            request = GenerateRequest("between", np.array([5, 6], np.int32), 4, 0, 1.0, 1.0, (), "between")
            self.progress.say(f"engines serve version {(await self.pool(request)).policy_version}")
        await super().recover(failure)


def _die_before_digests(_: Any) -> None:
    digest.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def _die_while_sending(_: Any) -> None:
    SliceSource._contribute = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


if __name__ == "__main__":
    session.Session = FaultySession  # type: ignore[misc]
    cli.main()
