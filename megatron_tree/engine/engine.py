"""One vLLM engine: samples turns, scores sequences, loads published versions.

A plain asynchronous class; `cluster` makes an actor of it. Token ids go in and come out as sampled: text
exists only inside vLLM, to find stop strings. Not here: which engine serves a request, restarts (`pool`); how
an image is read (`reshard.receive`). vLLM is imported in `start`, after the environment it reads is set.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tree.config import EngineConfig
from megatron_tree.engine import on_cpu, on_gpu
from megatron_tree.engine.handle import Aborted, EngineDied
from megatron_tree.reshard import digest
from megatron_tree.reshard.image import Maps
from megatron_tree.reshard.names import ModelShape, read_shape
from megatron_tree.types import FloatArray, GenerateRequest, GenerateResult, IntArray, Update

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
QUANTIZATIONS = {None: None, "fp8": "fp8_per_channel"}
DEATH_NOTICE_S = 1.0  # within which the death of vLLM's core is seen
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
"""Unless the user sets them. vLLM warns at every start about libraries and kernels that a CPU build lacks."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a running engine, for `doctor`, logs and clean-up."""

    version: int  # of the weights; 0 is the model folder's
    device: str  # "cpu" or the GPU's name
    vllm: str
    dtype: str
    tp: int
    pids: tuple[int, ...]  # of this process and vLLM's children
    segments: tuple[str, ...]  # their files in /dev/shm, which outlive a kill


class Engine:
    """Call `start` once, then any number of `generate` at a time. Once vLLM is dead, all raise EngineDied."""

    def __init__(self, model: str, config: EngineConfig, sleeps: bool = False) -> None:
        """`sleeps`: whether it will be asked to."""
        self._model = model
        self._config = config
        self._sleeps = sleeps
        self._shape = read_shape(model)
        self._maps = Maps(writable=False)
        self._version = 0
        self._wire: tuple[object, ...] = ()  # to the trainers, where they send the weights
        self._broken = ""  # why the weights are neither the old nor the new version's

    async def start(self, update: Update | None = None) -> EngineInfo:
        """Starts vLLM and, if given and its image is seen from here, loads the published version.

        ValueError for what vLLM or `check` refuses, EngineDied for a start that failed.
        """
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        # while it is imported vLLM warns before it has read its level
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        arguments = _arguments(self._model, self._config, self._shape, self._sleeps)
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.v1.engine.async_llm import AsyncLLM

        from megatron_tree.reshard.receive import BACKEND, is_registered

        try:
            self._llm = AsyncLLM.from_engine_args(arguments)
        except ValueError as error:  # pydantic's many lines, which do not pickle
            raise ValueError(f"{self._model}: vLLM refuses it: {' '.join(str(error).split())}") from None
        except RuntimeError as error:
            raise EngineDied(f"vLLM does not start: {error}") from error
        if not is_registered():
            raise ValueError(
                f"entry point vllm.general_plugins: {BACKEND} is not registered; reinstall megatron-tree"
            )
        if not self._config.is_sent:  # else there is nothing to meet yet
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest())
        if update is not None and Path(update.image).exists():
            await self.check(update)
            await self.update(update)
        return self.info()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples one turn, wholly under one version. Aborted if it was cut off or the weights changed."""
        version = self._version
        output = await self._run(request.prompt_ids, _sampling(request), request.request_id)
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise Aborted(f"request {request.request_id}: ended with {completion.finish_reason}")
        if version != self._version:
            raise Aborted(f"request {request.request_id}: the version went from {version} to {self._version}")
        ids = completion.token_ids
        logprobs = [at[token].logprob for at, token in zip(completion.logprobs, ids, strict=True)]
        return GenerateResult(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish=completion.finish_reason,
            cached_tokens=output.num_cached_tokens or 0,
            policy_version=version,
        )

    async def score(self, request_id: str, token_ids: IntArray) -> FloatArray:
        """Log-probs [n - 1] of a sequence's tokens after its first, at temperature 1."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        output = await self._run(token_ids, params, request_id)
        scored = zip(output.prompt_logprobs[1:], token_ids[1:].tolist(), strict=True)
        return np.array([at[token].logprob for at, token in scored], np.float32)

    async def check(self, update: Update) -> None:
        """ValueError when what is offered is not this model, whole; an image also where it is not as its
        owners wrote it. Changes nothing."""
        from megatron_tree.reshard import receive

        receive.check(update, self._shape)
        if update.stream is None:
            path = Path(update.image)
            await asyncio.to_thread(digest.verify, path, update.version, self._shape, self._maps)

    async def update(self, update: Update) -> int:
        """Loads a version that `check` let pass, in place, and drops the prefix cache.

        EngineDied: the weights are neither the old nor the new ones, and the engine answers nothing any more.
        """
        self._alive()
        self._broken = f"an update to version {update.version} was not finished"
        try:
            await self._unless_dead(self._load(update))
        except Exception as error:  # vLLM may raise anything, and after any of it the weights are half new
            self._broken = f"the update to version {update.version} failed: {error}"
            raise EngineDied(self._broken) from error
        self._broken = ""
        return self._version

    async def _load(self, update: Update) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._connect(update)
        await self._llm.start_weight_update()
        for info in _update_infos(update):
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._llm.finish_weight_update(str(update.version))
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM kept its prefix cache, which holds keys and values of the old weights")
        self._version = update.version
        await self._llm.resume_generation()

    async def _connect(self, update: Update) -> None:
        """Meets the trainers, if they are to send and are not those of the last update."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        stream = update.stream
        if stream is None or (wire := (*stream.address, stream.wire)) == self._wire:
            return
        info = {
            "host": stream.address[0],
            "port": stream.address[1],
            "wire": stream.wire,
            "num_stages": 1 + max(segment.stage for segment in stream.segments),
            "num_workers": stream.num_workers,
            "bucket_bytes": stream.bucket_bytes,
            "timeout_s": stream.timeout_s,
            "lends": stream.lends,
        }
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        self._wire = wire

    async def sleep(self, level: int) -> None:
        self._alive()
        await self._unless_dead(self._llm.sleep(level))

    async def wake(self, part: str) -> None:
        """vLLM generates again once both parts are back."""
        self._alive()
        await self._unless_dead(self._llm.wake_up([part]))

    def info(self) -> EngineInfo:
        import psutil
        import torch
        import vllm

        me = psutil.Process()
        pids = [me.pid, *(child.pid for child in me.children(recursive=True))]
        return EngineInfo(
            version=self._version,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            vllm=vllm.__version__,
            dtype=self._config.dtype,
            tp=self._config.tp,
            pids=tuple(pids),
            segments=_segments(pids),
        )

    async def stop(self) -> None:
        self._llm.shutdown()
        del self._llm

    async def _run(self, token_ids: IntArray, params: SamplingParams, request_id: str) -> RequestOutput:
        from vllm.exceptions import GenerationError, VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        self._alive()
        final = None
        try:
            async for output in self._llm.generate(tokens_input(token_ids.tolist()), params, request_id):
                final = output
        except EngineDeadError as error:
            raise EngineDied(f"vLLM died under request {request_id}") from error
        except VLLMClientError as error:
            raise ValueError(f"request {request_id}: {error}") from None
        except GenerationError as error:  # of this request alone
            raise Aborted(f"request {request_id}: {error}") from error
        assert final is not None
        return final

    async def _unless_dead(self, call: Coroutine[Any, Any, object]) -> None:
        """Awaits what vLLM's core is asked for: whoever asks while that process dies, vLLM lets wait for
        ever."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=DEATH_NOTICE_S)
                if self._llm.errored and not task.done():
                    raise EngineDied("vLLM died under a call")
            await task
        finally:
            task.cancel()

    def _alive(self) -> None:
        if self._broken:
            raise EngineDied(self._broken)


def _arguments(model: str, config: EngineConfig, shape: ModelShape, sleeps: bool) -> AsyncEngineArgs:
    import torch

    if torch.cuda.is_available():
        on_gpu.check(config)
        by_device: dict[str, Any] = {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": sleeps,
        }
    else:
        os.environ.update(on_cpu.environment(config))
        on_cpu.check(config, shape)
        by_device = on_cpu.arguments(config)
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from megatron_tree.reshard.receive import BACKEND, STREAM_BACKEND

    return AsyncEngineArgs(
        model=model,
        dtype=DTYPES[config.dtype],
        quantization=QUANTIZATIONS[config.quantization],
        tensor_parallel_size=config.tp,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # of the distribution the token was drawn from
        weight_transfer_config=WeightTransferConfig(backend=STREAM_BACKEND if config.is_sent else BACKEND),
        use_tqdm_on_load=False,
        disable_log_stats=True,
        **by_device,
    )


def _update_infos(update: Update) -> list[dict[str, Any]]:
    """What vLLM's workers are told, call by call."""
    names, stream = list(update.names), update.stream
    if stream is None:
        return [{"image": update.image, "version": update.version, "names": names}]
    return [
        {
            "stage": segment.stage,
            "names": list(segment.names),
            "dtype_names": [stream.dtype] * len(segment.names),
            "shapes": [list(size) for size in segment.shapes],
        }
        for segment in stream.segments
    ]


def _sampling(request: GenerateRequest) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop=list(request.stop),
        include_stop_str_in_output=True,
        detokenize=bool(request.stop),
        skip_special_tokens=False,  # a stop string may be a special token
        spaces_between_special_tokens=False,
        logprobs=0,  # of the sampled token only
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _segments(pids: Sequence[int]) -> tuple[str, ...]:
    """Files of `multiprocessing` (queues, locks) mapped by these processes, which alone know the names. By
    inode, since glibc maps a lock in the process that makes it under a name that is gone."""
    inodes = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # it ended meanwhile
        fields = (line.split() for line in maps.splitlines())
        inodes |= {
            of[4] for of in fields if len(of) > 5 and of[5].startswith(("/dev/shm/psm_", "/dev/shm/sem."))
        }
    with os.scandir("/dev/shm") as files:
        ours = (file for file in files if file.name.startswith(("psm_", "sem.mp-")))
        return tuple(sorted(file.path for file in ours if str(file.inode()) in inodes))
