"""The engines' side of a publish: vLLM weight-transfer back ends that load a model image, or what trainers
send.

`register` is this package's `vllm.general_plugins` entry point, so every vLLM process knows them. `check`
changes nothing: call it first, on every engine. A failure after it leaves a model that is neither the old nor
the new one, and an engine that must be killed.

Departure from vLLM: its `nccl` receiver has one communicator, with a trainer that can make the whole model.
Here each pipeline stage is a sender, and the communicator is torch's, so that gloo stands in for NCCL on a
CPU; or it borrows buckets from a rank on the same device, where vLLM has a second receiver, `ipc`. Buckets,
their overlap and the loading are vLLM's own. Not here: who writes or sends (`publish`,
`source`, `wire`), when to load and what to do after a failure (`engine`).
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_tree.children import die_with
from megatron_tree.reshard.image import Maps
from megatron_tree.reshard.names import ModelShape, read_shape
from megatron_tree.reshard.wire import LendingWire, Wire, borrow
from megatron_tree.types import Update

BACKEND, STREAM_BACKEND = "megatron_tree_image", "megatron_tree_stream"


def register() -> None:
    """Adds the back ends to vLLM's registry, in every vLLM process; may be called more than once in one.

    vLLM's children outlive an engine that is killed, hung ones for ever, and their shared memory goes with
    the last of them: they are asked to end with it.
    """
    if not is_registered():
        WeightTransferEngineFactory.register_engine(BACKEND, ImageReceiver)
        WeightTransferEngineFactory.register_engine(STREAM_BACKEND, StreamReceiver)
    if (parent := multiprocessing.parent_process()) is not None:
        die_with(parent.pid)


def is_registered() -> bool:
    """vLLM only logs a plug-in that fails to load, so whoever starts an engine asks."""
    return BACKEND in WeightTransferEngineFactory._registry


def check(update: Update, shape: ModelShape) -> None:
    """ValueError naming the first difference of what is offered, the plan's names and the engine's own model.
    Of an image the headers are read."""
    if update.stream is None:
        what, found = f"image {update.image}", _header(update.image)
    else:
        what = f"stream of version {update.version}"
        found = [pair for s in update.stream.segments for pair in zip(s.names, s.shapes, strict=True)]
    expected = shape.tensors()
    _same_names(Counter(update.names), Counter(list(expected)), f"names of version {update.version}")
    _same_names(Counter(name for name, _ in found), Counter(list(expected)), what)
    for name, got in found:
        if got != expected[name]:
            raise ValueError(f"{what}: {name} must have shape {expected[name]}, got {got}")


def _header(path: str) -> list[tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(path, framework="pt") as image:
            return [(name, tuple(image.get_slice(name).get_shape())) for name in image.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"image {path}: cannot be read: {error}") from error


def _same_names(got: Counter[str], wanted: Counter[str], what: str) -> None:
    for fault, names in (("lacks", wanted - got), ("must not have", got - wanted)):
        if names:
            first = min(names)
            raise ValueError(f"{what}: {fault} {first} ({names.total()} of {wanted.total()} tensors differ)")


class _Receiver(WeightTransferEngine[Any, Any]):
    """Layer-wise loading that ends with a whole model or an error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shape = read_shape(self.model_config.model)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        _refuse_incomplete(self.model, tied=self._shape.tied)
        finalize_layerwise_reload(self.model, self.model_config)
        if self._shape.tied:
            # The head shares the embedding's weight but is a layer of its own, for which nothing was loaded:
            # where weights are pre-packed (CPU) it would go on computing with the old ones.
            head = self.model.lm_head
            head.quant_method.process_weights_after_loading(head)


@dataclass
class ImageInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on: the image's path comes with every update."""


@dataclass
class ImageUpdateInfo(WeightTransferUpdateInfo):
    image: str
    version: int
    names: list[str]


class ImageReceiver(_Receiver):
    """Loads an image tensor by tensor, in layer order, through the model's own loader.

    Each tensor is a view of the mapped file that lives until its layer is complete: the layer-wise loader
    keeps what it is handed, so nothing is copied into a buffer that would be used again.
    """

    init_info_cls = ImageInitInfo
    update_info_cls = ImageUpdateInfo

    def init_transfer_engine(self, init_info: ImageInitInfo) -> None:
        self._maps = Maps(writable=False)

    def receive_weights(self, update_info: ImageUpdateInfo) -> None:
        handed: Counter[str] = Counter()

        def in_layer_order() -> Iterator[tuple[str, torch.Tensor]]:
            image = self._maps.tensors(Path(update_info.image))
            for name in self._shape.tensors():
                if name in image:
                    handed[name] += 1
                    yield name, image[name]

        self.model.load_weights(in_layer_order())
        _same_names(handed, Counter(update_info.names), f"version {update_info.version} in the engine")

    def shutdown(self) -> None:
        """Between updates only the mapped images are held."""


@dataclass
class StreamInitInfo(WeightTransferInitInfo):
    """Where the senders are; told again whenever they are others."""

    host: str
    port: int
    wire: str
    num_stages: int
    num_workers: int
    bucket_bytes: int
    timeout_s: float
    lends: bool


@dataclass
class StreamUpdateInfo(NCCLWeightTransferUpdateInfo):
    """One segment: names, dtype names and shapes are vLLM's own fields."""

    stage: int


class StreamReceiver(_Receiver, NCCLWeightTransferEngine):
    """vLLM's own receiver of packed tensors. Every bucket is a buffer of its own that lives until the layers
    in it are complete."""

    init_info_cls = StreamInitInfo
    update_info_cls = StreamUpdateInfo

    def init_transfer_engine(self, init_info: StreamInitInfo) -> None:
        self.packed, self.packed_buffer_size_bytes = True, init_info.bucket_bytes
        timeout = timedelta(seconds=init_info.timeout_s)
        store = dist.TCPStore(init_info.host, init_info.port, is_master=False, timeout=timeout)
        worker, num_workers = self.parallel_config.rank, init_info.num_workers
        self._wires: list[Wire | LendingWire]  # by stage
        if init_info.lends:
            wire = borrow(store, init_info.wire, worker, num_workers, self.device, timeout)
            self._wires = [wire] * init_info.num_stages
            return
        self._wires = [
            Wire(store, f"{init_info.wire}/stage {stage}", 1 + worker, 1 + num_workers, timeout)
            for stage in range(init_info.num_stages)
        ]

    def receive_weights(self, update_info: StreamUpdateInfo) -> None:
        self.model_update_group = self._wires[update_info.stage]
        with _streams(self.device):
            super().receive_weights(update_info)

    def shutdown(self) -> None:
        self._wires, self.model_update_group = [], None


@contextmanager
def _streams(device: torch.device) -> Iterator[None]:
    """vLLM receives one bucket on a CUDA stream while another is loaded. A CPU has no streams and needs none:
    gloo is done with a bucket when its broadcast returns."""
    if device.type != "cpu":
        yield
        return
    of_gpu, index = packed_tensor._get_streams, torch.accelerator.current_device_index
    packed_tensor._get_streams = lambda _, num_buffers: (_NoStream(),) * num_buffers
    torch.accelerator.current_device_index = lambda: 0
    try:
        yield
    finally:
        packed_tensor._get_streams, torch.accelerator.current_device_index = of_gpu, index


class _NoStream:
    def synchronize(self) -> None:
        pass


def _refuse_incomplete(model: torch.nn.Module, *, tied: bool) -> None:
    """The layer-wise loader accepts part of a layer in silence; here that is an error.

    A finished layer has left the loading state. Left in it are layers without parameters, a tied head
    (nothing is loaded for it), and embeddings whose rows are padded to vLLM's multiple.
    """
    for path, layer in model.named_modules():
        info = get_layerwise_info(layer)
        size = sum(p.numel() for p in layer._parameters.values() if p is not None)
        if not info.can_load() or size == 0 or (tied and path == "lm_head"):
            continue
        if hasattr(layer, "shard_indices"):
            size = layer.shard_indices.num_org_elements * layer.embedding_dim
        if info.load_numel < size:
            raise ValueError(f"layer {path}: got {info.load_numel} of {size} elements")
