"""Where ranks and engines go: the invariants of `placement`, a table worked out by hand, refusals, and what
moves when a node is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_tree.config import Config
from megatron_tree.placement import Node, Placement, Spot, moved, place

MODES = ("disaggregated", "colocated")


def config(mode: str = "auto", *, parallel: dict[str, int], count: int = 1, tp: int = 1) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "run"},
            "model": {"path": "model"},
            "environment": {"target": "a:B"},
            "reward": {"target": "a:B"},
            "train": {"parallel": parallel},
            "engine": {"count": count, "tp": tp},
            "cluster": {"placement": mode},
        }
    )


def nodes(*sizes: int) -> list[Node]:
    return [
        Node(name, f"10.0.0.{i}", size) for i, (name, size) in enumerate(zip("abcdefgh", sizes, strict=False))
    ]


def shown(spots: tuple[Spot, ...]) -> str:
    return " ".join(f"{spot.node.name}{''.join(map(str, spot.gpus))}" for spot in spots)


@pytest.mark.parametrize(
    ("sizes", "mode", "parallel", "engines", "ranks", "served"),
    [
        # one node, all fits
        ((4,), "auto", {"tp": 2}, (2, 1), "a0 a1", "a2 a3"),
        # the head has no GPU; stage 1 goes on where stage 0 ends, the engine needs two GPUs at once
        ((0, 4, 4), "auto", {"tp": 2, "pp": 2}, (1, 2), "b0 b1 b2 b3", "c01"),
        # one GPU of each node of three is too few for a group of two, and right for an engine of one
        ((3, 3), "disaggregated", {"tp": 2, "pp": 2}, (2, 1), "a0 a1 b0 b1", "a2 b2"),
        # filling node a would leave no room for the engine of four: the group goes to b
        ((4, 2), "disaggregated", {"tp": 2}, (1, 4), "b0 b1", "a0123"),
        # ranks of a stage are tp first, then dp: dp 1 of stage 0 is on b, and so stage 1 begins there
        ((4, 8), "disaggregated", {"tp": 4, "pp": 2, "dp": 1}, (1, 4), "a0 a1 a2 a3 b0 b1 b2 b3", "b4567"),
        # engines on the GPUs of the ranks
        ((4,), "colocated", {"tp": 2, "pp": 2}, (2, 2), "a0 a1 a2 a3", "a01 a23"),
        ((2, 2), "colocated", {"tp": 1, "pp": 2}, (1, 2), "a0 a1", "a01"),
        # two stages of four on nodes of six; three engines of two share with them
        ((6, 6), "colocated", {"tp": 4, "pp": 2}, (3, 2), "a0 a1 a2 a3 b0 b1 b2 b3", "a01 a23 a45"),
        # no GPU is used or counted
        ((0,), "auto", {"tp": 2, "pp": 2}, (2, 1), "a a a a", "a a"),
        ((0, 8), "cpu", {"tp": 2}, (1, 2), "a a", "a"),
        ((0,), "colocated", {"tp": 2}, (1, 2), "a a", "a"),
    ],
)
def test_worked_out_by_hand(
    sizes: tuple[int, ...],
    mode: str,
    parallel: dict[str, int],
    engines: tuple[int, int],
    ranks: str,
    served: str,
) -> None:
    found = place(config(mode, parallel=parallel, count=engines[0], tp=engines[1]), nodes(*sizes))
    assert (shown(found.ranks), shown(found.engines)) == (ranks, served)


def test_gpus_that_have_a_worker_only() -> None:
    """Those of the third engine in the table above; they could borrow no weights from a rank."""
    settings = config("colocated", parallel={"tp": 4, "pp": 2}, count=3, tp=2)
    assert place(settings, nodes(6, 6)).without_rank == ["10.0.0.0:4", "10.0.0.0:5"]
    assert place(settings, nodes(8)).without_rank == []
    assert place(settings, nodes(0)).without_rank == []


def test_only_what_a_command_needs_is_placed() -> None:
    settings = config(parallel={"tp": 2}, count=2)
    assert shown(place(settings, nodes(2), rolls_out=False).ranks) == "a0 a1"
    assert shown(place(settings, nodes(2), trains=False).engines) == "a0 a1"
    assert place(settings, nodes(2), trains=False).ranks == ()


@pytest.mark.parametrize(
    ("sizes", "mode", "parallel", "engines", "message"),
    [
        (
            (4, 3),
            "auto",
            {"tp": 2, "dp": 2},
            (4, 1),
            "cluster: must hold 4 trainer ranks and 4 engine workers, 8, got 7; engine.count=3 or "
            "train.parallel.dp=1 or cluster.placement=colocated, where memory allows, fits",
        ),
        (
            (2, 2),
            "colocated",
            {"tp": 2, "dp": 2},
            (5, 1),
            "cluster: must hold 4 trainer ranks and 5 engine workers on the same GPUs, 5, got 4; "
            "engine.count=4 fits",
        ),
        (
            (0, 4, 4),
            "auto",
            {"tp": 8},
            (0, 1),
            "cluster: must hold 8 trainer ranks with train.parallel.tp 8 inside a node, got nodes of 4, 4 "
            "GPUs; train.parallel.tp=4 train.parallel.pp=2 fits",
        ),
        (
            (3, 3),
            "auto",
            {"tp": 2},
            (1, 4),
            # the group leaves one GPU beside it and three on the other node: no two pairs
            "cluster: must hold 2 trainer ranks and 4 engine workers with train.parallel.tp 2 and engine.tp "
            "4 inside a node, got nodes of 3, 3 GPUs; engine.tp=1 engine.count=4 fits",
        ),
        (
            (0, 0),
            "disaggregated",
            {"tp": 1},
            (1, 1),
            "cluster: must hold 1 trainer ranks and 1 engine workers, 2, got 0; cluster.placement=cpu fits",
        ),
        (
            (1,),
            "colocated",
            {"tp": 2},
            (1, 1),
            "cluster: must hold 2 trainer ranks and 1 engine workers on the same GPUs, 2, got 1; "
            "no smaller dp or engine.count fits",
        ),
    ],
)
def test_a_refusal_says_what_is_missing_and_what_fits(
    sizes: tuple[int, ...], mode: str, parallel: dict[str, int], engines: tuple[int, int], message: str
) -> None:
    settings = config(mode, parallel=parallel, count=max(engines[0], 1), tp=engines[1])
    with pytest.raises(ValueError, match=r"^cluster: ") as refused:
        place(settings, nodes(*sizes), rolls_out=engines[0] > 0)
    assert str(refused.value) == message


SMALL = st.integers(1, 3)
CLUSTERS = st.lists(st.integers(0, 5), min_size=1, max_size=3)


@given(CLUSTERS, st.sampled_from(MODES), st.tuples(SMALL, SMALL, SMALL), SMALL, SMALL, st.integers(0, 3))
def test_invariants(
    sizes: list[int], mode: str, layout: tuple[int, int, int], count: int, tp: int, held: int
) -> None:
    settings = config(mode, parallel=dict(zip(("tp", "pp", "dp"), layout, strict=True)), count=count, tp=tp)
    sizes = [1, *sizes]  # without any GPU everything would be on the first node
    there = [replace(node, num_held=min(held, node.num_gpus)) for node in nodes(*sizes)]
    try:
        found = place(settings, there)
    except ValueError:
        assert not _possible(sizes, mode, layout, count, tp)  # 5. a refusal means that no placement exists
        return
    _check_whole(settings, found)
    taken = Counter(node for node, _ in {(s.node, g) for s in (*found.ranks, *found.engines) for g in s.gpus})
    free = [node.num_gpus - node.num_held for node in there]
    if any(taken[node] > num for node, num in zip(there, free, strict=True)):
        assert not _possible(free, mode, layout, count, tp)  # 7. only where the free ones do not suffice
    order = [there.index(spot.node) for spot in found.ranks]
    assert order == sorted(order)  # 4. stages fill the nodes in order


def _check_whole(settings: Config, found: Placement) -> None:
    parallel, engine = settings.train.parallel, settings.engine
    # 1. every rank and every engine is placed once
    assert [len(spot.gpus) for spot in found.ranks] == [1] * parallel.layout.world_size
    assert [len(spot.gpus) for spot in found.engines] == [engine.tp] * engine.count
    # 2. a group and an engine (one spot is one node) are on one node
    for group in parallel.layout.tensor_groups():
        assert len({found.ranks[rank].node for rank in group}) == 1
    used = [Counter((s.node, gpu) for s in spots for gpu in s.gpus) for spots in (found.ranks, found.engines)]
    # 1. no GPU has two ranks or two workers; none is outside its node
    assert all(count == 1 for side in used for count in side.values())
    assert all(0 <= gpu < node.num_gpus for side in used for node, gpu in side)
    if found.mode == "disaggregated":  # 3. none has a rank and a worker
        assert not used[0].keys() & used[1].keys()


def _possible(sizes: list[int], mode: str, layout: tuple[int, int, int], count: int, tp: int) -> bool:
    """Tries every number of groups on every node."""
    width, groups = layout[0], layout[1] * layout[2]
    for counts in product(*(range(size // width + 1) for size in sizes)):
        taken = [0 if mode == "colocated" else n * width for n in counts]
        room = sum((size - used) // tp for size, used in zip(sizes, taken, strict=True))
        if sum(counts) == groups and room >= count:
            return True
    return False


@given(CLUSTERS, st.sampled_from(MODES), st.tuples(SMALL, SMALL, SMALL), SMALL, SMALL, st.integers(0, 3))
def test_what_is_on_a_living_node_stays(
    sizes: list[int], mode: str, layout: tuple[int, int, int], count: int, tp: int, lost: int
) -> None:
    settings = config(mode, parallel=dict(zip(("tp", "pp", "dp"), layout, strict=True)), count=count, tp=tp)
    there = nodes(1, *sizes)
    try:
        before = place(settings, there)
    except ValueError:
        return
    alive = [node for node in there if node != there[lost % len(there)]] + [Node("new", "10.0.1.0", 3)]
    after = moved(before, alive, settings.train.parallel.layout)
    _check_whole(settings, after)
    for old, new in zip((*before.ranks, *before.engines), (*after.ranks, *after.engines), strict=True):
        assert new == old if old.node in alive else new.node in alive or new == old


@pytest.mark.parametrize(
    ("mode", "alive", "ranks", "engines"),
    [
        # c has two spare GPUs: the group that was on b goes there
        ("disaggregated", "ac", "a0 a1 c1 c2", "c0"),
        # the engine was on c: the only free GPU is on d
        ("disaggregated", "abd", "a0 a1 b0 b1", "d0"),
        # nothing is free beside a: what was lost keeps its place, for whoever starts it to say so
        ("disaggregated", "a", "a0 a1 b0 b1", "c0"),
        # colocated, the engine is on a0: ranks of b may take its neighbours on c, not a, which has ranks
        ("colocated", "ac", "a0 a1 c0 c1", "a0"),
        # of a the ranks go to c; the engine may join them
        ("colocated", "bc", "c0 c1 b0 b1", "b0"),
    ],
)
def test_what_was_on_a_lost_node_moves(mode: str, alive: str, ranks: str, engines: str) -> None:
    settings = config(mode, parallel={"tp": 2, "pp": 2})
    there = nodes(2, 2, 3, 1)
    before = place(settings, there)
    after = moved(before, [node for node in there if node.name in alive], settings.train.parallel.layout)
    assert (shown(after.ranks), shown(after.engines)) == (ranks, engines)


@pytest.mark.parametrize(
    ("held", "ranks", "engines"),
    [
        ((0, 0, 0), "a0 a1", "a2"),
        # two of a are free: the engine goes on; of which two Ray decides, and they are called the first
        ((1, 0, 0), "a0 a1", "b0"),
        ((2, 1, 0), "b0 b1", "a0"),
        ((3, 2, 0), "c0 c1", "b0"),
        # the free ones do not suffice: as if all were free, for what is held may be given back
        ((3, 3, 2), "a0 a1", "a2"),
    ],
)
def test_what_somebody_else_holds_is_left_alone(held: tuple[int, ...], ranks: str, engines: str) -> None:
    there = [replace(node, num_held=num) for node, num in zip(nodes(3, 3, 3), held, strict=True)]
    found = place(config(parallel={"tp": 2}), there)
    assert (shown(found.ranks), shown(found.engines)) == (ranks, engines)


def test_what_moves_leaves_alone_what_somebody_else_holds() -> None:
    """Of d one of three is free, of e two: the engine goes to d, the group to e."""
    settings, there = config(parallel={"tp": 2}), nodes(2, 1, 0, 3, 4)
    before = place(settings, there)
    assert (shown(before.ranks), shown(before.engines)) == ("a0 a1", "b0")
    alive = [replace(there[3], num_held=2), replace(there[4], num_held=2)]
    after = moved(before, alive, settings.train.parallel.layout)
    assert (shown(after.ranks), shown(after.engines)) == ("e0 e1", "d0")


def test_on_a_cpu_everything_follows_the_driver() -> None:
    before = place(config(parallel={"tp": 2}), nodes(0))
    after = moved(before, [Node("z", "10.0.0.9", 0)], config(parallel={"tp": 2}).train.parallel.layout)
    assert (shown(after.ranks), shown(after.engines)) == ("z z", "z")


@pytest.mark.parametrize(("sizes", "hosts"), [((4,), 1), ((2, 2), 2)])
def test_hosts_that_are_used(sizes: tuple[int, ...], hosts: int) -> None:
    assert len(place(config(parallel={"tp": 2}), nodes(*sizes, 0)).hosts) == hosts


def test_colocated_engines_cannot_grow_ahead() -> None:
    settings = config("colocated", parallel={"tp": 1}).model_dump()
    settings["rollout"]["async_depth"], settings["algo"]["importance_cap"] = 1, 2.0
    with pytest.raises(
        ValidationError, match=r"rollout\.async_depth: must be 0 with cluster\.placement coloc"
    ):
        Config.model_validate(settings)
