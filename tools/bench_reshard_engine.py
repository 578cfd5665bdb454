"""The vLLM side of `bench_reshard`: one engine takes versions that lie in image slots.

Our load (check, pause, load, drop the prefix cache, resume) and vLLM's own `reload_weights` of the very same
file take turns. vLLM's neither checks anything nor pauses. After each the engine scores the same tokens: both
must give the same log-probs, and others than before the first.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import pstats
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tree.config import EngineConfig
from megatron_tree.engine.engine import Engine
from megatron_tree.reshard import digest, image, plan
from megatron_tree.types import Update
from tools.bench_ranks import run_processes

REPEATS = 3
PROMPT = np.arange(5, 85, dtype=np.int32)
Figures = dict[str, Any]


class CountingHashes:
    """Stands where `digest` looks for xxhash: the same digests, their bytes counted."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def xxh3_64(self) -> Any:
        state, count = xxhash.xxh3_64(), self.count

        class Counting:
            hexdigest = staticmethod(state.hexdigest)

            def update(self, block: np.ndarray) -> None:
                count(block)
                state.update(block)

        return Counting()

    def count(self, block: np.ndarray) -> None:
        self.num_bytes += block.nbytes


class ImageReads(TorchDispatchMode):
    """Counts the bytes that torch's operators, in this thread, read from one file's mapped pages."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._maps: list[tuple[int, int]] = []
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            if not args[0].is_meta:  # else a dry run of vLLM's loader: nothing is read
                self.num_bytes += self._bytes(args[1])
        elif isinstance(result, torch.Tensor) and not self._bytes(result):  # a view reads nothing
            self.num_bytes += sum(self._bytes(arg) for arg in args if isinstance(arg, torch.Tensor))
        return result

    def _bytes(self, tensor: torch.Tensor) -> int:
        if tensor.is_meta or not tensor.numel():
            return 0
        if not self._inside(tensor):
            self._maps = _maps(self._path)  # it may have been mapped meanwhile
        return tensor.numel() * tensor.element_size() if self._inside(tensor) else 0

    def _inside(self, tensor: torch.Tensor) -> bool:
        return any(low <= tensor.data_ptr() < high for low, high in self._maps)


def _maps(path: str) -> list[tuple[int, int]]:
    """Address ranges at which this process has mapped a file."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    return [(int(low, 16), int(high, 16)) for low, high in (line.split()[0].split("-") for line in lines)]


def run_engine(model: Path, tp: int, updates: list[Update], profile: bool) -> Figures:
    return run_processes([partial(_serve, model, tp, updates, profile)])


def _serve(model: Path, tp: int, updates: list[Update], profile: bool) -> Figures:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # our own functions go to the workers
    with asyncio.Runner() as runner:
        return runner.run(_measure(model, tp, updates, profile))


async def _measure(model: Path, tp: int, updates: list[Update], profile: bool) -> Figures:
    config = EngineConfig(tp=tp, dtype="fp32", max_model_len=512, max_num_seqs=8, kv_cache_gib=0.1)
    engine = Engine(str(model), config)
    await engine.start()
    try:
        before = await engine.score("before", PROMPT)
        folder = _beside(model, updates[0])
        times: dict[str, list[float]] = {"check_seconds": [], "load_seconds": [], "vllm_reload_seconds": []}
        for turn in range(REPEATS + 1):  # the first of each warms up
            update = updates[turn % len(updates)]
            for name, seconds in (await _ours(engine, update)).items():
                times[name].append(seconds)
            ours = await engine.score(f"ours {turn}", PROMPT)
            times["vllm_reload_seconds"].append(await _theirs(engine, folder))
            theirs = await engine.score(f"theirs {turn}", PROMPT)
            if np.array_equal(before, ours) or not np.array_equal(ours, theirs):
                raise AssertionError("the engine does not compute with the published weights")
        figures: Figures = {name: median(seconds[1:]) for name, seconds in times.items()}
        if profile:
            await engine._llm.collective_rpc(_watch, args=(None,))
            await engine.update(updates[0])
            await engine._llm.collective_rpc(_watched)
        return figures | await _count_reads(engine, tp, updates[1])
    finally:
        await engine.stop()


def _beside(model: Path, update: Update) -> Path:
    """A folder whose weights file is the image itself, for vLLM's own loader: the same pages, no disk."""
    folder = model.with_name("published")
    folder.mkdir()
    image.carry_files(model, folder)
    (folder / "model.safetensors").symlink_to(update.image)
    return folder


async def _ours(engine: Engine, update: Update) -> dict[str, float]:
    began = time.perf_counter()
    await engine.check(update)
    checked = time.perf_counter()
    await engine.update(update)
    return {"check_seconds": checked - began, "load_seconds": time.perf_counter() - began}


async def _theirs(engine: Engine, folder: Path) -> float:
    began = time.perf_counter()
    await engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    seconds = time.perf_counter() - began
    await engine._llm.reset_prefix_cache(reset_running_requests=True)
    return seconds


async def _count_reads(engine: Engine, tp: int, update: Update) -> Figures:
    """Bytes of the image that the engine's check digests, and that its workers copy, in one load."""
    digest.xxhash = CountingHashes()
    await engine.check(update)
    digested, digest.xxhash = digest.xxhash.num_bytes, xxhash
    await engine._llm.collective_rpc(_watch, args=(update.image,))
    await engine.update(update)
    copied = sum(await engine._llm.collective_rpc(_watched))
    reads = [plan.num_elements(plan.engine_reads(engine._shape, tp, worker)) for worker in range(tp)]
    needed = sum(reads) * torch.float32.itemsize
    return {"bytes_digested": digested, "bytes_copied": copied, "bytes_needed": needed}


def _watch(worker: Any, path: str | None) -> None:
    """In a vLLM worker: the next loads run under a counter of the image's bytes, or under a profiler."""
    receiver = worker.weight_transfer_engine
    receiver.watch = ImageReads(path) if path else cProfile.Profile()
    load = receiver.receive_weights

    def watched(update_info: Any) -> None:
        with receiver.watch:
            load(update_info)

    receiver.receive_weights = watched


def _watched(worker: Any) -> int:
    """Bytes read; a profile is printed."""
    receiver = worker.weight_transfer_engine
    del receiver.receive_weights
    if isinstance(receiver.watch, ImageReads):
        return receiver.watch.num_bytes
    pstats.Stats(receiver.watch, stream=sys.stderr).sort_stats("tottime").print_stats(20)
    return 0
