"""Ranks that leave their devices between steps go on as if they had not; second source: ranks that stayed.

There is no device to leave here: what is on the host already is moved all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_tree.algo.batch import PackingSpec, sft_batch
from megatron_tree.config import OptimizerConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.train import offload
from megatron_tree.train.group import RankSetup
from megatron_tree.train.rank import TrainRank
from tests.dist.harness import Case, export, run
from tests.tiny_models import make_model
from tests.toy_trees import random_tree


@dataclass(frozen=True)
class TypedCase(Case):
    dtype: str = "fp32"

    @property
    def setup(self) -> RankSetup:
        return replace(super().setup, dtype=self.dtype)  # type: ignore[arg-type]


KINDS = {  # in fp32 the optimizer steps the model's weights, sharded it steps pieces of them, in bf16 copies
    "plain": {},
    "sharded": {"distributed_optimizer": True},
    "copies": {"distributed_optimizer": True, "dtype": "bf16"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, layout = tmp_path_factory.mktemp("offload"), ParallelLayout(dp=2)
    make_model(root / "model", seed=3, num_layers=2)
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, vocab=128) for _ in range(4)]
    batch = sft_batch(trees, PackingSpec(dp=2, micro_batch_tokens=70, pad_to=1, hidden_size=128))[0]
    ways = {"stayed": _two_steps, "left": _two_steps_and_a_leave}
    run(
        [
            TypedCase(f"{kind}_{name}", root / "model", layout, batch, "sft", then=way, **knobs)
            for kind, knobs in KINDS.items()
            for name, way in ways.items()
        ],
        root,
    )
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_same_bit_for_bit(root: Path, kind: str) -> None:
    stayed, left = (load_file(root / f"{kind}_{way}" / "model.safetensors") for way in ("stayed", "left"))
    assert stayed.keys() == left.keys()
    assert all(torch.equal(stayed[name], left[name]) for name in stayed)


def test_weights_in_fp8_leave_by_their_parts() -> None:
    """The contract of Transformer Engine's `QuantizedTensor`: bytes by rows and, where it trains, by columns;
    a storage that is always empty."""

    class InFp8:
        device = torch.device("cpu")
        rows = torch.arange(6, dtype=torch.uint8)

        def untyped_storage(self) -> torch.UntypedStorage:
            return torch.UntypedStorage(0)

        def get_data_tensors(self) -> tuple[torch.Tensor | None, ...]:
            return self.rows, None

    weight = InFp8()
    fp8 = patch.object(offload, "is_float8tensor", lambda tensor: isinstance(tensor, InFp8))
    with patch.object(offload, "HOST", "elsewhere"), fp8:
        released = offload.release([], None, [weight])  # type: ignore[list-item]
        assert weight.rows.untyped_storage().nbytes() == 0
        released.take_back()
    assert weight.rows.tolist() == [0, 1, 2, 3, 4, 5]


def _two_steps(trainer: TrainRank, case: Case, out: Path) -> None:
    trainer.take_reference(None)
    trainer.begin(OptimizerConfig(lr=1e-2), 2)
    for _ in range(2):
        trainer.train(case.share(trainer.rank), "sft")
    export(trainer, out)


def _two_steps_and_a_leave(trainer: TrainRank, case: Case, out: Path) -> None:
    """Also before the first step, when there are no states yet."""
    share = case.share(trainer.rank)
    trainer.take_reference(None)
    before = trainer.score(share, "reference")
    trainer.begin(OptimizerConfig(lr=1e-2), 2)
    with patch.object(offload, "HOST", "elsewhere"):
        for _ in range(2):
            actor = [param.detach().clone() for chunk in trainer.actor for param in chunk.parameters()]
            trainer.release()
            _check_only_the_actor_is_left(trainer, actor)
            trainer.take_back()
            trainer.train(share, "sft")
        trainer.release()
    trainer.take_back()
    export(trainer, out)
    for first, second in zip(before or (), trainer.score(share, "reference") or (), strict=True):
        np.testing.assert_array_equal(first, second)


def _check_only_the_actor_is_left(trainer: TrainRank, actor: list[torch.Tensor]) -> None:
    left = [buffer.grad_data for chunk in trainer.wrapped for buffer in chunk.buffers]
    left += [param for chunk in trainer.reference or () for param in chunk.parameters()]
    for part in trainer.optimizer.chained_optimizers:  # type: ignore[union-attr]
        left += [value for state in part.optimizer.state.values() for value in state.values()]
        if trainer.setup.dtype == "bf16":
            left += [param for group in part.optimizer.param_groups for param in group["params"]]
    assert left
    assert {tensor.untyped_storage().nbytes() for tensor in left} == {0}
    params = (param for chunk in trainer.actor for param in chunk.parameters())
    assert all(torch.equal(param, kept) for param, kept in zip(params, actor, strict=True))
