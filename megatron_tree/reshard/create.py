"""Empty checkpoints in their full size, to be filled slice by slice.

Every file is reserved before anything is copied, so a file system that has no room says so at once, and a
writer needs no memory of its own: it maps what it fills. What makes a folder loadable (config, index,
metadata, tracker) is written by `finish`, after the weights. Not here: the copying (`convert`).
"""

from __future__ import annotations

import json
import math
import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.serialization import skip_data

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import image, plan
from megatron_tree.reshard.formats import (
    CARRIED,
    RANK_FILE,
    TRACKER,
    Piece,
    dist_pieces,
    hf_pieces,
    is_vocab,
    legacy_pieces,
    rank_folder,
    stacked_name,
)
from megatron_tree.reshard.names import ModelShape, check_model

DIST_FILE_BYTES = 2 << 30  # a file of a distributed checkpoint is closed once it is larger
_ALIGNMENT = 64
_LINEAR = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
Dtypes = Mapping[str, torch.dtype]  # of each Hugging Face tensor


@dataclass(frozen=True)
class Skeleton:
    """A checkpoint without its weights. `finish` comes after they are in."""

    pieces: list[Piece]
    finish: Callable[[], None]


def hugging_face(
    folder: Path, shape: ModelShape, dtypes: Dtypes, carried: Path, max_shard_bytes: int
) -> Skeleton:
    """One file, or shards of at most `max_shard_bytes` (a larger tensor has one to itself) with an index."""
    shards: list[list[str]] = [[]]
    filled = 0
    sizes = {name: math.prod(size) * dtypes[name].itemsize for name, size in shape.tensors().items()}
    for name, num_bytes in sizes.items():
        if shards[-1] and filled + num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else ["model.safetensors"]
    for file, names in zip(files, shards, strict=True):
        _safetensors(folder / file, {name: (dtypes[name], shape.tensor_shape(name)) for name in names})
    if len(files) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = {"total_size": sum(sizes.values())}
        text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def finish() -> None:
        image.carry_files(carried, folder)
        _declare_dtype(folder / "config.json", set(dtypes.values()))

    return Skeleton(list(hf_pieces(folder, shape)), finish)


def _safetensors(path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    text, num_bytes = image.header(tensors)
    with path.open("wb") as file:
        _reserve(file, len(text) + num_bytes)
        file.write(text)


def _declare_dtype(path: Path, dtypes: set[torch.dtype]) -> None:
    """Where all tensors have one dtype, config.json must say which; a right one is left as it is."""
    config = json.loads(path.read_text(encoding="utf-8"))
    field = "torch_dtype" if "torch_dtype" in config else "dtype"
    name = str(next(iter(dtypes))).removeprefix("torch.")
    if len(dtypes) == 1 and config.get(field, name) != name:
        path.write_text(json.dumps(config | {field: name}, indent=2) + "\n", encoding="utf-8")


def legacy(
    folder: Path,
    shape: ModelShape,
    dtypes: Dtypes,
    carried: Path,
    layout: ParallelLayout,
    vocab_multiple: int,
) -> Skeleton:
    """`iter_0000001/mp_rank_TT[_PPP]/model_optim_rng.pt` as Megatron-LM names and fills them."""
    check_model(shape, layout)
    step = folder / "iter_0000001"
    rows = -(-shape.vocab // (vocab_multiple * layout.tp)) * vocab_multiple
    for rank in layout.ranks():
        param_dtypes = _param_dtypes(plan.held(shape, layout, rank), dtypes)
        state: dict[str, Any] = {
            "args": _megatron_args(shape, layout, rows * layout.tp, set(param_dtypes.values())),
            "checkpoint_version": 3.0,
            "iteration": 1,
        }
        for chunk in range(layout.vpp):
            model = {}
            for name, size in plan.param_shapes(shape, layout, rank, chunk).items():
                size = (rows, *size[1:]) if is_vocab(name) else size
                # memory that is never touched: only its size is saved
                model[name] = torch.empty(size, dtype=param_dtypes.get((chunk, name), torch.float32))
            state["model" if layout.vpp == 1 else f"model{chunk}"] = model
        path = step / rank_folder(layout, rank) / RANK_FILE
        path.parent.mkdir(parents=True)
        with path.open("w+b") as file:
            _reserve(
                file,
                sum(
                    tensor.nbytes
                    for key in state
                    if key.startswith("model")
                    for tensor in state[key].values()
                ),
            )
            _save_hollow(file, state)
            _reserve(file, file.seek(0, os.SEEK_END))

    def finish() -> None:
        _carry(carried, folder)
        (folder / TRACKER).write_text("1", encoding="utf-8")

    return Skeleton(list(legacy_pieces(step, shape)), finish)


def _param_dtypes(copies: Iterable[plan.SliceCopy], dtypes: Dtypes) -> dict[tuple[int, str], torch.dtype]:
    """Of each (chunk, parameter). ValueError where the tensors that make one up differ."""
    found: dict[tuple[int, str], torch.dtype] = {}
    for copy in copies:
        dtype = dtypes[copy.tensor]
        if found.setdefault((copy.chunk, copy.param), dtype) != dtype:
            other = found[copy.chunk, copy.param]
            raise ValueError(
                f"{copy.tensor}: is {dtype}, another tensor of Megatron's {copy.param} is {other}"
            )
    return found


def _megatron_args(
    shape: ModelShape, layout: ParallelLayout, padded: int, dtypes: set[torch.dtype]
) -> Namespace:
    """What Megatron-LM reads of a checkpoint's arguments to build the model and check the layout."""
    chunk_layers = None if layout.vpp == 1 else layout.split(shape.num_layers)[0]
    return Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=None if layout.vpp == 1 else layout.vpp,
        num_layers_per_virtual_pipeline_stage=chunk_layers,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        group_query_attention=shape.kv_heads != shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        padded_vocab_size=padded,
        untie_embeddings_and_output_weights=not shape.tied,
        normalization="RMSNorm",
        norm_epsilon=shape.norm_eps,
        swiglu=True,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        use_rope_scaling=shape.rope_scaling is not None,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        params_dtype=next(iter(dtypes)),
        iteration=1,
    )


def distributed(folder: Path, shape: ModelShape, dtypes: Dtypes, carried: Path) -> Skeleton:
    """Megatron's `torch_dist`: parameters stacked over layers, a chunk per layer (two for gate and up)."""
    writer = _DistWriter(folder)
    whole = ParallelLayout()
    param_dtypes = _param_dtypes(plan.held(shape, whole, 0), dtypes)
    for name, size in plan.param_shapes(shape, whole, 0).items():
        key, layer = stacked_name(name)
        parts = 2 if key.endswith("linear_fc1.weight") else 1
        part = (size[0] // parts, *size[1:])
        stacked, leading = ((), ()) if layer is None else ((shape.num_layers,), (layer,))
        for row in range(0, size[0], part[0]):
            start = (*leading, row, *(0 for _ in part[1:]))
            extent = (*(1 for _ in leading), *part)
            writer.add(key, (*stacked, *size), start, torch.empty(extent, dtype=param_dtypes[0, name]))
    for layer in range(shape.num_layers):  # Megatron asks for them; without FP8 they hold nothing
        for module in _LINEAR:
            writer.add_object(
                f"decoder.layers.{module}._extra_state/shard_{layer}_{shape.num_layers}", [None]
            )
    writer.close()

    def finish() -> None:
        _carry(carried, folder)
        torch.save({}, folder / "common.pt")
        versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        versions |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(versions), encoding="utf-8")
        with (folder / ".metadata").open("wb") as file:
            pickle.dump(writer.metadata, file)

    return Skeleton(list(dist_pieces(folder, shape, writer.metadata)), finish)


class _DistWriter:
    """Hollow `.distcp` files, one after the other, and their metadata."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_files = 0
        self._file: IO[bytes] | None = None
        self.metadata = dcp.Metadata({}, storage_data={}, storage_meta=dcp.StorageMeta())

    def add(self, key: str, size: tuple[int, ...], start: tuple[int, ...], chunk: torch.Tensor) -> None:
        found = self.metadata.state_dict_metadata.setdefault(
            key, dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=chunk.dtype), torch.Size(size), [])
        )
        assert isinstance(found, dcp.TensorStorageMetadata)
        found.chunks.append(dcp.ChunkStorageMetadata(torch.Size(start), chunk.shape))
        self._append(dcp.MetadataIndex(key, torch.Size(start)), chunk, chunk.nbytes)

    def add_object(self, key: str, value: object) -> None:
        self.metadata.state_dict_metadata[key] = dcp.BytesStorageMetadata()
        self._append(dcp.MetadataIndex(key), value, 0)

    def close(self) -> None:
        if self._file is not None:
            _reserve(self._file, self._file.seek(0, os.SEEK_END))
            self._file.close()
            self._file = None

    def _append(self, index: dcp.MetadataIndex, value: object, num_bytes: int) -> None:
        if self._file is None:
            self._name = f"__0_{self._num_files}.distcp"
            self._num_files += 1
            self._file = (self._folder / self._name).open("w+b")
        start = self._file.seek(-(-self._file.seek(0, os.SEEK_END) // _ALIGNMENT) * _ALIGNMENT)
        _reserve(self._file, start + num_bytes)
        self._file.seek(start)
        _save_hollow(self._file, value)
        stop = self._file.tell()
        self.metadata.storage_data[index] = filesystem._StorageInfo(self._name, start, stop - start)
        if stop > DIST_FILE_BYTES:
            self.close()


def _save_hollow(file: IO[bytes], value: object) -> None:
    """`torch.save` that leaves the tensors' bytes out, but keeps their room."""
    try:
        with skip_data():
            torch.save(value, file)
        file.flush()
    except (OSError, RuntimeError) as error:  # the second is torch's way to tell that a write failed
        raise ValueError(f"{file.name}: no room for its last bytes: {str(error).splitlines()[0]}") from error


def _reserve(file: IO[bytes], num_bytes: int) -> None:
    """Room for a file's first bytes on disk, not only a promise of it."""
    try:
        if num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        raise ValueError(f"{file.name}: no room for {num_bytes} bytes: {error.strerror}") from error


def _carry(carried: Path, folder: Path) -> None:
    (folder / CARRIED).mkdir()
    image.carry_files(carried, folder / CARRIED)
