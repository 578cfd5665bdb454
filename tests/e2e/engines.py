"""What the engine tests share: a pool of one real engine, the transformers model it must agree with, images,
requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
import xxhash
from safetensors.torch import save_file
from transformers import PreTrainedModel

from megatron_tree import cluster
from megatron_tree.cluster import RayEngine
from megatron_tree.config import EngineConfig
from megatron_tree.engine.pool import EnginePool
from megatron_tree.layout import ParallelLayout
from megatron_tree.placement import Placement, Spot
from megatron_tree.reshard import digest
from megatron_tree.reshard.names import read_shape
from megatron_tree.types import FloatArray, GenerateRequest, GenerateResult, IntArray, Update
from tests.tiny_models import make_model, randomise

PROMPT = np.arange(5, 85, dtype=np.int32)  # 80 tokens: two whole blocks of 32 and a part of one


@dataclass
class Served:
    loop: asyncio.Runner  # outlives the tests: a pool belongs to one event loop
    folder: Path
    model: PreTrainedModel
    pool: EnginePool
    made: list[RayEngine]  # every engine the pool has had
    version: int = 0  # of the reference model's weights

    def publish(self) -> Update:
        """Draws other weights into the reference model and writes them as an image."""
        self.version += 1
        names = tuple(read_shape(self.folder).tensors())
        randomise(self.model, seed=100 + self.version)
        state = self.model.state_dict()
        path = self.folder / f"image-{self.version}.safetensors"
        tensors = {name: state[name] for name in names}
        save_file(tensors, path)
        sign(path, self.version, tensors)
        return Update(str(path), self.version, names)

    def processes(self) -> list[psutil.Process]:
        """Of the newest engine: its actor, then what vLLM started."""
        info = self.made[-1].info
        assert info is not None
        return [psutil.Process(pid) for pid in info.pids]

    def generate(self, *requests: GenerateRequest) -> list[GenerateResult]:
        async def together() -> list[GenerateResult]:
            return await asyncio.gather(*(self.pool(request) for request in requests))

        return self.loop.run(together())

    def gap(self, tag: str) -> float:
        return float(self.gaps(tag).max())

    def gaps(self, tag: str) -> FloatArray:
        """Differences of the engine's log-probs from transformers', of prompt, greedy and sampled tokens."""
        scored = self.loop.run(self.made[-1].score(f"{tag} score", PROMPT))
        results = self.generate(ask(f"{tag} greedy", temperature=0.0), ask(f"{tag} sampled"))
        gaps = [scored - self.reference(PROMPT)]
        gaps += [self.sampled(result) - result.logprobs for result in results]
        return np.abs(np.concatenate(gaps))

    def greedy(self, num_tokens: int) -> list[int]:
        """transformers' own greedy continuation of the prompt."""
        ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
        out = self.model.generate(ids, max_new_tokens=num_tokens, do_sample=False)
        return out[0, len(PROMPT) :].tolist()

    @torch.no_grad()
    def reference(self, ids: IntArray, temperature: float = 1.0) -> FloatArray:
        """transformers' log-prob of every token but the first."""
        tokens = torch.from_numpy(ids.astype(np.int64))
        logprobs = (self.model(tokens[None]).logits[0, :-1].float() / temperature).log_softmax(-1)
        return logprobs.gather(1, tokens[1:, None])[:, 0].numpy()

    def sampled(self, result: GenerateResult, temperature: float = 1.0) -> FloatArray:
        """transformers' log-probs of tokens that continue the prompt."""
        return self.reference(np.concatenate([PROMPT, result.token_ids]), temperature)[len(PROMPT) - 1 :]


def sign(image: Path, version: int, tensors: dict[str, torch.Tensor]) -> None:
    """Writes the digests of whole tensors, as one rank that owns everything would."""
    digest.save(
        image,
        version,
        0,
        [
            digest.SliceDigest(
                name,
                (0,) * t.dim(),
                tuple(t.shape),
                xxhash.xxh3_64_hexdigest(t.view(torch.uint8).numpy().tobytes()),
            )
            for name, t in tensors.items()
        ],
    )


def ask(
    name: str, seed: int = 0, *, temperature: float = 1.0, max_tokens: int = 24, **other: object
) -> GenerateRequest:
    fields = {"prompt_ids": PROMPT, "top_p": 1.0, "stop": (), "route": name, **other}
    return GenerateRequest(name, max_tokens=max_tokens, seed=seed, temperature=temperature, **fields)  # type: ignore[arg-type]


@contextmanager
def serving(
    folder: Path,
    *,
    family: str,
    tied: bool,
    tp: int,
    vocab_size: int = 128,
    quantization: Literal["fp8"] | None = None,
) -> Iterator[Served]:
    """Makes a model and starts a pool of one engine of it, in fp32 or quantised bf16; needs a running Ray."""
    dtype = torch.float32 if quantization is None else torch.bfloat16
    model = make_model(folder, family=family, tied=tied, seed=7, vocab_size=vocab_size, dtype=dtype)
    config = EngineConfig(
        tp=tp,
        dtype="fp32" if quantization is None else "bf16",
        quantization=quantization,
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_gib=0.1,
        max_restarts=9,
    )
    made: list[RayEngine] = []
    places = cluster.Places(Placement("cpu", (), (Spot(cluster.nodes()[0]),)), ParallelLayout())

    def spawn(index: int) -> RayEngine:
        made.append(RayEngine(str(folder), config, index, places))
        return made[-1]

    with asyncio.Runner() as loop:
        served = Served(loop, folder, model, EnginePool(config, spawn), made)
        started = time.perf_counter()
        loop.run(served.pool.start())
        print(f"\n{family}, tied {tied}, engine TP {tp}: started in {time.perf_counter() - started:.1f} s")
        yield served
        loop.run(served.pool.stop())
    infos = [engine.info for engine in made if engine.info is not None]
    assert any(info.segments for info in infos) or tp == 1  # vLLM's queues between ranks
    assert not any(Path(segment).exists() for info in infos for segment in info.segments)
