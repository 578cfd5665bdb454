"""How far log-probs and gradients move when a model computes in bf16 or in FP8 instead of fp32.

    python -m tools.fp8_errors MODEL_FOLDER examples/quickstart/generated/demonstrations.jsonl

The trained tokens of demonstrations, on one rank, FP8 emulated; sizes must be multiples of 128. Delayed
scaling is measured once its history holds these tokens' amaxes, which for gradients takes a pass per layer:
what the last layer flushes to zero the ones before never see. Gradients are those of the warm-up's loss. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch

from megatron_tree.algo.batch import PackingSpec, sft_batch
from megatron_tree.config import AlgoConfig, Fp8Config, OptimizerConfig, ParallelConfig
from megatron_tree.data.demonstrations import load_demonstrations
from megatron_tree.rollout.tokens import Tokens
from megatron_tree.train.group import RankSetup
from megatron_tree.train.precision import RECIPES
from megatron_tree.train.rank import TrainRank
from megatron_tree.types import MicroBatch, Tree

MICRO_BATCH = 2048  # tokens


def setups(model: str) -> Iterator[tuple[str, RankSetup]]:
    """fp32 first, then what is compared with it. bf16 FP8 is not emulated: fp32 shows the rounding alone."""

    def setup(dtype: Literal["fp32", "bf16"], fp8: Fp8Config | None) -> RankSetup:
        return RankSetup(model, ParallelConfig(), dtype, 1.0, AlgoConfig(), 600.0, 1, fp8=fp8)

    yield "fp32", setup("fp32", None)
    yield "bf16", setup("bf16", None)
    for recipe in RECIPES:
        for form in ("e4m3", "hybrid"):
            fp8 = Fp8Config.model_validate({"recipe": recipe, "format": form})
            yield f"{recipe} {form}", setup("fp32", fp8)


def measure(setup: RankSetup, batches: list[MicroBatch]) -> tuple[np.ndarray, torch.Tensor]:
    """Log-probs of all trained tokens, and all gradients in one vector."""
    trainer = TrainRank(0, setup)
    trainer.start(trainer.bind(), setup.model_path)
    trainer.begin(OptimizerConfig(), 1)
    delayed = setup.fp8 is not None and setup.fp8.recipe == "delayed"
    for _ in range(2 * trainer.shape.num_layers if delayed else 1):
        with trainer._in("measure"):
            trainer.accumulate(batches, "sft")
    logprobs = trainer.score(batches, "actor")
    assert logprobs is not None
    grads = torch.cat([param.main_grad.float().flatten() for param in trainer.actor[0].parameters()])
    trainer.stop()
    return np.concatenate(logprobs), grads


def report(model: str, trees: list[Tree]) -> dict[str, Any]:
    spec = PackingSpec(dp=1, micro_batch_tokens=MICRO_BATCH, pad_to=128, hidden_size=1)
    (batches,) = sft_batch(trees, spec)[0]
    found = {name: measure(setup, batches) for name, setup in setups(model)}
    exact, exact_grads = found.pop("fp32")
    table = {}
    for name, (logprobs, grads) in found.items():
        off = np.abs(logprobs - exact)
        table[name] = {
            "mean": float(f"{off.mean():.2e}"),
            "p99": float(f"{np.quantile(off, 0.99):.2e}"),
            "max": float(f"{off.max():.2e}"),
            "gradient": round(float((grads - exact_grads).norm() / exact_grads.norm()), 4),
        }
    return {"tokens": len(exact), "mean_logprob": round(float(exact.mean()), 4), "errors": table}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("data", help=".jsonl file of demonstrations")
    parser.add_argument("--count", type=int, default=256, help="of demonstrations, the first ones")
    args = parser.parse_args()
    tokens = Tokens(args.model)
    trees = load_demonstrations(
        [args.data],
        encode_chat=tokens.chat,
        encode=tokens.encode,
        max_prompt_tokens=MICRO_BATCH,
        max_path_tokens=MICRO_BATCH,
    )
    print(json.dumps(report(args.model, trees[: args.count])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
