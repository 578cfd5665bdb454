"""Which rank is where, and which layers it holds. Pure integers: no process, no torch.

The rank order is Megatron-Core's default, `tp-cp-ep-dp-pp` with ep = 1: tensor-parallel neighbours are
adjacent ranks, pipeline stages are furthest apart. No rank arithmetic exists outside this file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinates:
    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the mesh axes. Worked example: tp=2, pp=2, dp=2 has 8 ranks; rank 5 is tp 1, dp 0, pp 1."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: must be in [0, {self.world_size}), got {rank}")
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, at: Coordinates) -> int:
        return at.tp + self.tp * (at.cp + self.cp * (at.dp + self.dp * at.pp))

    def ranks(self) -> range:
        return range(self.world_size)

    def speaks_for_stage(self, rank: int) -> bool:
        """True for the one rank of each stage that reports for it: tp 0, cp 0, dp 0."""
        at = self.coordinates(rank)
        return at.tp == at.cp == at.dp == 0

    def output_ranks(self) -> list[int]:
        """For each dp, the rank of the last stage that reports its log-probs and losses (tp 0, cp 0)."""
        return [self.rank(Coordinates(tp=0, cp=0, dp=dp, pp=self.pp - 1)) for dp in range(self.dp)]

    def stage_layers(self, num_layers: int, pp_rank: int, vpp_rank: int = 0) -> range:
        """Global layer numbers of one model chunk; chunk v of stage p is the (v * pp + p)-th of pp * vpp
        equal parts."""
        chunks = self.pp * self.vpp
        if num_layers % chunks:
            raise ValueError(f"pp: {num_layers} layers do not divide into pp * vpp = {chunks} equal parts")
        per_chunk = num_layers // chunks
        first = (vpp_rank * self.pp + pp_rank) * per_chunk
        return range(first, first + per_chunk)
