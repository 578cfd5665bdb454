"""Model images: a safetensors file with a fixed place for every tensor, written by many, read by many.

On disk an image is the weights file of a Hugging Face folder; in shared memory it is what engines load from.
Each owner writes only its slices and each reader maps only its own, so no process ever holds the model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from megatron_tree.reshard.arrays import DTYPES
from megatron_tree.reshard.names import ModelShape
from megatron_tree.reshard.plan import SliceCopy

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def create(path: Path, shape: ModelShape, dtype: torch.dtype) -> None:
    """Makes an empty image in its full size. Raises OSError when the file system has no room for it.

    The bytes are reserved, not only promised: a full /dev/shm must be an error here, not a SIGBUS in a
    writer.
    """
    text, num_bytes = _whole_header(shape, dtype)
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, len(text) + num_bytes)


def size(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of an image file."""
    text, num_bytes = _whole_header(shape, dtype)
    return len(text) + num_bytes


def _whole_header(shape: ModelShape, dtype: torch.dtype) -> tuple[bytes, int]:
    return header({name: (dtype, size) for name, size in shape.tensors().items()})


def header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, int]:
    """The beginning of a safetensors file, up to the first tensor, and the bytes of all tensors behind it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, size) in tensors.items():
        stop = offset + math.prod(size) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(size), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    return struct.pack("<Q", len(text)) + text, offset


def writable(path: Path) -> dict[str, torch.Tensor]:
    """Maps an image for writing: Hugging Face name -> tensor over the file's own pages."""
    return _tensors(_map(path, "r+"))


def readable(path: Path) -> dict[str, torch.Tensor]:
    """The same for reading. The pages are the file's; a write to them would stay in this process."""
    return _tensors(_map(path, "c"))


class Maps:
    """The two slots of a run in a process that uses them again and again: each file is mapped once, because
    the page faults of a fresh mapping take longer than a copy of its bytes."""

    def __init__(self, *, writable: bool) -> None:
        self._mode: Literal["r+", "c"] = "r+" if writable else "c"
        self._mapped: dict[tuple[int, int, int], np.ndarray] = {}

    def tensors(self, path: Path) -> dict[str, torch.Tensor]:
        """What `writable` or `readable` answers."""
        file = path.stat()
        key = (file.st_dev, file.st_ino, file.st_size)  # a slot that was made anew is another file
        if key not in self._mapped:
            if len(self._mapped) == 2:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[key] = _map(path, self._mode)
        return _tensors(self._mapped[key])


def _map(path: Path, mode: Literal["r+", "c"]) -> np.ndarray:
    return np.memmap(path, dtype=np.uint8, mode=mode).view(np.ndarray)


def _tensors(mapped: np.ndarray) -> dict[str, torch.Tensor]:
    length = struct.unpack("<Q", mapped[:8].tobytes())[0]
    header = json.loads(mapped[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        flat = torch.from_numpy(mapped[8 + length + start : 8 + length + stop])
        tensors[name] = flat.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


class Folder:
    """The weights of a Hugging Face folder (one safetensors file, or shards with an index), read slice by
    slice."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        index, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
        if index.exists():
            try:
                self._files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"model.path: {index} is no index of safetensors files: {error!r}"
                ) from error
        elif single.exists():
            self._files = dict.fromkeys(self._open(single.name).keys(), single.name)
        else:
            raise ValueError(f"model.path: {self.path} has neither {single.name} nor {index.name}")
        self._opened: dict[str, safe_open] = {}

    def check(self, shape: ModelShape) -> None:
        """ValueError naming the first tensor that is missing, misshapen or quantised; no weight is read."""
        for name, expected in shape.tensors().items():
            if name not in self._files:
                have = len(self._files)
                raise ValueError(f"model.path: {self.path} lacks the tensor {name}, {have} are there")
            stored = self._slice(name)
            got = tuple(stored.get_shape())
            if got != expected:
                raise ValueError(f"model.path: {self.path}: {name} must have shape {expected}, got {got}")
            if (dtype := stored.get_dtype()) not in DTYPES:
                known = ", ".join(DTYPES)
                raise ValueError(f"model.path: {self.path}: {name} must be one of {known}, got {dtype}")

    def read(self, copy: SliceCopy) -> torch.Tensor:
        return self._slice(copy.tensor)[copy.tensor_index]

    def _slice(self, name: str) -> Any:  # safetensors exports no type for it
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = self._open(file)
        try:
            return self._opened[file].get_slice(name)
        except SafetensorError as error:
            path = self.path / file
            raise ValueError(f"model.path: {path} lacks the tensor {name} of its index: {error}") from error

    def _open(self, file: str) -> safe_open:
        try:
            return safe_open(self.path / file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"model.path: cannot read {self.path / file}: {error}") from error


def load_slices(folder: Folder, params: Mapping[str, torch.Tensor], copies: Iterable[SliceCopy]) -> None:
    """Fills a rank's parameters from a folder; vocabulary padding rows keep what they have."""
    with torch.no_grad():
        for copy in copies:
            params[copy.param][copy.param_index].copy_(folder.read(copy))


def carry_files(source: Path, target: Path) -> None:
    """Copies config, tokenizer and chat template beside exported weights."""
    for file in sorted(source.iterdir()):
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(".index.json"):
            shutil.copy2(file, target / file.name)
