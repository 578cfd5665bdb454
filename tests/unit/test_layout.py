"""The rank grid: hand-written ranks, and stages that share out the layers."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tree.layout import Coordinates, ParallelLayout

SIZES = st.integers(1, 4)


def test_rank_five_of_eight():
    """By hand, tp fastest: ranks 0-3 are stage 0, 4-7 stage 1; in stage 1, dp 0 is ranks 4 and 5."""
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    assert layout.world_size == 8
    assert layout.coordinates(5) == Coordinates(tp=1, cp=0, dp=0, pp=1)
    assert [layout.coordinates(r).dp for r in layout.ranks()] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.output_ranks() == [4, 6]
    assert [r for r in layout.ranks() if layout.speaks_for_stage(r)] == [0, 4]


@given(SIZES, SIZES, SIZES, SIZES)
def test_ranks_count_tp_then_cp_then_dp_then_pp(tp: int, cp: int, dp: int, pp: int):
    layout = ParallelLayout(tp=tp, pp=pp, cp=cp, dp=dp)
    grid = product(range(pp), range(dp), range(cp), range(tp))
    expected = [Coordinates(tp=t, cp=c, dp=d, pp=p) for p, d, c, t in grid]
    assert [layout.coordinates(r) for r in layout.ranks()] == expected
    assert [layout.rank(at) for at in expected] == list(layout.ranks())


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_outside_the_grid(rank: int):
    with pytest.raises(ValueError, match=rf"^rank: must be in \[0, 4\), got {rank}$"):
        ParallelLayout(tp=2, pp=2).coordinates(rank)


def test_layers_of_a_stage():
    assert list(ParallelLayout(pp=2).stage_layers(6, 1)) == [3, 4, 5]
    # two chunks a stage, dealt in turn: stage 0 has layers 0-1 and 4-5, stage 1 has 2-3 and 6-7
    interleaved = ParallelLayout(pp=2, vpp=2)
    assert [list(interleaved.stage_layers(8, 0, v)) for v in range(2)] == [[0, 1], [4, 5]]
    assert [list(interleaved.stage_layers(8, 1, v)) for v in range(2)] == [[2, 3], [6, 7]]


def test_layers_that_do_not_divide():
    with pytest.raises(ValueError, match=r"^pp: 6 layers do not divide into pp \* vpp = 4 equal parts$"):
        ParallelLayout(pp=2, vpp=2).stage_layers(6, 0)
