"""The rank grid against Megatron-Core's own generator of process groups."""

from __future__ import annotations

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_tree.layout import ParallelLayout


@pytest.mark.parametrize(
    ("tp", "cp", "dp", "pp"), [(2, 1, 1, 2), (2, 1, 2, 2), (3, 1, 1, 2), (2, 2, 2, 2), (1, 2, 4, 1)]
)
def test_groups_are_megatrons(tp: int, cp: int, dp: int, pp: int):
    megatron = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    layout = ParallelLayout(tp=tp, pp=pp, cp=cp, dp=dp)
    for axis in ("tp", "cp", "dp", "pp"):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in layout.ranks():
            at = layout.coordinates(rank)
            others = tuple(getattr(at, other) for other in ("tp", "cp", "dp", "pp") if other != axis)
            groups.setdefault(others, []).append(rank)
        assert sorted(groups.values()) == sorted(list(group) for group in megatron.get_ranks(axis))
