"""The actor's weights become a version that every engine serves: which way they take, whose turn it is, and
what happens when engines refuse.

Not here: what owners write and send (`reshard`), how engines take it, all or none (`engine.pool`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_tree.config import EngineConfig
from megatron_tree.engine.pool import EnginePool
from megatron_tree.placement import transport
from megatron_tree.train.group import TrainerFailed, TrainerGroup
from megatron_tree.turns import Turns
from megatron_tree.types import RunFailed, Update

if TYPE_CHECKING:
    from megatron_tree.cluster import Places

TRIES = 2  # a flipped byte is written again, a wrong plan is refused again


def with_transport(engine: EngineConfig, places: Places, say: Callable[[str], None]) -> EngineConfig:
    """The section `engine` with its transport chosen. ValueError for what these places cannot use."""
    asked, apart = engine.transport, ""
    if asked in ("auto", "shm") and (blind := places.blind(engine.image_dir)):
        apart = f"{engine.image_dir} of rank 0's host is not seen on {', '.join(blind)}"
    chosen = transport(engine, places.placement, apart)
    if apart:
        say(f"engine.transport: {chosen}, since {apart}")
    return engine.model_copy(update={"transport": chosen})


class Publisher:
    """`version` is the last that an engine may have."""

    def __init__(
        self,
        trainer: TrainerGroup,
        pool: EnginePool,
        turns: Turns,
        run_id: str,
        say: Callable[[str], None],
    ) -> None:
        self.version = 0
        self._trainer, self._pool, self._turns = trainer, pool, turns
        self._run_id, self._say = run_id, say

    async def publish(self) -> None:
        """The next version, in all engines. TrainerFailed while it was offered or sent, RunFailed where
        engines refused it twice."""
        await self._turns.publish()
        for attempt in range(TRIES):
            update = await self._offer(self.version + 1)
            try:
                await self._pool.update(update)
            except TrainerFailed:  # while they sent: an engine may have it, and no other may be called so
                self.version = update.version
                raise
            except ValueError as refusal:  # before the commit: the old version goes on serving
                await self._trainer.refused(update, str(refusal))
                if attempt + 1 == TRIES:
                    raise RunFailed(f"publish: version {update.version} refused: {refusal}") from refusal
                self._say(f"publish: {refusal}; writing version {update.version} again")
            else:
                self.version = update.version
                self._turns.published()
                return

    async def _offer(self, version: int) -> Update:
        """Puts a version where the engines can have it: in shared memory, or ready to be sent."""
        engine = self._pool.config
        if engine.is_sent:
            lends = engine.transport == "ipc"
            return await self._trainer.keep(
                version, engine.dtype, engine.tp, engine.update_timeout_s, lends=lends
            )
        return await self._trainer.write_image(engine.image_dir, self._run_id, version, engine.dtype)
