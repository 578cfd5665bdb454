"""The bench's own arithmetic, on two stages of two micro-batches worked out by hand.

Stage 0: F 0-1, F 1-2, B 6-8, B 11-13. Stage 1: F 1-3, B 3-6, F 6-8, B 8-11 (test_planner_memory).
"""

from __future__ import annotations

import pytest

from megatron_tree.planner.schedule import Pass
from tools.bench_pipeline import drawn, formula, recorded, replayed, slope, waits
from tools.bench_pipeline_ranks import Run, Timed, _in_order

ORDERS = (
    [Pass(0, 0, True), Pass(0, 1, True), Pass(0, 0, False), Pass(0, 1, False)],
    [Pass(0, 0, True), Pass(0, 0, False), Pass(0, 1, True), Pass(0, 1, False)],
)
SPANS = (((0, 1), (1, 2), (6, 8), (11, 13)), ((1, 3), (3, 6), (6, 8), (8, 11)))
RUN = Run(
    step=(-1.0, 15.0),
    pipeline=(0.0, 13.0),
    passes=tuple(
        tuple(Timed(one, span, (span[1] - span[0]) / 2) for one, span in zip(order, spans, strict=True))
        for order, spans in zip(ORDERS, SPANS, strict=True)
    ),
)


def test_bubble_and_waits_by_hand() -> None:
    assert (RUN.busy, RUN.wall, RUN.seconds) == ((6, 10), 13, 16)
    assert RUN.bubble == 1 - 16 / 26
    assert waits(RUN) == [(0, 7, 0), (1, 0, 2)]
    assert formula(2, 1, 2) == 1 / 3
    assert formula(8, 2, 16) == 7 / 39


def test_step_drawn_to_scale() -> None:
    assert drawn(RUN, columns=13).splitlines() == ["aa....AA...AA", ".aaAAAaaAAA.."]


def test_recorded_layers_replayed() -> None:
    """Processor times, half of the spans here: the same pipeline twice as fast."""
    layers = recorded([RUN, RUN])
    assert layers[0] == {(0, True): 0.5, (1, True): 0.5, (0, False): 1.0, (1, False): 1.0}
    found = replayed(layers, 2, 1, 2)
    assert (found.wall, found.busy) == (6.5, (3, 5))
    # one stage of both layers: no waiting
    assert replayed(layers, 1, 1, 2).busy == (8,)
    assert replayed(layers, 1, 1, 2).bubble == 0


def test_slope_of_powers_and_of_a_pipeline() -> None:
    assert slope((2, 4, 8), (3 * 2**1.5, 3 * 4**1.5, 3 * 8**1.5)) == pytest.approx(1.5)
    # least squares through (0, log 3), (1, log 5), (2, log 9) in powers of two: half of log2(9 / 3)
    assert slope((2, 4, 8), (3, 5, 9)) == pytest.approx(0.5 * 1.58496, rel=1e-5)


def test_another_schedule_is_noticed() -> None:
    forward, backward = [((0.0, 1.0), 1.0), ((1.0, 2.0), 1.0)], [((6.0, 8.0), 2.0), ((11.0, 13.0), 2.0)]
    assert [ran.one for ran in _in_order(ORDERS[0], forward, backward)] == ORDERS[0]
    with pytest.raises(AssertionError, match="another schedule"):
        _in_order(ORDERS[1], forward, backward)
