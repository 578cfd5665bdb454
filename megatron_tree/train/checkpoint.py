"""Checkpoints of the trainer group in Megatron's distributed format, which any layout can load.

A folder is written by all ranks together and holds model, optimizer and the step of the learning-rate
schedule. A save copies the tensors and returns; forked processes write them while training goes on. Not here:
when to save, which one is the latest, and the driver's own state (`session`, `runfolder`).
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_tree.children import fork_only_mortals
from megatron_tree.train.model import TreeGPTModel

_METADATA = {
    "chained_optim_avoid_prefix": True,  # names do not depend on how the optimizer is put together
    "distrib_optim_sharding_type": "fully_reshardable",  # a distributed one's states in any layout
}
# Megatron-Core from 0.19 on writes through nvidia-resiliency-ext unless told so; before there is no choice
_CHOOSES = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
_WRITER = {"async_strategy": "mcore"} if _CHOOSES else {}


class Saver:
    """This rank's saves, in their order. All methods are collective."""

    def __init__(self) -> None:
        self._queue = AsyncCallsQueue(persistent=False)  # the persistent caller hangs without a GPU
        _prepare_writers()

    def begin(
        self, folder: Path, chunks: Sequence[TreeGPTModel], optimizer: MegatronOptimizer, step_index: int
    ) -> None:
        """Starts writing into a folder that exists and is empty; the model may change from here on."""
        state = _state(chunks, optimizer, is_loading=False)
        state |= {"step_index": step_index, "distributed_optimizer": _is_distributed(optimizer)}
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, **_WRITER)
        self._queue.schedule_async_request(request)

    def finish(self, *, blocking: bool) -> bool:
        """Whether everything begun is on disk, on all ranks. Raises on every rank when one could not
        write."""
        self._queue.maybe_finalize_async_calls(blocking=blocking)
        return self._queue.get_num_unfinalized_calls() == 0


@functools.cache
def _prepare_writers() -> None:
    """Before the model exists: forks the process that collects what writers report, which Megatron would
    spawn at the first save (seconds of imports, 300 MB). It and the writers end with this rank: a writer that
    outlived a killed run would write into the folder of the run that resumes it."""
    fork_only_mortals()
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def load(folder: Path, chunks: Sequence[TreeGPTModel], optimizer: MegatronOptimizer) -> int:
    """Collective. Fills model and optimizer; returns the step of the schedule.

    ValueError where the optimizer's states were split over data-parallel ranks and these are not, or the
    other way round: Megatron stores them differently.
    """
    saved = dist_checkpointing.load_common_state_dict(str(folder))["distributed_optimizer"]
    if saved != _is_distributed(optimizer):
        was, got = ("true", "false") if saved else ("false", "true")
        field = "train.parallel.distributed_optimizer"
        raise ValueError(f"{field}: the checkpoint {folder} was saved with {was}, got {got}")
    state = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), str(folder))
    for index, chunk in enumerate(chunks):
        missing, unexpected = chunk.load_state_dict(state[f"model{index}"], strict=False)
        assert not unexpected
        assert all(name.endswith("_extra_state") for name in missing), f"{missing} are not in the checkpoint"
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step_index"])


def _is_distributed(optimizer: MegatronOptimizer) -> bool:
    return any(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers)


def _state(
    chunks: Sequence[TreeGPTModel], optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    """Tensors are stored under names that count layers over the whole model; the keys here are the rank's."""
    metadata = dict(_METADATA)  # Megatron adds its process groups
    models = {f"model{i}": _weights(chunk, metadata) for i, chunk in enumerate(chunks)}
    shards = optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    return models | {"optimizer": shards}


def _weights(chunk: TreeGPTModel, metadata: dict[str, Any]) -> dict[str, Any]:
    """Parameters, and the amaxes of delayed scaling. What else Transformer Engine's layers would add under
    `_extra_state` says nothing, and no other layers could load it."""
    state = chunk.sharded_state_dict(metadata=metadata)
    delayed = chunk.config.fp8 and chunk.config.fp8_recipe == "delayed"
    return state if delayed else {k: v for k, v in state.items() if not k.endswith("_extra_state")}
