"""The intervals of the FP8 study, by hand."""

from __future__ import annotations

import pytest

from tools.study_fp8 import compare, mean_interval


def test_a_mean_over_seeds_has_students_interval() -> None:
    """1, 2, 3: deviation 1, two degrees of freedom, 4.3027 / sqrt(3) = 2.4842 (tables of Student's t)."""
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((-0.4842, 4.4842), abs=1e-4)
    assert mean_interval([1.0]) is None


@pytest.mark.parametrize(
    ("rounded", "mean", "over_seeds", "differ"),
    [
        # differences +.02, 0, -.02: deviation .02, half .02 * 2.4842
        ((0.92, 0.90, 0.88), 0.0, 0.0497, False),
        # -.09, -.10, -.11: deviation .01
        ((0.81, 0.80, 0.79), -0.1, 0.0248, True),
    ],
)
def test_a_difference_beyond_its_interval_is_told(
    rounded: tuple[float, ...], mean: float, over_seeds: float, differ: bool
) -> None:
    """Every run knows its success to 0.03: a mean of three differences to 0.03 * sqrt(6) / 3 = 0.0245."""

    def summaries(values: tuple[float, ...]) -> list[dict[str, object]]:
        return [{"success_after": value, "success_ci": [value - 0.03, value + 0.03]} for value in values]

    found = compare(summaries((0.90, 0.90, 0.90)), summaries(rounded))
    assert found["success_difference"] == pytest.approx(mean, abs=1e-4)
    assert found["difference_ci_over_seeds"] == pytest.approx(
        [mean - over_seeds, mean + over_seeds], abs=1e-4
    )
    assert found["difference_ci_over_questions"] == pytest.approx([mean - 0.0245, mean + 0.0245], abs=1e-4)
    assert found["differ"] is differ
