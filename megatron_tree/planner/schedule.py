"""Megatron-Core's pipeline schedules on paper: what each stage runs in which order, and when. Pure.

1F1B, interleaved where a stage holds several model chunks: as many forward passes as fill the pipeline, then
one forward and one backward pass in turn, then the backward passes that are left. Not here: the time that
sends take, and what Megatron overlaps with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_tree.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward pass of a micro-batch through one model chunk of a stage."""

    chunk: int  # of the stage
    micro_batch: int
    forward: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    wall: float  # from the first pass to the last
    busy: tuple[float, ...]  # of each stage

    @property
    def bubble(self) -> float:
        """Share of the time in which a stage waits, on the mean."""
        return 1 - sum(self.busy) / (len(self.busy) * self.wall)


def passes(layout: ParallelLayout, stage: int, num_microbatches: int) -> list[Pass]:
    """In the order in which a stage runs them.

    Interleaved stages take micro-batches in groups of pp, each group through one chunk after the other; their
    number must be a multiple of pp. Worked example, pp=2, vpp=2, two micro-batches, chunks a and b: stage 1
    runs Fa0 Fa1 Fb0 Bb0 Fb1 Bb1 Ba0 Ba1.
    """
    pp, vpp = layout.pp, layout.vpp
    group = pp if vpp > 1 else num_microbatches
    assert num_microbatches % group == 0, "interleaved stages take whole groups of pp micro-batches"
    order = [
        (chunk, first + i)
        for first in range(0, num_microbatches, group)
        for chunk in range(vpp)
        for i in range(group)
    ]
    forward = [Pass(chunk, i, True) for chunk, i in order]
    backward = [Pass(vpp - 1 - chunk, i, False) for chunk, i in order]
    ahead = pp - 1 - stage if vpp == 1 else 2 * (pp - 1 - stage) + (vpp - 1) * pp
    ahead = min(ahead, len(order))
    turns = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
    return [*forward[:ahead], *turns, *backward[len(order) - ahead :]]


def replay(layout: ParallelLayout, num_microbatches: int, seconds: Callable[[int, Pass], float]) -> Timeline:
    """When every pass takes `seconds(stage, pass)`, starts as soon as its stage and its input are there, and
    sends take no time."""
    order = [passes(layout, stage, num_microbatches) for stage in range(layout.pp)]
    ended: dict[tuple[int, Pass], float] = {}
    at, clock, busy = [0] * layout.pp, [0.0] * layout.pp, [0.0] * layout.pp
    while len(ended) < sum(map(len, order)):
        before = len(ended)
        for stage, own in enumerate(order):
            while at[stage] < len(own):
                one = own[at[stage]]
                source = _source(layout, stage, one)
                if source is not None and source not in ended:
                    break
                taken = seconds(stage, one)
                clock[stage] = max(clock[stage], ended[source] if source else 0.0) + taken
                ended[stage, one] = clock[stage]
                busy[stage] += taken
                at[stage] += 1
        assert len(ended) > before, "the schedule waits for itself"
    return Timeline(max(clock), tuple(busy))


def _source(layout: ParallelLayout, stage: int, one: Pass) -> tuple[int, Pass] | None:
    """The stage and pass whose output a pass needs; its own forward pass always comes first."""
    place = one.chunk * layout.pp + stage
    if one.forward:
        before = place - 1
    elif place == layout.pp * layout.vpp - 1:
        return None
    else:
        before = place + 1
    if before < 0:
        return None
    chunk, other = divmod(before, layout.pp)
    return other, Pass(chunk, one.micro_batch, one.forward)
