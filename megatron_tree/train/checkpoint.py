"""Checkpoints of the trainer group in Megatron's distributed format, which any layout can load.

A folder is written by all ranks together and holds model, optimizer and the step of the learning-rate
schedule. Not here: when to save, which one is the latest, and the driver's own state (`session`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer

from megatron_tree.train.model import TreeGPTModel

_METADATA = {
    "chained_optim_avoid_prefix": True
}  # names that do not depend on how the optimizer is put together


def save(folder: Path, model: TreeGPTModel, optimizer: MegatronOptimizer, step_index: int) -> None:
    """Collective. The folder must exist and be empty."""
    state = _state(model, optimizer, is_loading=False)
    state["step_index"] = step_index
    dist_checkpointing.save(state, str(folder))


def load(folder: Path, model: TreeGPTModel, optimizer: MegatronOptimizer) -> int:
    """Collective. Fills model and optimizer; returns the step of the schedule."""
    state = dist_checkpointing.load(_state(model, optimizer, is_loading=True), str(folder))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step_index"])


def _state(model: TreeGPTModel, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    sharded = model.sharded_state_dict(metadata=_METADATA)
    return {
        "model": sharded,
        "optimizer": optimizer.sharded_state_dict(sharded, is_loading=is_loading, metadata=_METADATA),
    }
