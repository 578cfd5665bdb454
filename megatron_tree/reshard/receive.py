"""The engines' side of a publish: a vLLM weight-transfer back end that loads a model image.

`register` is this package's `vllm.general_plugins` entry point, so every vLLM process knows the back end.
`check_image` reads headers only and changes nothing: call it first, on every engine. A failure after it
leaves a model that is neither the old nor the new one, and an engine that must be killed.

Not here: who writes the image (`publish`), when to load it and what to do after a failure (`engine`).
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_tree.children import die_with
from megatron_tree.reshard.image import Maps
from megatron_tree.reshard.names import ModelShape, read_shape
from megatron_tree.types import Update

BACKEND = "megatron_tree_image"


def register() -> None:
    """Adds the back end to vLLM's registry, in every vLLM process; may be called more than once in one.

    vLLM's children outlive an engine that is killed, hung ones for ever, and their shared memory goes with
    the last of them: they are asked to end with it.
    """
    if not is_registered():
        WeightTransferEngineFactory.register_engine(BACKEND, ImageReceiver)
    if (parent := multiprocessing.parent_process()) is not None:
        die_with(parent.pid)


def is_registered() -> bool:
    """vLLM only logs a plug-in that fails to load, so whoever starts an engine asks."""
    return BACKEND in WeightTransferEngineFactory._registry


def check_image(update: Update, shape: ModelShape) -> None:
    """ValueError naming the first difference of the image, the plan's names and the engine's own model."""
    expected = shape.tensors()
    try:
        with safe_open(update.image, framework="pt") as image:
            found = {name: tuple(image.get_slice(name).get_shape()) for name in image.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"image {update.image}: cannot be read: {error}") from error
    _same_names(Counter(update.names), Counter(list(expected)), f"names of version {update.version}")
    _same_names(Counter(list(found)), Counter(list(expected)), f"image {update.image}")
    for name, wanted in expected.items():
        if found[name] != wanted:
            raise ValueError(f"image {update.image}: {name} must have shape {wanted}, got {found[name]}")


def _same_names(got: Counter[str], wanted: Counter[str], what: str) -> None:
    for fault, names in (("lacks", wanted - got), ("must not have", got - wanted)):
        if names:
            first = min(names)
            raise ValueError(f"{what}: {fault} {first} ({names.total()} of {wanted.total()} tensors differ)")


@dataclass
class ImageInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on: the image's path comes with every update."""


@dataclass
class ImageUpdateInfo(WeightTransferUpdateInfo):
    image: str
    version: int
    names: list[str]


class ImageReceiver(WeightTransferEngine[ImageInitInfo, ImageUpdateInfo]):
    """Loads an image tensor by tensor, in layer order, through the model's own loader.

    Each tensor is a view of the mapped file that lives until its layer is complete: the layer-wise loader
    keeps what it is handed, so nothing is copied into a buffer that would be used again.
    """

    init_info_cls = ImageInitInfo
    update_info_cls = ImageUpdateInfo

    def init_transfer_engine(self, init_info: ImageInitInfo) -> None:
        self._shape = read_shape(self.model_config.model)
        self._maps = Maps(writable=False)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

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
        _refuse_incomplete(self.model, tied=self._shape.tied)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self._shape.tied:
            # The head shares the embedding's weight but is a layer of its own, for which nothing was loaded:
            # where weights are pre-packed (CPU) it would go on computing with the old ones.
            head = self.model.lm_head
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Between updates only the mapped images are held."""


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
