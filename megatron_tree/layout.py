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
    """Sizes of the mesh axes. Worked example: tp=2, pp=2, dp=2 has 8 ranks; rank 5 is tp 1, dp 0, pp 1.

    A stage holds `vpp` model chunks: chunk v of stage p is the (v * pp + p)-th in pipeline order.
    `stage_split` gives the layers of every chunk in that order; without it the chunks are equal. Worked
    example: 7 layers, pp=2, vpp=2, stage_split=(1, 2, 2, 2): stage 0 has layers 0 and 3-4, stage 1 has 1-2
    and 5-6.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    stage_split: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp: must be 1 where pp is 1, got {self.vpp}")
        chunks, split = self.pp * self.vpp, self.stage_split
        if split is not None and (len(split) != chunks or min(split) < 0):
            raise ValueError(f"stage_split: must have pp * vpp = {chunks} numbers from 0 up, got {split}")

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

    def tensor_groups(self) -> list[range]:
        """The ranks of each tensor-parallel group, in rank order."""
        return [range(first, first + self.tp) for first in range(0, self.world_size, self.tp)]

    def is_first_replica(self, rank: int) -> bool:
        """True for dp 0, cp 0: every other rank holds the same weights as one of these."""
        at = self.coordinates(rank)
        return at.dp == at.cp == 0

    def speaks_for_stage(self, rank: int) -> bool:
        """True for the one rank of each stage that reports for it: tp 0, cp 0, dp 0."""
        at = self.coordinates(rank)
        return at.tp == at.cp == at.dp == 0

    def output_ranks(self) -> list[int]:
        """For each dp, and in it each cp, the rank of the last stage that reports log-probs and losses."""
        return [
            self.rank(Coordinates(tp=0, cp=cp, dp=dp, pp=self.pp - 1))
            for dp in range(self.dp)
            for cp in range(self.cp)
        ]

    def context_ranges(self, num_tokens: int, cp_rank: int) -> tuple[tuple[int, int], ...]:
        """The tokens `[start, stop)` of a micro-batch that one context-parallel rank holds: two of 2 * cp
        equal parts, an early and a late one, since late tokens see more.

        Worked example: cp=2, 8 tokens: rank 0 has 0..2 and 6..8, rank 1 has 2..4 and 4..6.
        """
        if self.cp == 1:
            return ((0, num_tokens),)
        part, rest = divmod(num_tokens, 2 * self.cp)
        assert rest == 0, f"{num_tokens} tokens are no multiple of 2 * cp = {2 * self.cp}"
        parts = (cp_rank, 2 * self.cp - 1 - cp_rank)
        return tuple((i * part, (i + 1) * part) for i in parts)

    def split(self, num_layers: int) -> tuple[int, ...]:
        """Number of layers of each chunk, in pipeline order."""
        chunks = self.pp * self.vpp
        if self.stage_split is not None:
            if sum(self.stage_split) != num_layers:
                raise ValueError(
                    f"stage_split: must sum to the model's {num_layers} layers, got {self.stage_split}"
                )
            return self.stage_split
        if num_layers % chunks:
            raise ValueError(f"pp: {num_layers} layers do not divide into pp * vpp = {chunks} equal parts")
        return (num_layers // chunks,) * chunks

    def stage_layers(self, num_layers: int, pp_rank: int, vpp_rank: int = 0) -> range:
        """Global layer numbers of one model chunk."""
        split, chunk = self.split(num_layers), vpp_rank * self.pp + pp_rank
        first = sum(split[:chunk])
        return range(first, first + split[chunk])

    def has_embedding(self, pp_rank: int, vpp_rank: int = 0) -> bool:
        return pp_rank == vpp_rank == 0

    def has_head(self, pp_rank: int, vpp_rank: int = 0) -> bool:
        """The final norm and the output layer are in the last chunk of the last stage."""
        return pp_rank == self.pp - 1 and vpp_rank == self.vpp - 1

    def pipeline_layout(self, num_layers: int) -> str:
        """Megatron-Core's `pipeline_model_parallel_layout`, which can express every split: 3 layers over
        pp=2 as (1, 2) are `Et|ttL`."""
        return "E" + "|".join("t" * layers for layers in self.split(num_layers)) + "L"


def megatron_split(
    num_layers: int,
    pp: int,
    vpp: int = 1,
    *,
    first_stage: int | None = None,
    last_stage: int | None = None,
    embedding: bool = False,
    loss: bool = False,
) -> tuple[int, ...]:
    """The `stage_split` that Megatron-Core's own options describe: num_layers_in_first_pipeline_stage,
    num_layers_in_last_pipeline_stage, account_for_embedding_in_pipeline_split, account_for_loss_in_….

    Stages without a number of their own are equal, and so are the chunks of a stage. Embedding and loss count
    as one layer each. Worked example: 8 layers, pp=4, first_stage=1, last_stage=1: (1, 3, 3, 1).
    """
    uneven = (first_stage is not None) + (last_stage is not None)
    if uneven and (embedding or loss):
        raise ValueError(
            "account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: "
            "cannot be set beside the layers of the first or last stage"
        )
    for option, layers in (("first", first_stage), ("last", last_stage)):
        if layers is not None and layers < 1:
            raise ValueError(f"num_layers_in_{option}_pipeline_stage: must be at least 1, got {layers}")
    given = (first_stage or 0) + (last_stage or 0)
    equal, layers = pp - uneven, num_layers - given + embedding + loss
    if equal < 0 or layers < 0 or bool(equal) != bool(layers) or (equal and layers % equal):
        raise ValueError(f"pp: {layers} layers do not divide into {equal} equal stages")
    stages = [layers // equal if equal else 0] * pp
    stages[0] = stages[0] if first_stage is None else first_stage
    stages[-1] = stages[-1] if last_stage is None else last_stage
    if any(layers % vpp for layers in stages):
        raise ValueError(f"vpp: must divide the layers of every stage, {stages}, got {vpp}")
    split = [layers // vpp for _ in range(vpp) for layers in stages]
    split[0] -= embedding
    split[-1] -= loss
    return tuple(split)
