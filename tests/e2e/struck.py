"""A run whose last trainer rank is killed or stopped while it is at something, once:
`python -m tests.e2e.struck METHOD SIGNAL CONFIG.yaml [key=value …]`.

METHOD is one of `TrainRank`, SIGNAL e.g. SIGKILL. Rollouts are prepared (`replay`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from megatron_tree.config import load
from megatron_tree.train.group import TrainerGroup
from tests.e2e import replay

DELAY_S = 0.02  # so that the rank has begun


def strike(at: str, number: int) -> None:
    """The first call of the method is hit."""
    call, left = TrainerGroup._call, [at]

    async def struck(group: TrainerGroup, method: str, *args: Any, **more: Any) -> list[Any]:
        if method in left:
            left.remove(method)
            pid = await group._ranks[-1].call("pid")
            asyncio.get_running_loop().call_later(DELAY_S, os.kill, pid, number)
        return await call(group, method, *args, **more)

    TrainerGroup._call = struck  # type: ignore[method-assign]


if __name__ == "__main__":
    method, name, *config = sys.argv[1:]
    strike(method, signal.Signals[name])
    asyncio.run(replay.main(load(config[0], config[1:])))
