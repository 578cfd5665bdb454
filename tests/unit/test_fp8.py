"""Emulated FP8: rounding against torch's own casts, scales and small products by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_tree.config import Fp8Config
from megatron_tree.train.fp8 import (
    E4M3,
    E5M2,
    Product,
    Quantiser,
    block_amax,
    mx_scale,
    power_of_two_scale,
    rounded,
    tensor_scale,
)

ONE = torch.tensor(1.0)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_value_of_a_format_stays_and_what_lies_between_goes_as_torch_casts(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()]
    assert torch.equal(rounded(values, ONE, dtype), values)
    noise = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 30
    assert torch.equal(rounded(noise, ONE, dtype), noise.to(dtype).float())


def test_larger_values_saturate() -> None:
    assert rounded(torch.tensor([1e6, -1e6]), ONE, E4M3).tolist() == [448.0, -448.0]
    assert rounded(torch.tensor([1e6, -1e6]), ONE, E5M2).tolist() == [57344.0, -57344.0]


@pytest.mark.parametrize(
    ("amax", "tensor", "power", "mx"),
    [
        (448.0, 1.0, 1.0, 1.0),
        (1.0, 448.0, 256.0, 256.0),  # 448 = 256 * 1.75; ceil(log2(1 / 448)) = -8
        (3.5, 128.0, 128.0, 128.0),
        (3.0, 448 / 3, 128.0, 128.0),
        (1.75, 256.0, 256.0, 256.0),
        (500.0, 448 / 500, 0.5, 0.5),
        (0.0, 1.0, 1.0, 2.0**127),  # an empty block: any scale will do
    ],
)
def test_scales_by_hand(amax: float, tensor: float, power: float, mx: float) -> None:
    value = torch.tensor(amax)
    assert float(tensor_scale(value, E4M3)) == pytest.approx(tensor, rel=1e-7)
    assert float(power_of_two_scale(value, E4M3)) == power
    assert float(mx_scale(value, E4M3)) == mx


def te_scale(amax: np.float32, top: float, power: bool) -> np.float32:
    """Transformer Engine's `compute_scale_from_amax` (common/recipe/recipe_common.cuh) in numpy: one rounded
    division; 1 of what is no positive finite number; a power of two by cutting the mantissa off."""
    if not np.isfinite(amax) or amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.minimum(np.float32(top) / amax, np.finfo(np.float32).max)
    return (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32) if power else scale


@pytest.mark.parametrize(("dtype", "top"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_scales_are_transformer_engines_to_the_last_bit(dtype: torch.dtype, top: float) -> None:
    """Also at the edges: none, subnormals, a scale that overflows, just beside the powers of two."""
    edges = [0.0, 1e-45, 1e-40, 1.2e-38, 2.0**-126, 1.3e-36, 3.4028235e38, np.inf, np.nan]
    beside = [np.nextafter(np.float32(v), np.float32(to)) for v in (1.75, 448, 57344) for to in (0, v, 1e9)]
    noise = np.exp(np.random.default_rng(0).uniform(-60, 60, 2000))
    values = np.array([*edges, *beside, *noise], np.float32)
    for power, of in ((False, tensor_scale), (True, power_of_two_scale)):
        expected = np.array([te_scale(value, top, power) for value in values])
        np.testing.assert_array_equal(of(torch.from_numpy(values), dtype).numpy(), expected)


def test_an_infinity_is_not_hidden_by_mxfp8() -> None:
    """Transformer Engine's `float_to_e8m0` gives 254, a scale of 2^-127: 448 of it is no number of fp32."""
    assert float(mx_scale(torch.tensor(float("inf")), E4M3)) == 2.0**-127
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 32] = float("inf"), 3.0
    got = Quantiser(Fp8Config(recipe="mxfp8"))(x, "input", 1)
    assert got[0, [0, 32]].tolist() == [float("inf"), 3.0]


def test_blocks_have_their_own_amax_also_the_short_last_ones() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -4.0], [7.0, 0.0, 1.0]])
    assert block_amax(x, 1, 2).tolist() == [[2, 2, 3], [0.5, 0.5, 4], [7, 7, 1]]
    assert block_amax(x, 2, 2).tolist() == [[2, 2, 4], [2, 2, 4], [7, 7, 1]]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        # 448 / 1000 scales all: 0.448, 0.1344, 3.584 are cast to 0.4375, 0.140625, 3.5
        ("tensorwise", [0.4375 / 0.448, 0.140625 / 0.448, 3.5 / 0.448, 1000.0]),
        # no history: not scaled; 0.3 is cast to 0.3125 and 1000 saturates
        ("delayed", [1.0, 0.3125, 8.0, 448.0]),
        # 1 and 0.3 share a block with 8, scale 32: 9.6 is cast to 10; 1000 has scale 1/4: 250 is cast to 256
        ("blockwise", [1.0, 10 / 32, 8.0, 1024.0]),
        # blocks of 32: 1 and 0.3 have scale 256: 76.8 is cast to 80; 1000 has 1/4
        ("mxfp8", [1.0, 80 / 256, 8.0, 1024.0]),
    ],
)
def test_what_each_recipe_makes_of_a_row_by_hand(recipe: str, expected: list[float]) -> None:
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 1], x[0, 32], x[0, 128] = 1.0, 0.3, 8.0, 1000.0
    got = Quantiser(Fp8Config(recipe=recipe))(x, "input", 1)[0, [0, 1, 32, 128]]
    assert got.tolist() == pytest.approx(expected, rel=1e-6)


def test_weights_have_square_blocks_and_gradients_the_wider_format() -> None:
    x = torch.zeros(128, 128)
    x[0, 0], x[127, 127] = 1000.0, 0.3
    blockwise = Quantiser(Fp8Config(recipe="blockwise"))
    assert float(blockwise(x, "weight", 1)[127, 127]) == 0.078125 * 4  # 0.075 in E4M3 is 0.078125
    assert float(blockwise(x, "input", 1)[127, 127]) == 0.3125  # its own row
    hybrid, e4m3 = (Quantiser(Fp8Config(recipe="tensorwise", format=f)) for f in ("hybrid", "e4m3"))
    row = torch.tensor([[57344.0, 0.3]])
    assert hybrid(row, "grad", 1).tolist() == [[57344.0, 0.3125]]  # E5M2 has 2 bits of mantissa
    assert e4m3(row, "grad", 1).tolist() == [[57344.0, 0.25]]  # 0.3 / 128 = 1.2 * 2^-9, a subnormal


def test_delayed_scaling_uses_the_largest_amax_of_earlier_steps() -> None:
    quantise = Quantiser(Fp8Config(recipe="delayed"))
    for amax, step in ((2.0, 0), (3.5, 1), (1.0, 2)):
        quantise(torch.tensor([[amax]]), "input", 1)
        quantise(torch.tensor([[amax / 2]]), "input", 1)
        quantise.roll(quantise.seen)
        assert float(quantise.amax_history[0, -1]) == amax, step
    # scale 448 / 3.5 = 128: 1.3 * 128 = 166.4 is cast to 160
    assert quantise(torch.tensor([[1.3]]), "input", 1).item() == 160 / 128


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_delayed_scaling_keeps_its_scale_behind_a_step_that_was_not_finite(wrong: float) -> None:
    """As Transformer Engine's `amax_and_scale_update` does: scales follow finite amaxes only."""
    quantise = Quantiser(Fp8Config(recipe="delayed"))
    for values in ([3.5, 1.0], [wrong, 1.0]):
        quantise(torch.tensor([values]), "input", 1)
        quantise.roll(quantise.seen)
    assert quantise(torch.tensor([[1.3]]), "input", 1).item() == 160 / 128  # as above


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_the_three_products_take_operands_rounded_along_their_inner_dimension(recipe: str) -> None:
    """Second source: plain matrix products of operands that are rounded here."""
    generator = torch.Generator().manual_seed(1)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((64, 256), (384, 256), (64, 384)))
    x[:, :32] *= 50  # blocks differ
    quantise = Quantiser(Fp8Config(recipe=recipe))
    x.requires_grad_(), w.requires_grad_()
    y = Product.apply(x, w, quantise)
    y.backward(g)
    with torch.no_grad():
        q = quantise
        torch.testing.assert_close(y, q(x, "input", 1) @ q(w, "weight", 1).T)
        torch.testing.assert_close(x.grad, q(g, "grad", 1) @ q(w, "weight", 0))
        torch.testing.assert_close(w.grad, q(g, "grad", 0).T @ q(x, "input", 0))
        exact = x @ w.T
        assert 1e-3 < float((y - exact).norm() / exact.norm()) < 0.1  # rounded, and not more
