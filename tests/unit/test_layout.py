"""The rank grid: hand-written ranks, and stages that share out the layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tree.layout import Coordinates, ParallelLayout, megatron_split

SIZES = st.integers(1, 4)


def test_rank_five_of_eight():
    """By hand, tp fastest: ranks 0-3 are stage 0, 4-7 stage 1; in stage 1, dp 0 is ranks 4 and 5."""
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    assert layout.world_size == 8
    assert layout.coordinates(5) == Coordinates(tp=1, cp=0, dp=0, pp=1)
    assert [layout.coordinates(r).dp for r in layout.ranks()] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.output_ranks() == [4, 6]
    assert [r for r in layout.ranks() if layout.speaks_for_stage(r)] == [0, 4]
    assert [r for r in layout.ranks() if layout.is_first_replica(r)] == [0, 1, 4, 5]


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


def test_uneven_stages():
    """The docstring's example: 7 layers as (1, 2, 2, 2) over pp=2, vpp=2."""
    layout = ParallelLayout(pp=2, vpp=2, stage_split=(1, 2, 2, 2))
    assert [list(layout.stage_layers(7, 0, v)) for v in range(2)] == [[0], [3, 4]]
    assert [list(layout.stage_layers(7, 1, v)) for v in range(2)] == [[1, 2], [5, 6]]
    chunks = [(stage, v) for v in range(2) for stage in range(2)]
    assert [at for at in chunks if layout.has_embedding(*at)] == [(0, 0)]
    assert [at for at in chunks if layout.has_head(*at)] == [(1, 1)]
    assert layout.pipeline_layout(7) == "Et|tt|tt|ttL"
    assert ParallelLayout().pipeline_layout(2) == "EttL"
    assert ParallelLayout(pp=3, stage_split=(0, 2, 1)).pipeline_layout(3) == "E|tt|tL"


SPLITS = st.integers(1, 3).flatmap(
    lambda pp: st.integers(1, 3 if pp > 1 else 1).flatmap(
        lambda vpp: st.tuples(
            st.just(pp), st.just(vpp), st.lists(st.integers(0, 3), min_size=pp * vpp, max_size=pp * vpp)
        )
    )
)


@given(SPLITS)
def test_every_layer_is_in_exactly_one_chunk(drawn: tuple[int, int, list[int]]):
    pp, vpp, split = drawn
    layout = ParallelLayout(pp=pp, vpp=vpp, stage_split=tuple(split))
    layers = [
        layer
        for v in range(vpp)
        for stage in range(pp)
        for layer in layout.stage_layers(sum(split), stage, v)
    ]
    assert layers == list(range(sum(split)))


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ((8, 4), {}, (2, 2, 2, 2)),
        ((8, 4), {"first_stage": 1, "last_stage": 1}, (1, 3, 3, 1)),
        ((7, 4), {"first_stage": 1}, (1, 2, 2, 2)),
        ((5, 2), {"last_stage": 2}, (3, 2)),
        ((14, 3, 2), {"first_stage": 6, "last_stage": 4}, (3, 2, 2, 3, 2, 2)),
        # embedding and loss count as a layer each: 16 over 8 chunks, less one at either end
        ((14, 4, 2), {"embedding": True, "loss": True}, (1, 2, 2, 2, 2, 2, 2, 1)),
        ((3, 4), {"loss": True}, (1, 1, 1, 0)),
    ],
)
def test_megatrons_options_by_hand(
    sizes: tuple[int, ...], options: dict[str, int | bool], expected: tuple[int, ...]
):
    assert megatron_split(*sizes, **options) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelLayout(vpp=2), "vpp: must be 1 where pp is 1, got 2"),
        (
            lambda: ParallelLayout(pp=2, vpp=2, stage_split=(3, 3)),
            "stage_split: must have pp * vpp = 4 numbers from 0 up, got (3, 3)",
        ),
        (
            lambda: ParallelLayout(pp=2, stage_split=(3, -1)),
            "stage_split: must have pp * vpp = 2 numbers from 0 up, got (3, -1)",
        ),
        (
            lambda: ParallelLayout(pp=2, stage_split=(3, 1)).stage_layers(5, 0),
            "stage_split: must sum to the model's 5 layers, got (3, 1)",
        ),
        (
            lambda: megatron_split(8, 4, first_stage=1, loss=True),
            "account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: "
            "cannot be set beside the layers of the first or last stage",
        ),
        (
            lambda: megatron_split(8, 4, first_stage=0),
            "num_layers_in_first_pipeline_stage: must be at least 1, got 0",
        ),
        (lambda: megatron_split(8, 4, first_stage=1), "pp: 7 layers do not divide into 3 equal stages"),
        (
            lambda: megatron_split(9, 2, 2, first_stage=5),
            "vpp: must divide the layers of every stage, [5, 4], got 2",
        ),
    ],
)
def test_splits_that_do_not_fit(make: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=":") as refusal:
        make()
    assert str(refusal.value) == message


def test_layers_that_do_not_divide():
    with pytest.raises(ValueError, match=r"^pp: 6 layers do not divide into pp \* vpp = 4 equal parts$"):
        ParallelLayout(pp=2, vpp=2).stage_layers(6, 0)
