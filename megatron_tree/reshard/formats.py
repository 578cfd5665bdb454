"""Checkpoints of three formats as one thing: rectangles of Hugging Face tensors, and where their bytes lie.

- A Hugging Face folder: safetensors, one file or shards with an index.
- A legacy Megatron folder: `iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt`, one file per rank.
- A Megatron distributed checkpoint (torch's `.distcp` files): parameters stacked over layers, in chunks. A
  run's `checkpoints/iteration-N` is one.

Names of Transformer Engine's fused norms are known beside those of the local layers. Optimizer state is not
read. Not here: writing (`create`), copying and comparing (`convert`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from megatron_tree.layout import Coordinates, ParallelLayout
from megatron_tree.reshard import plan
from megatron_tree.reshard.arrays import DTYPES, Array, read_pickle, read_torch, safetensors_arrays
from megatron_tree.reshard.names import ModelShape, check_model, read_shape

CARRIED = "huggingface"  # folder inside a Megatron checkpoint with the model's config and tokenizer files
PARTIAL = ".partial"  # a checkpoint that is being written
TRACKER = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"
VOCAB_MULTIPLES = (1, 64, 128)  # times tp: to these is a vocabulary padded, here (1) and by Megatron-LM
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FUSED_NORMS = {  # Transformer Engine's names
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle that is the same in a Hugging Face tensor and in a stored array."""

    tensor: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    array: Array
    array_start: tuple[int, ...]
    is_copy: bool = False  # another piece holds the same elements


@dataclass(frozen=True, slots=True)
class Weights:
    """One checkpoint. Its pieces, but for copies, cover every tensor exactly once."""

    path: Path
    shape: ModelShape
    pieces: list[Piece]
    carried: Path | None  # folder of config and tokenizer files

    def dtypes(self) -> dict[str, torch.dtype]:
        return {piece.tensor: piece.array.dtype for piece in self.pieces if not piece.is_copy}


def find(path: Path) -> tuple[str, Path]:
    """(format, folder that holds it): "hf", "legacy" or "dist". ValueError where there is none."""
    if not path.is_dir():
        raise ValueError(f"{path}: must be a folder with a checkpoint")
    if path.name.endswith(PARTIAL):
        raise ValueError(f"{path}: is what an unfinished conversion left")
    if any((path / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        return "hf", path
    folder = path
    if (path / TRACKER).exists():
        step = (path / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
        if step != "release" and not step.isdecimal():
            raise ValueError(f"{path / TRACKER}: must hold a number or release, got {step[:20]!r}")
        folder = path / (step if step == "release" else f"iter_{int(step):07d}")
    for place in (folder, folder / "megatron"):
        if (place / ".metadata").exists():
            return "dist", place
        if next(place.glob("mp_rank_*"), None):
            return "legacy", place
    raise ValueError(
        f"{path}: holds neither safetensors, .metadata nor mp_rank_* folders: no checkpoint known"
    )


def carried_files(path: Path) -> Path | None:
    """The folder with `config.json` that belongs to a checkpoint."""
    kind, folder = find(path)
    places = [folder] if kind == "hf" else [folder / CARRIED, path / CARRIED]
    return next((place for place in places if (place / "config.json").exists()), None)


def open_weights(path: Path, config: Path | None = None) -> Weights:
    """Reads headers only. `config` is the Hugging Face folder that describes a checkpoint which does not
    itself carry one. ValueError on anything missing, misshapen, truncated or unknown."""
    kind, folder = find(path)
    carried = config or carried_files(path)
    if carried is None:
        raise ValueError(f"{path}: carries no config.json; name the model's Hugging Face folder: --hf-config")
    shape = read_shape(carried)
    pieces = list({"hf": hf_pieces, "legacy": legacy_pieces, "dist": dist_pieces}[kind](folder, shape))
    _check(path, shape, pieces)
    return Weights(path, shape, pieces, carried)


def _check(path: Path, shape: ModelShape, pieces: list[Piece]) -> None:
    dtypes: dict[str, torch.dtype] = {}
    counts = dict.fromkeys(shape.tensors(), 0)
    for piece in pieces:
        dtype = piece.array.dtype
        if dtype not in DTYPES.values():
            raise ValueError(f"{path}: {piece.tensor} must be one of {', '.join(DTYPES)}, got {dtype}")
        if dtypes.setdefault(piece.tensor, dtype) != dtype:
            raise ValueError(f"{path}: {piece.tensor} is stored as {dtypes[piece.tensor]} and as {dtype}")
        if not piece.is_copy:
            counts[piece.tensor] += math.prod(piece.extent)
    for tensor, size in shape.tensors().items():
        if counts[tensor] != math.prod(size):
            raise ValueError(f"{path}: has {counts[tensor]} of the {math.prod(size)} elements of {tensor}")


def hf_pieces(folder: Path, shape: ModelShape) -> Iterator[Piece]:
    index = folder / "model.safetensors.index.json"
    arrays: dict[str, Array] = {}
    if index.exists():
        try:
            where: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index}: is no index of safetensors files: {error!r}") from error
        files = {file: safetensors_arrays(folder / file) for file in sorted(set(where.values()))}
        for name, file in where.items():
            if name not in files[file]:
                raise ValueError(f"{folder / file}: lacks the tensor {name} of its index")
            arrays[name] = files[file][name]
    else:
        arrays = safetensors_arrays(folder / "model.safetensors")
    expected = shape.tensors()
    for name, size in expected.items():
        if name not in arrays:
            raise ValueError(f"{folder}: lacks the tensor {name}, {len(arrays)} are there")
        yield _whole(folder, name, size, arrays[name])
    for name in sorted(arrays.keys() - expected.keys()):
        if shape.tied and name == HEAD:
            yield _whole(folder, EMBEDDING, expected[EMBEDDING], arrays[name], is_copy=True)
        elif not name.endswith("rotary_emb.inv_freq"):  # derived from the config; old exports hold it
            raise ValueError(f"{folder}: has the tensor {name}, which a {shape.family} model has not")


def _whole(folder: Path, name: str, size: tuple[int, ...], array: Array, *, is_copy: bool = False) -> Piece:
    if array.shape != size:
        raise ValueError(f"{folder}: {name} must have shape {size}, got {array.shape}")
    zeros = (0,) * len(size)
    return Piece(name, zeros, size, array, zeros, is_copy)


def legacy_pieces(folder: Path, shape: ModelShape) -> Iterator[Piece]:
    ranks, layout = _legacy_ranks(folder, shape)
    check_model(shape, layout)
    for rank, chunks in enumerate(ranks):
        at = layout.coordinates(rank)
        where = f"{folder / rank_folder(layout, rank)}"
        for chunk, params in enumerate(chunks):
            expected = plan.param_shapes(shape, layout, rank, chunk)
            for name, size in expected.items():
                if name not in params:
                    raise ValueError(f"{where}: lacks the parameter {name}")
                if is_vocab(name):
                    check_vocab(where, shape, params[name].shape[0] * layout.tp, layout.tp)
                    size = (params[name].shape[0], *size[1:])
                if params[name].shape != size:
                    raise ValueError(f"{where}: {name} must have shape {size}, got {params[name].shape}")
            if unknown := params.keys() - expected.keys():
                raise ValueError(f"{where}: has the parameter {min(unknown)}, which the model has not")
        owned = set(plan.owned(shape, layout, rank))
        for copy in plan.held(shape, layout, rank):
            array, is_copy = chunks[copy.chunk][copy.param], copy not in owned
            start, extent = copy.tensor_start, copy.extent
            if is_vocab(copy.param):  # padded to other multiples than the plan's
                rows = array.shape[0]
                start = (at.tp * rows, 0)
                extent = (min(rows, shape.vocab - start[0]), extent[1])
                if extent[0] <= 0:
                    continue
            yield Piece(copy.tensor, start, extent, array, copy.param_start, is_copy)


def is_vocab(param: str) -> bool:
    return param in ("embedding.word_embeddings.weight", "output_layer.weight")


def check_vocab(where: str, shape: ModelShape, rows: int, tp: int) -> None:
    """A vocabulary that is not the stored one but for padding is another model's, or another tokenizer's."""
    padded = {-(-shape.vocab // (m * tp)) * m * tp for m in VOCAB_MULTIPLES}
    if rows not in padded:
        raise ValueError(
            f"{where}: holds {rows} vocabulary rows over tp {tp}, the config's vocab_size is {shape.vocab}"
            f" (padded {', '.join(map(str, sorted(padded)))}): another model or tokenizer"
        )


def rank_folder(layout: ParallelLayout, rank: int) -> str:
    at = layout.coordinates(rank)
    return f"mp_rank_{at.tp:02d}" + (f"_{at.pp:03d}" if layout.pp > 1 else "")


def _legacy_ranks(folder: Path, shape: ModelShape) -> tuple[list[list[dict[str, Array]]], ParallelLayout]:
    """Parameters of every rank's chunks, and the layout that the folder's names and keys tell."""
    names = sorted(path.name for path in folder.glob("mp_rank_*"))
    found = [re.fullmatch(r"mp_rank_(\d{2})(?:_(\d{3}))?", name) for name in names]
    for name, match in zip(names, found, strict=True):
        if match is None:
            raise ValueError(f"{folder}: {name} is no name of a tensor- and pipeline-parallel rank")
    tp = 1 + max(int(match[1]) for match in found if match)
    pp = 1 + max(int(match[2] or 0) for match in found if match)
    layout = ParallelLayout(tp=tp, pp=pp)
    ranks = []
    for rank in layout.ranks():
        path = folder / rank_folder(layout, rank) / RANK_FILE
        if not path.exists():
            raise ValueError(f"{path}: is missing, the other files are of tp {tp} and pp {pp}")
        ranks.append(_chunks(path, read_torch(path)))
    vpp = len(ranks[0])
    if any(len(chunks) != vpp for chunks in ranks):
        raise ValueError(f"{folder}: its ranks have differing numbers of model chunks")
    firsts = [ranks[layout.rank(Coordinates(tp=0, cp=0, dp=0, pp=p))] for p in range(pp)]
    split = tuple(_num_layers(firsts[p][v]) for v in range(vpp) for p in range(pp))
    if sum(split) != shape.num_layers:
        raise ValueError(f"{folder}: holds {sum(split)} layers, the config has {shape.num_layers}")
    return ranks, ParallelLayout(tp=tp, pp=pp, vpp=vpp, stage_split=split)


def _chunks(path: Path, state: Any) -> list[dict[str, Array]]:
    """The `model`, or `model0`, `model1`, … of a rank's file."""
    keys = ["model"] if isinstance(state, dict) and "model" in state else []
    while isinstance(state, dict) and f"model{len(keys)}" in state and "model" not in state:
        keys.append(f"model{len(keys)}")
    if not keys or any(not isinstance(state[key], dict) for key in keys):
        raise ValueError(f"{path}: must hold a dict with model, or model0, model1, …")
    chunks = []
    for key in keys:
        params = {}
        for name, value in state[key].items():
            if isinstance(value, Array) and not name.endswith("._extra_state"):
                params[_local_name(name)] = value
        chunks.append(params)
    return chunks


def _local_name(name: str) -> str:
    for fused, local in _FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + local
    return name


def _num_layers(params: dict[str, Array]) -> int:
    layers = [re.match(r"decoder\.layers\.(\d+)\.", name) for name in params]
    return 1 + max((int(match[1]) for match in layers if match), default=-1)


_DCP_NAMES: dict[tuple[str, str], Any] = {
    **{
        (cls.__module__, cls.__name__): cls
        for cls in (
            *(dcp.Metadata, dcp.TensorStorageMetadata, dcp.TensorProperties, dcp.ChunkStorageMetadata),
            *(dcp.BytesStorageMetadata, dcp.MetadataIndex, filesystem._StorageInfo),
        )
    },
    ("torch", "Size"): torch.Size,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,
    ("torch.serialization", "_get_layout"): lambda name: name,
    **{
        ("torch", str(dtype).removeprefix("torch.")): dtype
        for dtype in (*DTYPES.values(), torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
    },
}


def read_metadata(folder: Path) -> dcp.Metadata:
    path = folder / ".metadata"
    found = read_pickle(path, _DCP_NAMES)
    if not isinstance(found, dcp.Metadata):
        raise ValueError(f"{path}: is no metadata of a distributed checkpoint")
    return found


def stacked_name(param: str) -> tuple[str, int | None]:
    """Key of a whole model's parameter in a distributed checkpoint, and its place on the leading dim."""
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", param)
    return (f"decoder.layers.{match[2]}", int(match[1])) if match else (param, None)


def dist_pieces(folder: Path, shape: ModelShape, metadata: dcp.Metadata | None = None) -> Iterator[Piece]:
    chunks = _DistChunks(folder, metadata or read_metadata(folder))
    whole = ParallelLayout()
    for name, size in plan.param_shapes(shape, whole, 0).items():
        if is_vocab(name):
            rows, tp = chunks.rows(name)
            check_vocab(str(folder), shape, rows, tp)
            size = (rows, *size[1:])
        chunks.check(name, size)
    for copy in plan.held(shape, whole, 0):
        for start, array in chunks.of(copy.param):
            if (cut := intersect(copy.param_start, copy.extent, start, array.shape)) is not None:
                low, extent = cut
                moved = tuple(
                    t + a - p for t, a, p in zip(copy.tensor_start, low, copy.param_start, strict=True)
                )
                yield Piece(copy.tensor, moved, extent, array, _minus(low, start))


class _DistChunks:
    """The stored chunks of a distributed checkpoint's parameters, by the whole model's parameter names."""

    def __init__(self, folder: Path, metadata: dcp.Metadata) -> None:
        self._folder = folder
        self._sizes: dict[str, Any] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, dcp.TensorStorageMetadata) and not key.startswith("optimizer."):
                self._sizes[_local_name(key)] = (key, entry)
        self._stored = {}
        ends: dict[str, int] = {}
        for index, at in metadata.storage_data.items():
            self._stored[index.fqn, tuple(index.offset or ())] = at
            ends[at.relative_path] = max(at.offset + at.length, ends.get(at.relative_path, 0))
        for file, end in ends.items():
            if not (folder / file).is_file() or (folder / file).stat().st_size < end:
                raise ValueError(f"{folder / file}: is missing or truncated")
        self._opened: dict[str, list[tuple[tuple[int, ...], Array]]] = {}

    def _entry(self, param: str) -> tuple[str, Any, int | None]:
        """(stored key, its metadata, place on a leading dim). Layers are stacked, or have their own keys."""
        key, layer = stacked_name(param)
        for name, place in ((key, layer), (param, None)):
            if name in self._sizes:
                return *self._sizes[name], place
        raise ValueError(f"{self._folder}: lacks the parameter {key}")

    def rows(self, param: str) -> tuple[int, int]:
        """(rows over all ranks, number of row parts) of a vocabulary."""
        _, entry, _ = self._entry(param)
        return entry.size[0], len({chunk.offsets[0] for chunk in entry.chunks})

    def check(self, param: str, size: tuple[int, ...]) -> None:
        _, entry, layer = self._entry(param)
        got = tuple(entry.size)
        if (got if layer is None else got[1:]) != size or (layer is not None and layer >= got[0]):
            wanted = size if layer is None else (f"> {layer}", *size)
            raise ValueError(f"{self._folder}: {param} must have shape {wanted}, got {got}")

    def of(self, param: str) -> list[tuple[tuple[int, ...], Array]]:
        """(start in the parameter, array) of each chunk."""
        key, entry, layer = self._entry(param)
        if key not in self._opened:
            self._opened[key] = [
                (tuple(chunk.offsets), self._open(key, entry, chunk)) for chunk in entry.chunks
            ]
        found = []
        for start, array in self._opened[key]:
            if layer is None:
                found.append((start, array))
            elif start[0] <= layer < start[0] + array.shape[0]:
                one = Array(array.file, array.offset, array.dtype, array.shape[1:])
                offset = array.offset + (layer - start[0]) * one.num_bytes
                found.append((start[1:], Array(array.file, offset, array.dtype, one.shape)))
        return found

    def _open(self, key: str, entry: dcp.TensorStorageMetadata, chunk: dcp.ChunkStorageMetadata) -> Array:
        at = self._stored.get((key, tuple(chunk.offsets)))
        if at is None:
            raise ValueError(f"{self._folder}: .metadata does not say where a chunk of {key} is")
        path = self._folder / at.relative_path
        if getattr(at, "transform_descriptors", None):
            raise ValueError(f"{path}: is compressed ({at.transform_descriptors}), which is not read")
        array = read_torch(path, at.offset, at.length)
        if (
            not isinstance(array, Array)
            or array.shape != tuple(chunk.sizes)
            or array.dtype != entry.properties.dtype
        ):
            raise ValueError(f"{path}: a chunk of {key} is not what .metadata says")
        return array


def intersect(
    start: tuple[int, ...], extent: tuple[int, ...], other: tuple[int, ...], other_extent: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(start, extent) of what two rectangles share."""
    low = tuple(map(max, start, other))
    high = [min(s + n, o + m) for s, n, o, m in zip(start, extent, other, other_extent, strict=True)]
    size = tuple(h - s for h, s in zip(high, low, strict=True))
    return (low, size) if all(n > 0 for n in size) else None


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
