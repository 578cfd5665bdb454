"""The cases of the GPU table. Each returns its figures; under `holds`, by name, what must be true of them.

No case needs another. What differs on a CPU: FlexAttention runs forward only and not compiled; `varlen` and
the cases of Transformer Engine and vLLM are skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_tree.algo.batch import PackingSpec, scoring_batch
from megatron_tree.config import EngineConfig, Fp8Config, OptimizerConfig, ParallelConfig
from megatron_tree.reshard import digest, image
from megatron_tree.reshard.source import ParamMeta, buckets
from megatron_tree.reshard.wire import borrow
from megatron_tree.train import backends
from megatron_tree.train.backends import BACKENDS, Attend
from megatron_tree.train.context import gather_tokens
from megatron_tree.train.tree_mask import TreeMask
from megatron_tree.types import Stream
from tests.gpu.bench import Bench, Figures, Skipped, overall
from tools.bench_training_ranks import (
    attending,
    dense_attention,
    differences,
    gradients,
    matmul_flops,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def process_group(bench: Bench) -> Figures:
    """The collectives of a rank that is alone, on the device's own back end."""
    with bench.training() as trainer, trainer._in("test"):
        values = torch.arange(6.0, device=bench.device)
        summed, gathered, scattered = values.clone(), torch.empty_like(values), torch.empty_like(values)
        dist.all_reduce(summed)
        dist.all_gather_into_tensor(gathered, values)
        dist.reduce_scatter_tensor(scattered, values)
        told = [{"from": 0}]
        dist.broadcast_object_list(told, src=0)
        dist.barrier()
        tokens = gather_tokens(values, (((0, 6),),), dist.group.WORLD)
        return {
            "backend": dist.get_backend(),
            "holds": {
                "collectives": all(torch.equal(x, values) for x in (summed, gathered, scattered, tokens)),
                "backend": dist.get_backend() == {"cuda": "nccl", "cpu": "gloo"}[bench.device],
                "objects": told == [{"from": 0}],
            },
        }


def gradients_packed_and_copied(bench: Bench) -> Figures:
    """Packed trees against a sequence for every leaf, through Megatron. In fp32 they are the same but for the
    order of sums. In bf16 packing adds no error to that of bf16 itself: both forms are held against fp32."""
    size, found, worst = bench.sizes.lengths[0], {}, {}
    with bench.training(dtype="fp32") as trainer:
        step = bench.step(trainer, size)
        exact = gradients(trainer, step.copied)
        packed = gradients(trainer, step.packed)
        found["fp32_packed"], worst["fp32_packed"] = overall(exact, packed), max(differences(exact, packed))
        del packed
        exact = [tensor.cpu() for tensor in exact]
    with bench.training(dtype="bf16") as trainer:
        for form, batches in (("bf16_copied", step.copied), ("bf16_packed", step.packed)):
            got = [tensor.cpu() for tensor in gradients(trainer, batches)]
            found[form], worst[form] = overall(exact, got), max(differences(exact, got))
    return {
        "token_ratio": step.token_ratio,
        "difference_from_fp32_copied": found,
        "of_the_worst_parameter": worst,
        "holds": {
            "fp32_equal": found["fp32_packed"] <= 1e-4,
            "bf16_no_worse_packed": found["bf16_packed"] <= 1.5 * found["bf16_copied"],
            "bf16_near": found["bf16_packed"] <= 0.2,
        },
    }


def attention(name: str, bench: Bench) -> Figures:
    """One back end: its output and gradients against a dense mask in double precision, then its time."""
    dtype, attend = DTYPES[bench.sizes.dtype], BACKENDS[name]
    trains = bench.device == "cuda" or name == "node"
    if bench.device == "cpu" and name == "varlen":
        raise Skipped("torch's variable-length flash attention needs a GPU")
    if not trains:
        from torch.nn.attention.flex_attention import flex_attention

        backends._compiled_flex = lambda: flex_attention
    exact = TreeMask.of(_subtree_end(bench, bench.sizes.lengths[0] // 2), bench.device)
    errors = _errors(bench, attend, exact, dtype, trains=trains)
    times = {}
    for length in bench.sizes.lengths:
        mask = TreeMask.of(_subtree_end(bench, length), bench.device)
        inputs = _inputs(bench, mask, dtype, trains=trains)
        times[str(mask.num_queries)] = bench.measured(partial(_attend, attend, inputs, mask))
    return {
        "errors": errors,
        "by_tokens": times,
        "holds": {f"{part}_exact": error <= bench.sizes.attention_error for part, error in errors.items()},
    }


def _errors(
    bench: Bench, attend: Attend, mask: TreeMask, dtype: torch.dtype, *, trains: bool
) -> dict[str, float]:
    """Of the output and, where it has them, the gradients: the largest, relative to the largest entry."""
    inputs = _inputs(bench, mask, dtype, trains=trains)
    exact = [tensor.detach().double().requires_grad_(trains) for tensor in inputs]
    expected, got = _attend(dense_attention, exact, mask), _attend(attend, inputs, mask)
    parts = ("output", "query_gradient", "key_gradient", "value_gradient")
    return {
        part: float((a - b.double()).abs().max() / a.abs().max())
        for part, a, b in zip(parts, expected, got, strict=False)
    }


def _attend(attend: Attend, inputs: list[Tensor], mask: TreeMask) -> list[Tensor]:
    """The output and, where inputs ask for them, the gradients of its products with a fixed weight."""
    out = attend(*inputs, mask)
    if not out.requires_grad:
        return [out]
    weight = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    grad = weight.expand_as(out).contiguous()
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _inputs(bench: Bench, mask: TreeMask, dtype: torch.dtype, *, trains: bool) -> list[Tensor]:
    """Query, key and value of the model's heads."""
    model, generator = bench.sizes.model, torch.Generator(bench.device).manual_seed(mask.num_queries)
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    size, made = model["hidden_size"] // heads, []
    for count in (heads, kv_heads, kv_heads):
        values = torch.randn(mask.num_queries, count, size, generator=generator, device=bench.device)
        made.append(values.to(dtype).requires_grad_(trains))
    return made


def _subtree_end(bench: Bench, tokens: int) -> Tensor:
    trees = [tree for group in bench.groups(tokens) for tree in group.trees]
    (batch,), _ = scoring_batch(trees, PackingSpec(1, tokens, 1, bench.sizes.model["hidden_size"]))
    return batch[0].subtree_end


def attention_in_a_step(bench: Bench) -> Figures:
    """One step of the model with each back end, and with torch's attention under a dense mask."""
    usable = ("flex", "varlen", "node") if bench.device == "cuda" else ("node",)
    ways: dict[str, Attend] = {"dense": dense_attention} | {name: BACKENDS[name] for name in usable}
    found: dict[str, Figures] = {}
    with bench.training() as trainer:
        step = bench.step(trainer, bench.sizes.lengths[0])
        expected = None
        for name, attend in ways.items():
            with attending(trainer, attend):
                got = gradients(trainer, step.packed)
                expected = expected or got
                timed = bench.measured(partial(trainer.train, step.packed, "policy"))
            found[name] = {"difference_from_dense": overall(expected, got), **timed}
    near = {"bf16": 0.1, "fp32": 1e-4}[bench.sizes.dtype]
    return {
        "by_attention": found,
        "holds": {
            f"{name}_near": figures["difference_from_dense"] <= near for name, figures in found.items()
        },
    }


def speed(length: int, bench: Bench) -> Figures:
    """A training step on packed trees over one on copied paths, in micro-batches of the same size."""
    with bench.training() as trainer:
        step = bench.step(trainer, bench.sizes.lengths[length])
        forms = {"packed": step.packed, "copied": step.copied}
        timed = {
            form: bench.measured(partial(trainer.train, batches, "policy")) for form, batches in forms.items()
        }
        flops = {form: matmul_flops(trainer.shape, batches) for form, batches in forms.items()}
    seconds = {form: figures["seconds"] for form, figures in timed.items()}
    return {
        "tokens": {form: sum(b.num_tokens for b in batches) for form, batches in forms.items()},
        "micro_batches": {form: len(batches) for form, batches in forms.items()},
        "token_ratio": step.token_ratio,
        "flop_ratio": flops["copied"] / flops["packed"],
        "speedup": seconds["copied"] / seconds["packed"],
        "tflops": {form: flops[form] / seconds[form] / 1e12 for form in forms},
        **timed,
        "holds": {"one_micro_batch": len(step.packed) == 1},
    }


def a_run(bench: Bench) -> Figures:
    """The verbs of a run: train with the distributed optimizer, save, load, publish."""
    parallel = ParallelConfig(distributed_optimizer=True)
    with bench.training(parallel=parallel) as trainer:
        step = bench.step(trainer, bench.sizes.lengths[0])
        trainer.begin(OptimizerConfig(lr=1e-3), 10)
        before = _weights(trainer.actor)
        results = [trainer.train(step.packed, "policy") for _ in range(2)]
        folder = bench.folder / "checkpoint"
        trainer.save(str(folder))
        trainer.saved(blocking=True)
        saved = _weights(trainer.actor)
        after = [trainer.train(step.packed, "policy")]
        moved = _weights(trainer.actor)
        trainer.load(str(folder))
        loaded = _weights(trainer.actor)
        after.append(trainer.train(step.packed, "policy"))
        update = trainer.create_image(str(bench.folder), "table", 1, bench.sizes.dtype)
        trainer.write_version(update)
        path = Path(update.image)
        digest.verify(path, 1, trainer.shape, image.Maps(writable=False))
        published = image.Maps(writable=False).tensors(path)["model.embed_tokens.weight"]
        served = next(p for n, p in trainer.actor[0].named_parameters() if "word_embeddings" in n)
        vocab = bench.sizes.model["vocab_size"]
        return {
            "grad_norms": [result.grad_norm for result in (*results, *after)],
            "holds": {
                "no_step_skipped": not any(result.skipped for result in (*results, *after)),
                "steps_move_weights": not _same(before, saved) and not _same(saved, moved),
                "loaded_is_saved": _same(saved, loaded),
                "same_step_after_loading": math.isclose(*(x.grad_norm for x in after), rel_tol=1e-3),
                "published_is_trained": torch.equal(published, served.detach()[:vocab].cpu()),
            },
        }


def lent_memory(bench: Bench) -> Figures:
    """Versions through memory that the trainer lends to another process on its device, by CUDA IPC on a GPU,
    against the model's file. The first send waits for that process."""
    with bench.training() as trainer:
        update = trainer.keep_version(1, bench.sizes.dtype, 1, 60.0, lends=True)
        stream = replace(update.stream, wire="worker")
        spawn = multiprocessing.get_context("spawn")
        told, tells = spawn.Pipe(duplex=False)
        worker = spawn.Process(target=_borrow, args=(stream, bench.device, tells))
        worker.start()
        trainer.send_version(update, [stream.wire])
        began = time.monotonic()
        trainer.send_version(update, [stream.wire])
        seconds = time.monotonic() - began
        got = told.recv()
        worker.join()
    weights, expected = load_file(bench.folder / "model.safetensors"), hashlib.sha256()
    for name in update.names:
        expected.update(weights[name].to(DTYPES[bench.sizes.dtype]).view(torch.uint8).numpy())
    size = sum(weights[name].numel() for name in update.names) * DTYPES[bench.sizes.dtype].itemsize
    return {
        "gb_per_s": size / seconds / 1e9,
        "holds": {"bit_for_bit": got == [expected.hexdigest()] * 2},
    }


def _borrow(stream: Stream, device: str, tells: Connection) -> None:
    """The worker's process: tells the digests of two sends."""
    timeout, dtype = timedelta(seconds=stream.timeout_s), getattr(torch, stream.dtype)
    store = dist.TCPStore(*stream.address, is_master=False, timeout=timeout)
    here = torch.device(device, 0) if device == "cuda" else torch.device(device)
    wire, sends = borrow(store, stream.wire, 0, 1, here, timeout), []
    for _ in range(2):
        got = []
        for segment in stream.segments:
            metas = [ParamMeta(*of) for of in zip(segment.names, repeat(dtype), segment.shapes)]
            for bucket in buckets(metas, stream.bucket_bytes):
                size = sum(meta.num_elements for meta in bucket) * dtype.itemsize
                got.append(torch.empty(size, dtype=torch.uint8, device=here))
                wire.broadcast(got[-1], src=0)
        sends.append(got)
    tells.send([hashlib.sha256(torch.cat(got).cpu().numpy()).hexdigest() for got in sends])


def _weights(chunks: list[torch.nn.Module]) -> list[Tensor]:
    return [p.detach().clone() for chunk in chunks for p in chunk.parameters()]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def fp8_training(recipe: str, bench: Bench) -> Figures:
    """Transformer Engine's FP8 layers against the same in bf16."""
    _needs("transformer_engine", "Transformer Engine", bench)
    fp8 = Fp8Config(recipe=recipe)  # type: ignore[arg-type]
    with bench.training(dtype="bf16") as trainer:
        step = bench.step(trainer, bench.sizes.lengths[1], pad_to=fp8.multiple)
        expected = [tensor.cpu() for tensor in gradients(trainer, step.packed)]
        bf16 = bench.measured(partial(trainer.train, step.packed, "policy"))
    with bench.training(dtype="bf16", fp8=fp8) as trainer:
        difference = overall(expected, [tensor.cpu() for tensor in gradients(trainer, step.packed)])
        timed = bench.measured(partial(trainer.train, step.packed, "policy"))
    return {
        "difference_from_bf16": difference,
        "speedup_over_bf16": bf16["seconds"] / timed["seconds"],
        "bf16": bf16,
        "fp8": timed,
        "holds": {"near": difference <= 0.5},
    }


def fp8_engine(bench: Bench) -> Figures:
    """An FP8 engine takes two versions; its log-probs beside those of transformers with the same rounding."""
    _needs("vllm", "vLLM", bench)
    return engine_in_fp8(bench.folder / "served")


def engine_in_fp8(folder: Path) -> Figures:
    """In this process, without Ray."""
    from megatron_tree.engine.engine import Engine
    from tests.e2e.engines import Served
    from tests.e2e.rounding import NEARER, mean_gaps
    from tests.tiny_models import make_model

    model = make_model(folder, seed=7, dtype=torch.bfloat16)
    config = EngineConfig(quantization="fp8", max_model_len=512, kv_cache_gib=0.1, gpu_memory_utilization=0.3)
    gaps = []
    with asyncio.Runner() as loop:
        engine = Engine(str(folder), config)
        loop.run(engine.start())
        served = Served(loop, folder, model, engine.generate, [engine])  # type: ignore[arg-type,list-item]
        for version in range(3):
            if version:
                update = served.publish()
                loop.run(engine.check(update))
                loop.run(engine.update(update))
            gaps.append(mean_gaps(served, f"v{version}"))
        loop.run(engine.stop())
    return {
        "mean_logprob_gaps": {"same_rounding": [a for a, _ in gaps], "no_rounding": [b for _, b in gaps]},
        "holds": {"rounds_alike": all(same < NEARER * plain for same, plain in gaps)},
    }


def _needs(module: str, name: str, bench: Bench) -> None:
    if importlib.util.find_spec(module) is None:
        raise Skipped(f"{name} is not installed")
    if bench.device == "cpu":
        raise Skipped(f"{name}'s FP8 on a CPU is the end-to-end tests' matter")


CASES: dict[str, Callable[[Bench], Figures]] = {
    "process_group": process_group,
    "gradients": gradients_packed_and_copied,
    "speed_8k": partial(speed, 0),
    "speed_16k": partial(speed, 1),
    "speed_32k": partial(speed, 2),
    "attention_flex": partial(attention, "flex"),
    "attention_varlen": partial(attention, "varlen"),
    "attention_node": partial(attention, "node"),
    "attention_in_a_step": attention_in_a_step,
    "a_run": a_run,
    "lent_memory": lent_memory,
    "fp8_training_tensorwise": partial(fp8_training, "tensorwise"),
    "fp8_training_blockwise": partial(fp8_training, "blockwise"),
    "fp8_engine": fp8_engine,
}
