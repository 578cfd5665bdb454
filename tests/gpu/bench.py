"""What the cases of the GPU table share: sizes, a trainer that is a group of one, clocks.

The same code runs on a CPU at toy size (`TOY`), so that a mistake in it shows without a GPU. Not here: what
is measured (`cases`), processes and the table (`table`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from megatron_tree.algo.batch import PackingSpec, step_batch
from megatron_tree.config import AlgoConfig, OptimizerConfig, ParallelConfig
from megatron_tree.train.group import RankSetup
from megatron_tree.types import Group, MicroBatch
from tools.bench_reshard import random_weights
from tools.bench_training_ranks import score
from tools.bench_trees import TreeShape, copied_batch, grow

if TYPE_CHECKING:
    from megatron_tree.train.rank import TrainRank

ALGO = AlgoConfig()
GIB = 1 << 30
Figures = dict[str, Any]


class Skipped(Exception):
    """The machine lacks what a case is about."""


@dataclass(frozen=True, slots=True)
class Sizes:
    dtype: Literal["fp32", "bf16"]  # of trainers and attention, where a case does not say
    model: dict[str, int]  # fields of the Llama's config.json
    tree: TreeShape
    lengths: tuple[int, ...]  # packed tokens of the micro-batches that are timed
    steps: int  # timed ones
    attention_error: float  # allowed, of the largest entry


GPU = Sizes(
    dtype="bf16",
    model={  # half a billion parameters: layers of a 3B model, a quarter as many
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32768,
    },
    tree=TreeShape(1, 6, 1),
    lengths=(8192, 16384, 32768),
    steps=5,
    attention_error=3e-2,
)
TOY = Sizes(
    dtype="fp32",
    model={
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
    },
    tree=TreeShape(1, 6, 1, prompt_tokens=6, action_tokens=4, observation_tokens=5, answer_tokens=3),
    lengths=(256, 512, 1024),
    steps=1,
    attention_error=1e-5,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step in two forms, under the same weights and advantages."""

    packed: list[MicroBatch]
    copied: list[MicroBatch]
    token_ratio: float


@dataclass(frozen=True, slots=True)
class Bench:
    device: Literal["cuda", "cpu"]
    sizes: Sizes
    folder: Path  # holds the model; cases write into it

    @classmethod
    def make(cls, folder: Path, *, toy: bool) -> Bench:
        return cls("cpu" if toy else "cuda", TOY if toy else GPU, folder)

    def make_model(self) -> None:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": 1 << 16,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            **self.sizes.model,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(config))
        random_weights(self.folder, seed=1)

    @contextmanager
    def training(self, **setup: Any) -> Iterator[TrainRank]:
        """A trainer of one rank, its process group made and destroyed. `setup`: fields of RankSetup."""
        from megatron_tree.train.rank import TrainRank

        defaults = {
            "model_path": str(self.folder),
            "parallel": ParallelConfig(),
            "dtype": self.sizes.dtype,
            "temperature": 1.0,
            "algo": ALGO,
            "collective_timeout_s": 60.0,
            "num_threads": 1,
        }
        trainer = TrainRank(0, RankSetup(**(defaults | setup)))
        trainer.start(trainer.bind(), str(self.folder))
        # the weights all but stay as they are
        trainer.begin(OptimizerConfig(lr=1e-30, weight_decay=0.0), 1000)
        yield trainer
        trainer.stop()

    def groups(self, packed_tokens: int) -> list[Group]:
        """As many prompts as fit in a micro-batch of so many packed tokens."""
        vocab, generator = self.sizes.model["vocab_size"], np.random.default_rng(1)
        found: list[Group] = []
        left = packed_tokens
        while True:
            group = grow(self.sizes.tree, vocab, generator, f"prompt{len(found)}")
            left -= sum(tree.num_unique_tokens for tree in group.trees)
            if left < 0:
                assert found, "a micro-batch holds at least one tree"
                return found
            found.append(group)

    def step(self, trainer: TrainRank, packed_tokens: int, *, pad_to: int = 1) -> Step:
        """Scored by the trainer as it is."""
        groups = self.groups(packed_tokens)
        spec = PackingSpec(1, packed_tokens, pad_to, trainer.shape.hidden)
        score(trainer, groups, spec)
        (packed,), metrics = step_batch(groups, ALGO, spec)
        (copied,) = copied_batch(groups, ALGO, spec)
        return Step(packed, copied, metrics["packing/copied_over_unique"].value)

    def measured(self, act: Callable[[], object]) -> Figures:
        """Median seconds, after one call that compiles and allocates, and the most memory a later call
        held; null on a CPU."""
        act()
        self.synchronize()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(self.sizes.steps):
            began = time.perf_counter()
            act()
            self.synchronize()
            times.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() / GIB if self.device == "cuda" else None
        return {"seconds": median(times), "peak_gib": peak}

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def overall(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """The difference of all gradients together, relative to their norm."""
    pairs = list(zip(expected, got, strict=True))
    off = sum(float((a.double() - b.double()).pow(2).sum()) for a, b in pairs)
    return (off / sum(float(a.double().pow(2).sum()) for a, _ in pairs)) ** 0.5
