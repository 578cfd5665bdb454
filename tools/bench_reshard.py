"""Measures publishing: Megatron ranks write a version, a vLLM engine takes it. One JSON line comes last.

    python tools/bench_reshard.py             # 604 MB of fp32, TP 2 x PP 2, one engine; minutes on two cores
    python tools/bench_reshard.py --profile   # also where the time goes

All figures are of one run and one random Llama model, made on the spot and removed at the end. Every ratio
sets ours against something that moves the same bytes on the same machine; medians are compared. Bytes are
counted where they are read or written, not derived from the plan. The Megatron side is in
`bench_reshard_ranks`, vLLM's in `bench_reshard_engine`. Left out: networks and GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_tree.reshard import image
from megatron_tree.reshard.names import ModelShape, read_shape

sys.path.insert(0, str(Path(__file__).parent.parent))  # its other halves are found however it is started
from tools.bench_reshard_engine import run_engine
from tools.bench_reshard_ranks import run_ranks


def make_model(folder: Path, num_layers: int, hidden: int, vocab: int, seed: int) -> ModelShape:
    """A Hugging Face folder of a random Llama: 12 heads of hidden / 12, 4 KV heads, untied."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
    ).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return random_weights(folder, seed)


def random_weights(folder: Path, seed: int) -> ModelShape:
    """What a folder's config asks for, in fp32: norms near 1, everything else near 0."""
    shape = read_shape(folder)
    image.create(folder / "model.safetensors", shape, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in image.writable(folder / "model.safetensors").items():
        tensor.normal_(1.0 if "norm" in name else 0.0, 0.02, generator=generator)
    return shape


def report(ranks: dict[str, Any], engine: dict[str, Any], model_bytes: int) -> dict[str, Any]:
    """The ratios first, then what they are made of."""
    read = engine["bytes_digested"] + engine["bytes_copied"]
    resharding = ranks["megatron_resharding_seconds"]
    return {
        "bytes_written_over_model_bytes": round(ranks["bytes_written"] / model_bytes, 5),
        "bytes_read_over_needed": round(read / engine["bytes_needed"], 4),
        "write_seconds_over_memcpy": round(ranks["write_seconds"] / ranks["memcpy_seconds"], 3),
        "load_seconds_over_vllm_reload": round(engine["load_seconds"] / engine["vllm_reload_seconds"], 3),
        "stream_seconds_over_write": round(ranks["stream_seconds"] / ranks["write_seconds"], 3),
        "ipc_seconds_over_write": round(ranks["ipc_seconds"] / ranks["write_seconds"], 3),
        "gather_baseline_over_ours": round(ranks["gather_seconds"] / ranks["write_seconds"], 3),
        "megatron_resharding_over_ours": resharding and round(resharding / ranks["write_seconds"], 3),
        **{k: round(v, 4) if isinstance(v, float) else v for k, v in {**ranks, **engine}.items()},
        "model_bytes": model_bytes,
        "machine": machine(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{os.cpu_count()} x {cpu}, {platform.system()} {platform.release()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--engine-tp", type=int, default=1)
    parser.add_argument("--image-dir", default="/dev/shm", help="where images lie; 4 x the model is needed")
    parser.add_argument("--profile", action="store_true", help="print where the time goes to stderr")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and images go
    with tempfile.TemporaryDirectory(prefix="megatron-tree-bench-", dir=args.image_dir) as shared:
        model = Path(shared) / "model"
        shape = make_model(model, args.num_layers, args.hidden, args.vocab, seed=1)
        model_bytes = sum(map(math.prod, shape.tensors().values())) * torch.float32.itemsize
        free = shutil.disk_usage(shared).free
        if free < 3 * model_bytes:
            parser.error(f"--image-dir: {args.image_dir} needs {3 * model_bytes} more bytes, {free} are free")
        ranks, updates = run_ranks(model, Path(shared), args.profile)
        engine = run_engine(model, args.engine_tp, updates, args.profile)
    print(json.dumps(report(ranks, engine, model_bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
