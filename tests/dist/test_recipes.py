"""The cluster recipes: the stages that Megatron builds for their ranks, without memory, are those of the
slice plan, and the plan of their publish covers every element once (as many as the Hub counts)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_tree.reshard.plan import param_shapes, prove
from megatron_tree.train.group import RankSetup
from megatron_tree.train.model import build
from tests.dist.test_layout import one_rank_of
from tests.unit.real_models import PARAMETERS, real_shape
from tests.unit.test_recipes import RECIPES, recipe


@pytest.mark.parametrize("name", RECIPES)
def test_stages_and_publish(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last tensor-parallel rank of each stage; the publish of all ranks to all engines."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    config, shape = recipe(name), real_shape(RECIPES[name], tmp_path)
    layout = config.train.parallel.layout
    setup = RankSetup(
        model_path=str(tmp_path),
        parallel=config.train.parallel,
        dtype=config.model.dtype,
        temperature=config.rollout.temperature,
        algo=config.algo,
        collective_timeout_s=config.train.collective_timeout_s,
        num_threads=1,
        recompute=config.train.recompute,
    )
    layers = 0
    for rank in layout.ranks():
        at = layout.coordinates(rank)
        if at.tp not in (0, layout.tp - 1):
            continue
        with one_rank_of(layout, rank):
            (stage,) = build(shape, setup, rank)
        shapes = {param: tuple(weight.shape) for param, weight in stage.named_parameters()}
        assert shapes == param_shapes(shape, layout, rank, 0)
        layers += len(stage.decoder.layers) if at.tp == 0 else 0
    assert layers == shape.num_layers
    proof = prove(shape, layout, [config.engine.tp])
    assert proof.elements == PARAMETERS[RECIPES[name]]
    assert [engine.tp for engine in proof.engines] == [config.engine.tp]
