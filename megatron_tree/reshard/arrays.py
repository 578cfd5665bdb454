"""Where a tensor's bytes lie in a file, for the two containers that checkpoints use.

Safetensors files and torch's zip files both store a tensor as one run of bytes, so one `Array` (file, offset,
dtype, shape) describes either, and reading or writing is a memory map of that run: nothing is loaded. Pickles
are read without running any code of theirs. Not here: which tensor is which parameter (`formats`).
"""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Array:
    """A contiguous tensor in a file."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self, *, writable: bool = False) -> torch.Tensor:
        """The tensor over the file's own pages; unless `writable`, changes to it stay private."""
        size = (self.num_bytes,)
        mapped = np.memmap(self.file, np.uint8, "r+" if writable else "c", offset=self.offset, shape=size)
        return torch.from_numpy(mapped).view(self.dtype).view(self.shape)


def safetensors_arrays(path: Path) -> dict[str, Array]:
    """Every tensor of a safetensors file. ValueError where it is truncated or none."""
    try:
        with path.open("rb") as file, safe_open(path, framework="pt"):  # which checks sizes and offsets
            length = struct.unpack("<Q", file.read(8))[0]
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} must be one of {', '.join(DTYPES)}, got {entry['dtype']}")
        start = 8 + length + entry["data_offsets"][0]
        found[name] = Array(str(path), start, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return found


def read_torch(path: Path, start: int = 0, length: int | None = None) -> Any:
    """What `torch.save` wrote to a file, or to `length` bytes of it: tensors as `Array`, objects of unknown
    classes as their bare attributes. ValueError where it is truncated or something else."""
    try:
        with path.open("rb") as file:
            stop = path.stat().st_size if length is None else start + length
            window = _Window(file, start, stop)
            with zipfile.ZipFile(window) as archive:
                members = {name.split("/", 1)[1]: info for name, info in archive.NameToInfo.items()}
                if archive.read(members["byteorder"]) != b"little":
                    raise ValueError(f"{path}: must be little-endian")

                def place(key: str) -> int:
                    window.seek(members[f"data/{key}"].header_offset + 26)
                    name, extra = struct.unpack("<HH", window.read(4))
                    return start + window.tell() + name + extra

                with archive.open(members["data.pkl"]) as stream:
                    return _TorchUnpickler(stream, path, place).load()
    except (OSError, zipfile.BadZipFile, KeyError, IndexError, struct.error, *_PICKLE_ERRORS) as error:
        raise ValueError(f"cannot read {path}: no whole file of torch.save: {error!r}") from error


_PICKLE_ERRORS = (pickle.UnpicklingError, EOFError, TypeError, AttributeError)


def read_pickle(path: Path, allowed: dict[tuple[str, str], Any]) -> Any:
    """A plain pickle; of what it names only `allowed` is used."""
    try:
        with path.open("rb") as stream:
            return _SafeUnpickler(stream, allowed).load()
    except (OSError, KeyError, IndexError, ValueError, *_PICKLE_ERRORS) as error:
        raise ValueError(f"cannot read {path}: {error!r}") from error


class _Window(io.RawIOBase):
    """Part of an open file as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, stop: int) -> None:
        self._file, self._start, self._stop, self._at = file, start, stop, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stop - self._start}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._stop - self._start - self._at, 0)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


class _Inert(SimpleNamespace):
    """Stands for an object whose class is not looked up. It keeps attributes and drops everything else."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})

    def __call__(self, *_: object, **__: object) -> _Inert:
        return _Inert()

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class _SafeUnpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], allowed: dict[tuple[str, str], Any]) -> None:
        super().__init__(stream, encoding="utf-8")
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        return self._allowed.get((module, name), _Inert)


class _TorchUnpickler(_SafeUnpickler):
    """Rebuilds a tensor as its `Array`. `place` gives the file offset of a storage."""

    def __init__(self, stream: IO[bytes], path: Path, place: Callable[[str], int]) -> None:
        super().__init__(
            stream,
            {
                ("collections", "OrderedDict"): OrderedDict,
                ("argparse", "Namespace"): SimpleNamespace,
                ("torch._utils", "_rebuild_tensor_v2"): self._array,
                ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
                **{("torch", name): dtype for name, dtype in _STORAGES.items()},
            },
        )
        self._path, self._place = path, place

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, int]:
        _, dtype, key, _, _ = pid
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self._path}: a storage of an unknown type")
        return dtype, self._place(key)

    def _array(
        self,
        storage: tuple[torch.dtype, int],
        first: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *_: Any,
    ) -> Array:
        dtype, offset = storage
        dense = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        if any(got != want and size > 1 for got, want, size in zip(stride, dense, shape, strict=True)):
            raise ValueError(f"{self._path}: a tensor of shape {tuple(shape)} is stored with gaps")
        return Array(str(self._path), offset + first * dtype.itemsize, dtype, tuple(shape))
