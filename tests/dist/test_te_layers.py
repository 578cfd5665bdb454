"""The model with Transformer Engine's layers, as Megatron-Core wraps them, over a stand-in for the package
(`te_stand_in`): names, marks, contexts of recipes, checkpoints. Second source: the local layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DELAYED, LINEARS = "DelayedScaling", 4
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `_run` found, in a process of its own: Megatron-Core imports Transformer Engine once."""
    folder = tmp_path_factory.mktemp("te")
    code = f"from tests.dist import test_te_layers as t; t._run({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def test_layers_and_norms_are_transformer_engines(found: dict[str, Any]) -> None:
    wrappers = "megatron.core.extensions.transformer_engine"
    assert found["classes"] == [
        f"{wrappers}.TEColumnParallelLinear",
        f"{wrappers}.TERowParallelLinear",
        "tests.dist.te_stand_in.RMSNorm",
    ]
    assert found["marks"] == {"linear_qkv": 0, "linear_proj": 1, "linear_fc1": 0, "linear_fc2": 1}


def test_logprobs_and_weights_after_steps_are_the_local_layers(found: dict[str, Any]) -> None:
    local, te = (np.array(found[name]["logprobs"]) for name in ("local", "te"))
    assert len(te) > 50
    np.testing.assert_allclose(te, local, atol=2e-5)


def test_megatron_puts_the_recipe_around_the_layers_between_the_ends(found: dict[str, Any]) -> None:
    """Four layers, of which the first and the last stay in model.dtype."""
    inner = [["Float8BlockScaling", "e4m3", 0, ""]] * LINEARS
    assert found["te"]["recipes"] == [[None] * LINEARS, inner, inner, [None] * LINEARS]
    assert found["delayed"]["recipes"] == [[[DELAYED, "hybrid", 1024, "max"]] * LINEARS] * 4


def test_copies_of_weights_are_made_anew_for_each_step_and_do_not_stay(found: dict[str, Any]) -> None:
    """Two scores and three steps; the ends have none. What stayed would lie beside engines that a colocated
    run wakes."""
    assert found["te"]["copies"] == [[0, 0], [5, 0], [5, 0], [0, 0]]


@pytest.mark.parametrize("way", ["te_then_local", "local_then_te", "delayed_then_delayed"])
def test_checkpoints_do_not_depend_on_the_layers(found: dict[str, Any], way: str) -> None:
    """A step after the load ends where the run that saved ends with that step."""
    np.testing.assert_allclose(found[way]["resumed"], found[way]["went_on"], atol=2e-5)


def _run(folder_name: str) -> None:
    from tests.dist import te_stand_in

    te_stand_in.install()
    from megatron_tree.config import Fp8Config
    from tests.tiny_models import make_model

    folder = Path(folder_name)
    shape = {"hidden_size": 256, "ffn_size": 256, "num_heads": 4, "num_kv_heads": 2}  # whole blocks
    make_model(folder / "model", family="qwen3", vocab_size=125, seed=3, **shape)
    blockwise = Fp8Config(recipe="blockwise", format="e4m3", first_last_layers_bf16=1)
    delayed = Fp8Config(recipe="delayed")
    results: dict[str, Any] = {}
    results["local"], local = _train(folder, "local", None, None, results)
    results["te"], te = _train(folder, "te", blockwise, None, results)
    results["delayed"], old = _train(folder, "delayed", delayed, None, results)
    for way, fp8, source, went_on in (
        ("te_then_local", None, "te", te),
        ("local_then_te", blockwise, "local", local),
        ("delayed_then_delayed", delayed, "delayed", old),
    ):
        _, resumed = _train(folder, way, fp8, source, results)
        results[way] = {"resumed": resumed, "went_on": went_on}
    (folder / "found.json").write_text(json.dumps(results), encoding="utf-8")


def _train(
    folder: Path, name: str, fp8: Any, resume: str | None, results: dict[str, Any]
) -> tuple[dict[str, Any], list[float]]:
    """Two steps and a checkpoint before a third one, or the third from a checkpoint; then log-probs."""
    from megatron_tree.config import AlgoConfig, KernelsConfig, OptimizerConfig, ParallelConfig
    from megatron_tree.train import kernels
    from megatron_tree.train.group import RankSetup
    from megatron_tree.train.precision import Device
    from megatron_tree.train.rank import TrainRank

    gpu = Device((9, 0), (12, 9), transformer_engine=True)
    kernels.here = lambda: gpu if fp8 is not None else Device(None)  # type: ignore[assignment]
    setup = RankSetup(
        str(folder / "model"),
        ParallelConfig(),
        "fp32",
        1.0,
        AlgoConfig(),
        120.0,
        1,
        attention="node",
        fp8=fp8,
        kernels=KernelsConfig(optimizer="torch"),
    )
    trainer = TrainRank(0, setup)
    trainer.start(trainer.bind(), setup.model_path)
    trainer.begin(OptimizerConfig(lr=1e-3), 3)
    scored, taught = _batches()
    if resume is None:
        logprobs = np.concatenate(trainer.score(scored, "actor") or [])
        for _ in range(2):
            trainer.train(taught, "sft")
        trainer.save(str(folder / name))
        assert trainer.saved(blocking=True)
    else:
        trainer.load(str(folder / resume))
    trainer.train(taught, "sft")
    after = np.concatenate(trainer.score(scored, "actor") or []).tolist()
    facts: dict[str, Any] = {}
    if resume is None:
        facts = {"logprobs": logprobs.tolist()}
        if fp8:
            facts |= {"recipes": _recipes(trainer), "copies": _copies(trainer)}
            results |= _classes(trainer)
    trainer.stop()
    return facts, after


def _batches() -> tuple[list[Any], list[Any]]:
    from megatron_tree.algo.batch import PackingSpec, scoring_batch, sft_batch
    from tests.toy_trees import random_tree

    rng = np.random.default_rng(2)
    trees = [random_tree(rng, vocab=125, depth=3, branches=2, action_tokens=(5, 20)) for _ in range(2)]
    spec = PackingSpec(dp=1, micro_batch_tokens=1024, pad_to=128, hidden_size=256)
    return scoring_batch(trees, spec)[0][0], sft_batch(trees, spec)[0][0]


def _linears(trainer: Any) -> list[list[Any]]:
    layers = trainer.actor[0].decoder.layers
    return [
        [at.self_attention.linear_qkv, at.self_attention.linear_proj, at.mlp.linear_fc1, at.mlp.linear_fc2]
        for at in layers
    ]


def _recipes(trainer: Any) -> list[list[Any]]:
    def plain(recipe: Any) -> Any:
        kind = type(recipe).__name__
        name = DELAYED if kind == "TEDelayedScaling" else kind
        return recipe and [name, recipe.fp8_format, recipe.amax_history_len, recipe.amax_compute_algo]

    return [[plain(linear.recipe) for linear in layer] for layer in _linears(trainer)]


def _copies(trainer: Any) -> list[list[int]]:
    """How many the first linear layer of each layer made, and how many it still has."""
    return [[linear.num_copies, len(linear._fp8_workspaces)] for linear, *_ in _linears(trainer)]


def _classes(trainer: Any) -> dict[str, Any]:
    (model,) = trainer.actor
    first = _linears(trainer)[0]
    norms = [module for name, module in model.named_modules() if name.endswith("layernorm")]
    norms = [module for module in norms if list(module.parameters())]  # cross attention has placeholders
    assert len(norms) == 4 * 4 + 1  # two and two for heads in each of four layers, and the last
    names = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    return {
        "classes": sorted({f"{type(m).__module__}.{type(m).__name__}" for m in (*first, *norms)}),
        "marks": {name: at.weight.partition_dim for name, at in zip(names, first, strict=True)},
    }
