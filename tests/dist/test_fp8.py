"""Emulated FP8 in the real model: against transformers with the same rounding, over layouts, and resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.transformer import TransformerConfig
from safetensors.torch import load_file

from megatron_tree.algo.batch import PackingSpec, scoring_batch, sft_batch
from megatron_tree.config import Fp8Config, OptimizerConfig, RecomputeConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.train import fp8_layers, precision
from megatron_tree.train.fp8 import Product, Quantiser
from megatron_tree.train.rank import TrainRank
from tests.dist.harness import Case, export, run
from tests.dist.reference import path_logprobs
from tests.tiny_models import make_model
from tests.toy_trees import random_tree

MX = Fp8Config(recipe="mxfp8")
BLOCKWISE, DELAYED = Fp8Config(recipe="blockwise"), Fp8Config(recipe="delayed")
SPEC = PackingSpec(dp=1, micro_batch_tokens=1024, pad_to=256, hidden_size=256)
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3)
ONE, TP2, VPP2 = ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(pp=2, vpp=2)
MODEL: dict = {"family": "llama", "vocab_size": 125, "seed": 3, "spread": 1.0}
MODEL |= {"hidden_size": 256, "ffn_size": 256, "num_heads": 4, "num_kv_heads": 2}  # whole blocks at TP 2
SCORES = {
    "fp32": (ONE, None),
    "mxfp8": (ONE, MX),
    "mxfp8_ends": (ONE, Fp8Config(recipe="mxfp8", first_last_layers_bf16=1)),
    "blockwise": (ONE, BLOCKWISE),
    "blockwise_tp2": (TP2, BLOCKWISE),
    "blockwise_vpp2": (VPP2, BLOCKWISE),
}


def _trees() -> list:
    rng = np.random.default_rng(2)
    return [random_tree(rng, vocab=125, depth=3, branches=2, action_tokens=(5, 20)) for _ in range(4)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    make_model(root / "model", **MODEL)
    scored, taught = scoring_batch(_trees(), SPEC)[0], sft_batch(_trees(), SPEC)[0]
    scored, taught = ([[*rank, *rank] for rank in batch] for batch in (scored, taught))  # VPP needs two
    cases = [
        Case(name, root / "model", layout, scored, None, sequence_parallel=layout.tp > 1, fp8=fp8)
        for name, (layout, fp8) in SCORES.items()
    ]
    full = RecomputeConfig(granularity="full")
    cases += [
        Case("saved", root / "model", VPP2, taught, then=_train_and_save, fp8=DELAYED, recompute=full),
        Case("resumed", root / "model", ParallelLayout(pp=2), taught, then=_resume, fp8=DELAYED),
    ]
    run(cases, root)
    return root


def test_logprobs_equal_transformers_with_the_same_rounding(root: Path) -> None:
    """Blocks of 32 along the inner dimension do not notice that Megatron fuses q, k and v, gate and up.

    Sums in another order may cross the edge between two FP8 values, so single tokens may differ by more.
    """
    model = make_model(root / "again", **MODEL)
    for layer in model.model.layers:
        for linear in (module for module in layer.modules() if isinstance(module, torch.nn.Linear)):
            linear.forward = partial(_rounded_linear, linear.weight, Quantiser(MX))
    trees = _trees()
    at = {id(node): (tree, i) for tree in trees for i, node in enumerate(tree.nodes)}
    (((spans,),)) = scoring_batch(trees, SPEC)[1]
    expected = np.concatenate([path_logprobs(model, *at[id(span.node)], temperature=1.0) for span in spans])
    got, exact = _scores(root, "mxfp8"), _scores(root, "fp32")
    assert len(got) > 100
    off, rounding = np.abs(got - expected), np.abs(exact - expected)
    assert np.median(off) < 1e-5
    assert off.mean() < 0.1 * rounding.mean()
    assert rounding.mean() > 1e-2  # random weights: a trained model's log-probs move far less


def test_layers_at_the_ends_stay_exact(root: Path) -> None:
    """Of four layers two are rounded: the error shrinks, and does not vanish."""
    exact = _scores(root, "fp32")
    error = {name: np.abs(_scores(root, name) - exact).mean() for name in ("mxfp8", "mxfp8_ends")}
    assert 0 < error["mxfp8_ends"] < 0.9 * error["mxfp8"]


@pytest.mark.parametrize("layout", ["tp2", "vpp2"])
def test_blocks_of_128_do_not_depend_on_the_layout(root: Path, layout: str) -> None:
    """Where the parts of a rank are whole blocks. Tensor parallelism sums in another order (see above)."""
    here, there = _scores(root, "blockwise"), _scores(root, f"blockwise_{layout}")
    rounding = np.abs(here - _scores(root, "fp32")).mean()
    assert np.abs(here - there).mean() < 0.1 * rounding
    if layout == "vpp2":
        np.testing.assert_array_equal(here, there)


def test_delayed_scaling_goes_on_where_it_left_off(root: Path) -> None:
    """Its amaxes are in the checkpoint: the third step, in another layout and without recomputation, ends at
    the same weights."""
    saved, resumed = (load_file(root / name / "model.safetensors") for name in ("saved", "resumed"))
    start = load_file(root / "model" / "model.safetensors")
    moved = max(float((tensor - start[name]).abs().max()) for name, tensor in saved.items())
    assert moved > 1e-3
    for name, tensor in saved.items():
        torch.testing.assert_close(
            resumed[name], tensor, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "fp8",
    [
        *(Fp8Config(recipe=recipe) for recipe in precision.RECIPES),
        Fp8Config(recipe="tensorwise", format="e4m3", first_last_layers_bf16=2),
        Fp8Config(recipe="blockwise", first_last_layers_bf16=1, param_gather=True),
    ],
)
def test_megatron_takes_the_settings_and_means_the_same_layers(fp8: Fp8Config) -> None:
    """Second source: Megatron-Core's own check of its config, and its own choice of layers."""
    config = TransformerConfig(
        num_layers=8, hidden_size=64, num_attention_heads=4, **precision.settings("bf16", fp8)
    )
    theirs = [is_first_last_bf16_layer(config, layer) for layer in range(8)]
    assert theirs == [precision.of_layer(fp8, 8, layer) is None for layer in range(8)]
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == (fp8.format, fp8.recipe, fp8.param_gather)


def test_a_second_optimizer_starts_from_weights_whose_values_the_first_one_took() -> None:
    """The contract of Transformer Engine's `_attach_high_precision_init_val` (module/base.py), by which
    Megatron's distributed optimizer makes its main copies: None once they were taken and cleared."""
    linear = torch.nn.Linear(2, 3)
    for param, value in ((linear.weight, None), (linear.bias, torch.zeros(3))):
        param.get_high_precision_init_val = lambda value=value: value
    fp8_layers.forget_taken(linear)
    assert not hasattr(linear.weight, "get_high_precision_init_val")
    assert torch.equal(linear.bias.get_high_precision_init_val(), torch.zeros(3))


def _rounded_linear(weight: torch.Tensor, quantise: Quantiser, x: torch.Tensor) -> torch.Tensor:
    return Product.apply(x.flatten(0, -2), weight, quantise).view(*x.shape[:-1], -1)


def _scores(root: Path, name: str) -> np.ndarray:
    return np.load(root / name / "logprobs_0_0.npy")


def _train_and_save(trainer: TrainRank, case: Case, out: Path) -> None:
    trainer.begin(OPTIMIZER, 3)
    for _ in range(2):
        trainer.train(case.share(trainer.rank), "sft")
    trainer.save(str(out / "checkpoint"))
    trainer.train(case.share(trainer.rank), "sft")
    assert trainer.saved(blocking=True)
    export(trainer, out)


def _resume(trainer: TrainRank, case: Case, out: Path) -> None:
    trainer.begin(OPTIMIZER, 3)
    trainer.load(str(out.parent / "saved" / "checkpoint"))
    trainer.train(case.share(trainer.rank), "sft")
    export(trainer, out)
