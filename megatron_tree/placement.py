"""Which trainer rank and which engine gets which GPUs of which node, and how versions of the weights get from
one to the other. Pure: a config and nodes in, places out.

Invariants (tests/unit/test_placement.py, under the same words)
1. Every rank and every engine is placed once; no GPU has two ranks or two engine workers.
2. A tensor-parallel group is on one node, and so is an engine.
3. Disaggregated, no GPU has a rank and a worker; colocated, engines take the GPUs that ranks have.
4. Stages fill the nodes in order.
5. What can be placed is placed: a refusal means that no placement exists.
6. What is on a living node stays there when another is lost.
7. GPUs that somebody else holds are placed on only where the free ones do not suffice.

Without GPUs everything is on the driver's node: ranks and engines take turns on its cores, which nothing
counts; colocated, in the same order as on GPUs.
Not here: bytes (`planner.limits`), Ray (`cluster`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron_tree.config import Config, EngineConfig
from megatron_tree.layout import ParallelLayout

Mode = Literal["disaggregated", "colocated", "cpu"]
Transport = Literal["shm", "stream", "ipc"]


@dataclass(frozen=True, slots=True)
class Node:
    name: str  # its id in the cluster
    host: str  # the address others reach it by
    num_gpus: int
    num_held: int = field(default=0, compare=False)  # of them by somebody else, when the cluster was asked


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of a rank, or of an engine with all its workers."""

    node: Node
    gpus: tuple[int, ...] = ()  # from 0 on, of those on the node; none on a CPU


@dataclass(frozen=True, slots=True)
class Placement:
    mode: Mode
    ranks: tuple[Spot, ...]
    engines: tuple[Spot, ...]

    @property
    def hosts(self) -> set[str]:
        return {spot.node.host for spot in (*self.ranks, *self.engines)}

    @property
    def without_rank(self) -> list[str]:
        """The GPUs that have an engine worker only."""
        ranks = {(spot.node, gpu) for spot in self.ranks for gpu in spot.gpus}
        workers = {(spot.node, gpu) for spot in self.engines for gpu in spot.gpus}
        return sorted(f"{node.host}:{gpu}" for node, gpu in workers - ranks)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Groups that must each be on one node."""

    mode: Mode
    groups: int  # tensor-parallel ones
    tp: int
    engines: int
    engine_tp: int

    @property
    def gpus(self) -> tuple[int, int]:
        """Of the trainer and of the engines."""
        return self.groups * self.tp, self.engines * self.engine_tp


def place(
    config: Config,
    nodes: Sequence[Node],
    *,
    trains: bool = True,
    rolls_out: bool = True,
    named: str = "cluster",
) -> Placement:
    """The driver's node comes first in `nodes`. ValueError, which calls them `named`, where they do not
    suffice."""
    mode = config.cluster.placement
    gpus = any(node.num_gpus for node in nodes)
    if mode == "auto":
        mode = "disaggregated" if gpus else "cpu"
    layout, engines = config.train.parallel.layout, config.engine.count if rolls_out else 0
    if mode == "cpu" or (mode == "colocated" and not gpus):
        here = Spot(nodes[0])
        return Placement(mode, (here,) * (layout.world_size if trains else 0), (here,) * engines)
    groups = len(layout.tensor_groups()) if trains else 0
    wanted = _Wanted(mode, groups, layout.tp, engines, config.engine.tp)
    found = _arrange(wanted, nodes, free_only=True) or _arrange(wanted, nodes)
    if found is None:
        raise ValueError(f"{named}: {_refusal(wanted, nodes)}; {_ways(config, wanted, nodes)}")
    return found


def transport(engine: EngineConfig, placement: Placement, apart: str) -> Transport:
    """`apart`: the fact, if it is one, that not all ranks and engines see one `image_dir`. ValueError where
    this placement cannot use what the config asks for."""
    other: Transport = "ipc" if placement.mode == "colocated" else "stream"
    if engine.transport == "shm" and apart:
        raise ValueError(f"engine.transport: shm is for one host, and {apart}; {other} is for several")
    chosen: Transport = other if apart else "shm"
    if engine.transport == "stream" or engine.transport == "ipc":
        chosen = engine.transport
    if chosen == "ipc" and placement.without_rank:
        raise ValueError(
            "engine.transport: ipc needs a trainer rank on each engine worker's GPU, got none on "
            f"{', '.join(placement.without_rank)}"
        )
    return chosen


def moved(placement: Placement, alive: Sequence[Node], layout: ParallelLayout) -> Placement:
    """What was on nodes that are not `alive` is elsewhere, ranks before engines, as far as GPUs are free;
    what fits nowhere keeps its lost place."""
    ranks, engines = list(placement.ranks), list(placement.engines)

    def taken(of_ranks: bool) -> Iterator[Spot]:
        if placement.mode != "colocated":
            return iter((*ranks, *engines))
        return iter(ranks if of_ranks else engines)

    for group in layout.tensor_groups() if ranks else ():
        if ranks[group[0]].node in alive:
            continue
        where = _first_free(len(ranks[group[0]].gpus) * len(group), alive, taken(of_ranks=True))
        if where is not None:
            for spot, rank in zip(_cut(where, len(group)), group, strict=True):
                ranks[rank] = spot
    for index, spot in enumerate(engines):
        if spot.node not in alive:
            engines[index] = _first_free(len(spot.gpus), alive, taken(of_ranks=False)) or spot
    return replace(placement, ranks=tuple(ranks), engines=tuple(engines))


def _first_free(count: int, nodes: Sequence[Node], taken: Iterator[Spot]) -> Spot | None:
    used = {(spot.node, gpu) for spot in taken for gpu in spot.gpus}
    for node in nodes:
        free = [gpu for gpu in range(node.num_gpus) if (node, gpu) not in used]
        if len(free) - node.num_held >= count:
            return Spot(node, tuple(free[:count]))
    return None


def _cut(spot: Spot, parts: int) -> list[Spot]:
    """One GPU each, or none."""
    return [Spot(spot.node, spot.gpus[part : part + 1]) for part in range(parts)]


def _arrange(wanted: _Wanted, nodes: Sequence[Node], *, free_only: bool = False) -> Placement | None:
    shared = wanted.mode == "colocated"
    sizes = [node.num_gpus - free_only * node.num_held for node in nodes]
    counts = _groups_per_node(sizes, wanted, 0 if shared else wanted.engines)
    if counts is None:
        return None
    first = [0 if shared else count * wanted.tp for count in counts]  # GPU that engines may take
    groups = list(_fill(nodes, wanted.tp, [0] * len(nodes), counts))
    room = [(size - begin) // wanted.engine_tp for size, begin in zip(sizes, first, strict=True)]
    engines = list(_fill(nodes, wanted.engine_tp, first, room))
    if len(engines) < wanted.engines:
        return None
    ranks = (spot for group in groups for spot in _cut(group, wanted.tp))
    return Placement(wanted.mode, tuple(ranks), tuple(engines[: wanted.engines]))


def _fill(nodes: Sequence[Node], width: int, first: Sequence[int], counts: Sequence[int]) -> Iterator[Spot]:
    """So many groups of `width` GPUs on each node, from its GPU `first` on."""
    for node, begin, count in zip(nodes, first, counts, strict=True):
        for group in range(count):
            at = begin + group * width
            yield Spot(node, tuple(range(at, at + width)))


def _groups_per_node(sizes: Sequence[int], wanted: _Wanted, engines: int) -> list[int] | None:
    """As many tensor-parallel groups on each node as can be while the later nodes can hold the other groups,
    and what is left everywhere so many engines."""
    tp, width = wanted.tp, wanted.engine_tp
    most = [[0] + [-1] * wanted.groups]  # engines beside g groups on the nodes from n on; -1: they do not fit
    for size in reversed(sizes):
        later = most[0]
        beside = [
            [
                (size - k * tp) // width + later[g - k]
                for k in range(min(g, size // tp) + 1)
                if later[g - k] >= 0
            ]
            for g in range(wanted.groups + 1)
        ]
        most.insert(0, [max(engines, default=-1) for engines in beside])
    if most[0][wanted.groups] < engines:
        return None
    counts, left = [], wanted.groups
    for size, later in zip(sizes, most[1:], strict=True):
        count = max(
            k
            for k in range(min(left, size // tp) + 1)
            if later[left - k] >= max(0, engines - (size - k * tp) // width)
        )
        counts.append(count)
        left -= count
        engines -= (size - count * tp) // width
    return counts


def _refusal(wanted: _Wanted, nodes: Sequence[Node]) -> str:
    sizes = [node.num_gpus for node in nodes if node.num_gpus]
    ranks, workers = wanted.gpus
    shared = wanted.mode == "colocated"
    needed = max(ranks, workers) if shared else ranks + workers
    sides = [(ranks, "trainer ranks", "train.parallel.tp", wanted.tp)]
    sides += [(workers, "engine workers", "engine.tp", wanted.engine_tp)]
    held = " and ".join(f"{count} {what}" for count, what, _, _ in sides if count)
    held += " on the same GPUs" if shared else ""
    if sum(sizes) < needed:
        return f"must hold {held}, {needed}, got {sum(sizes)}"
    inside = " and ".join(f"{knob} {tp}" for count, _, knob, tp in sides if count)
    listed = ", ".join(map(str, sizes))
    return f"must hold {held} with {inside} inside a node, got nodes of {listed} GPUs"


def _ways(config: Config, wanted: _Wanted, nodes: Sequence[Node]) -> str:
    """The nearest settings that can be placed; tensor parallelism is only narrowed to the widest node."""
    parallel, widest = config.train.parallel, max((node.num_gpus for node in nodes), default=0)
    per_dp, (ranks, workers) = wanted.groups // parallel.dp, wanted.gpus
    tried = [(f"engine.count={n}", replace(wanted, engines=n)) for n in range(wanted.engines - 1, 0, -1)]
    tried += [
        (f"train.parallel.dp={n}", replace(wanted, groups=n * per_dp)) for n in range(parallel.dp - 1, 0, -1)
    ]
    for tp in _divisors(wanted.engine_tp, widest):
        count = workers // tp
        tried.append((f"engine.tp={tp} engine.count={count}", replace(wanted, engine_tp=tp, engines=count)))
    for tp in _divisors(wanted.tp, widest):
        stages = f"train.parallel.tp={tp} train.parallel.pp={parallel.pp * wanted.tp // tp}"
        tried.append((stages, replace(wanted, tp=tp, groups=ranks // tp)))
    if not config.rollout.async_depth:
        shared = "cluster.placement=colocated"
        if config.engine.transport == "stream":
            shared += " engine.transport=auto"
        tried.append((f"{shared}, where memory allows,", replace(wanted, mode="colocated")))
    nearest: dict[str, str] = {}  # of each knob the first that fits
    for words, changed in tried:
        if _arrange(changed, nodes) is not None:
            nearest.setdefault(words.partition("=")[0], words)
    if not widest:
        nearest["cpu"] = "cluster.placement=cpu"
    return f"{' or '.join(nearest.values())} fits" if nearest else "no smaller dp or engine.count fits"


def _divisors(tp: int, widest: int) -> list[int]:
    """Narrower ones of a tensor parallelism that no node can hold, largest first."""
    return [narrow for narrow in range(widest, 0, -1) if tp % narrow == 0] if tp > widest else []
