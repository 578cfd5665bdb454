"""Measures training on packed trees against copied paths and a dense mask. One JSON line comes last.

    python tools/bench_training.py                      # TP 1 x PP 1, three tree shapes; minutes
    python tools/bench_training.py --tp 2 --pp 2        # four ranks
    python tools/bench_training.py --shape 2,6,1 --profile

All figures are of one run, one random Llama of 26 M parameters in fp32 and one set of random trees (FACTS
section 3: prompt 200, turns of 120 + 300 tokens, three deep, answer 60). Steps of the forms alternate and
their medians are compared; ratios named `cpu_` are of processor time over all ranks, which other work on the
machine hardly changes, but which leaves out waiting. `flop_ratio` is the speed-up over copied paths that
equal speed per FLOP would give: less than `token_ratio`, because what is shared most, the start of a path, is
cheapest to attend from and has the fewest trained tokens. `matmul_efficiency` is the step's products over
those of square matrices, per processor second. The ranks are in `bench_training_ranks`. Left out: growing,
publishing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # its other halves are found however it is started
from megatron_tree.config import AlgoConfig, ParallelConfig
from megatron_tree.reshard.names import ModelShape
from megatron_tree.train.group import RankSetup
from tools.bench_reshard import machine, random_weights
from tools.bench_training_ranks import Plan, run_ranks
from tools.bench_trees import TreeShape


def make_model(folder: Path, seed: int) -> ModelShape:
    """A Hugging Face folder of a random Llama: 4 layers, 640 wide, 10 heads and 2 KV heads of 64, untied. Few
    wide layers, so that head and attention take a share of the FLOPs nearer to that of a large model."""
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=4096,
        hidden_size=640,
        intermediate_size=2176,
        num_hidden_layers=4,
        num_attention_heads=10,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="float32",
    ).save_pretrained(folder)
    return random_weights(folder, seed)


def tree_shape(text: str) -> TreeShape:
    numbers = [int(part) for part in text.split(",")]
    if len(numbers) != 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be M,N,L, three numbers from 1 up, got {text}")
    return TreeShape(*numbers)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument(
        "--shape", type=tree_shape, action="append", help="M,N,L; may be given again (2,2,1 2,6,1 4,5,1)"
    )
    parser.add_argument("--prompts", type=int, help="of a step; by default one per stage")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each form")
    parser.add_argument("--profile", action="store_true", help="print where the time goes to stderr")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and files go
    shapes = tuple(args.shape or (tree_shape(text) for text in ("2,2,1", "2,6,1", "4,5,1")))
    prompts = args.prompts or args.pp
    with tempfile.TemporaryDirectory(prefix="megatron-tree-bench-") as folder:
        model = make_model(Path(folder), seed=1)
        setup = RankSetup(folder, ParallelConfig(tp=args.tp, pp=args.pp), "fp32", 1.0, AlgoConfig(), 600.0, 1)
        plan = Plan(shapes, prompts, args.micro_batch_tokens, args.steps, args.profile)
        figures = run_ranks(setup, plan)
    for shape, found in zip(shapes, figures, strict=True):
        print(f"{shape}: {rounded(found)}", file=sys.stderr)
    names = [f"{shape.trees},{shape.expand_nodes},{shape.expand_rounds}" for shape in shapes]
    report = {
        "tp": args.tp,
        "pp": args.pp,
        "prompts": prompts,
        "micro_batch_tokens": args.micro_batch_tokens,
        "steps": args.steps,
        "parameters": sum(map(math.prod, model.tensors().values())),
        "M,N,L": dict(zip(names, figures, strict=True)),
        "machine": machine(),
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(rounded(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
