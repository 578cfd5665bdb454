"""Copies checkpoints between formats and layouts, and compares them, in parallel processes.

A target is written aside as `<target>.partial` and renamed when it is whole; it is never overwritten. All
copying is between memory-mapped files: a process holds no tensor of its own. Not here: formats (`formats`,
`create`), the command line (`tools/reshard.py`).
"""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import create
from megatron_tree.reshard.arrays import Array
from megatron_tree.reshard.formats import PARTIAL, Piece, Weights, intersect

BATCH_BYTES = 64 << 20
GIB = 1 << 30
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_Result = TypeVar("_Result")
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


def silent(_done: int, _total: int) -> None:
    """No progress shown."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same rectangle of a Hugging Face tensor in two arrays."""

    tensor: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    first: Array
    first_start: tuple[int, ...]
    second: Array
    second_start: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.extent) * self.second.dtype.itemsize


def to_megatron(
    source: Weights,
    target: Path,
    layout: ParallelLayout | None = None,
    *,
    vocab_multiple: int = 1,
    workers: int = 1,
    progress: Progress = silent,
) -> int:
    """A distributed checkpoint, or with a layout a legacy folder for it. Returns the bytes of its weights."""
    carried = _carried(source)
    dtypes = source.dtypes()

    def make(folder: Path) -> create.Skeleton:
        if layout is None:
            return create.distributed(folder, source.shape, dtypes, carried)
        return create.legacy(folder, source.shape, dtypes, carried, layout, vocab_multiple)

    return _convert(source, target, make, workers, progress)


def to_hf(
    source: Weights,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 * GIB,
    workers: int = 1,
    progress: Progress = silent,
) -> int:
    """A Hugging Face folder, in the stored dtypes or in one. Returns the bytes of its weights."""
    carried = _carried(source)
    check_tokenizer(carried, source.shape.vocab)
    dtypes = {name: dtype or stored for name, stored in source.dtypes().items()}

    def make(folder: Path) -> create.Skeleton:
        return create.hugging_face(folder, source.shape, dtypes, carried, max_shard_bytes)

    return _convert(source, target, make, workers, progress)


def _carried(source: Weights) -> Path:
    assert source.carried is not None, "open_weights asks for a config"
    return source.carried


def check_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer whose ids go beyond the vocabulary belongs to another model."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        words = tokenizer["model"]["vocab"]
        ids = list(words.values()) if isinstance(words, dict) else [len(words) - 1]
        ids += [token["id"] for token in tokenizer.get("added_tokens") or []]
        highest = max(ids, default=-1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no tokenizer: {error!r}") from error
    if highest >= vocab:
        raise ValueError(
            f"{path}: has token ids up to {highest}, the model's vocabulary is {vocab}: another model's"
        )


def _convert(
    source: Weights,
    target: Path,
    make: Callable[[Path], create.Skeleton],
    workers: int,
    progress: Progress,
) -> int:
    with aside(target) as folder:
        skeleton = make(folder)
        copies = pairs([p for p in source.pieces if not p.is_copy], skeleton.pieces)
        doubles = pairs([p for p in source.pieces if not p.is_copy], [p for p in source.pieces if p.is_copy])
        for found in _parallel(first_difference, doubles, workers, silent):
            if found is not None:
                raise ValueError(f"{source.path}: its copies of {found} differ")
        for _ in _parallel(_copy, copies, workers, progress):
            pass
        skeleton.finish()
        for file in sorted(folder.rglob("*")):
            _sync(file)
        _sync(folder)
    return sum(math.prod(p.extent) * p.array.dtype.itemsize for p in skeleton.pieces if not p.is_copy)


@contextmanager
def aside(target: Path) -> Iterator[Path]:
    """An empty `<target>.partial` that becomes `target` when the block ends, and goes when it fails. What a
    dead process left there is replaced; a living one's is refused."""
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target}: exists and is not overwritten")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent}: must be a folder, {target.name} is to be made in it")
    partial = target.with_name(target.name + PARTIAL)
    if partial.exists():
        os.close(_lock(partial))
        shutil.rmtree(partial)
    partial.mkdir()
    lock = _lock(partial)
    try:
        yield partial
        if target.exists():
            raise ValueError(f"{target}: exists and is not overwritten")
        partial.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # it has its name when it is whole: what is left is half
        os.close(lock)


def _lock(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ValueError(f"{folder}: is being written by another process") from error
    return handle


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def pairs(first: Iterable[Piece], second: Iterable[Piece]) -> list[Pair]:
    """What the two share, in the order of `second`."""
    by_tensor: dict[str, list[Piece]] = {}
    for piece in first:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    found = []
    for b in second:
        for a in by_tensor.get(b.tensor, []):
            shared = intersect(a.start, a.extent, b.start, b.extent)
            if shared is not None:
                start, extent = shared
                at_a, at_b = (
                    tuple(i + s - o for i, s, o in zip(p.array_start, start, p.start, strict=True))
                    for p in (a, b)
                )
                found.append(Pair(b.tensor, start, extent, a.array, at_a, b.array, at_b))
    return found


def _copy(batch: Sequence[Pair]) -> None:
    with torch.no_grad():
        for pair in batch:
            source = pair.first.map()[_index(pair.first_start, pair.extent)]
            pair.second.map(writable=True)[_index(pair.second_start, pair.extent)].copy_(source)


def _index(start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))


def verify(first: Weights, second: Weights, *, workers: int = 1, progress: Progress = silent) -> str | None:
    """The first difference in layer order, None where all tensors are bit-equal, every copy of them included.

    Vocabulary padding is not compared; a head that a tied model's folder holds beside its embedding is.
    """
    a, b = first.shape.tensors(), second.shape.tensors()
    dtypes = first.dtypes(), second.dtypes()
    for name in [*a, *b]:
        if name not in a or name not in b:
            return f"{name}: only in {first.path if name in a else second.path}"
        if a[name] != b[name]:
            return f"{name}: shape {a[name]} in {first.path}, {b[name]} in {second.path}"
        if dtypes[0][name] != dtypes[1][name]:
            return f"{name}: {dtypes[0][name]} in {first.path}, {dtypes[1][name]} in {second.path}"
    places = {name: place for place, name in enumerate(a)}
    compared = pairs([p for p in first.pieces if not p.is_copy], second.pieces)
    compared += pairs([p for p in first.pieces if p.is_copy], [p for p in second.pieces if not p.is_copy])
    compared.sort(key=lambda pair: (places[pair.tensor], pair.start))
    for found in _parallel(first_difference, compared, workers, progress):
        if found is not None:
            return found
    return None


def first_difference(batch: Sequence[Pair]) -> str | None:
    for pair in batch:
        a = pair.first.map()[_index(pair.first_start, pair.extent)]
        b = pair.second.map()[_index(pair.second_start, pair.extent)]
        bits = _BITS[a.dtype.itemsize]  # NaNs are compared by their bits too
        if torch.equal(a.view(bits), b.view(bits)):
            continue
        for row in range(a.shape[0]):
            unequal = a[row].view(bits) != b[row].view(bits)
            if unequal.any():
                place = (row, *unequal.nonzero()[0].tolist()) if a.dim() > 1 else (row,)
                element = tuple(s + i for s, i in zip(pair.start, place, strict=True))
                return f"{pair.tensor}{list(element)}: {a[place].item()!r} and {b[place].item()!r}"
    return None


def _parallel(
    work: Callable[[Sequence[Pair]], _Result], todo: list[Pair], workers: int, progress: Progress
) -> Iterator[_Result]:
    """Results in order. Batches are of bounded size, so that processes share the work evenly."""
    batches: list[list[Pair]] = []
    filled = BATCH_BYTES
    for pair in todo:
        if filled + pair.num_bytes > BATCH_BYTES:
            batches.append([])
            filled = 0
        batches[-1].append(pair)
        filled += pair.num_bytes
    done, total = 0, sum(pair.num_bytes for pair in todo)
    for batch, result in zip(batches, _results(work, batches, min(workers, len(batches))), strict=True):
        done += sum(pair.num_bytes for pair in batch)
        progress(done, total)
        yield result


def _results(
    work: Callable[[Sequence[Pair]], _Result], batches: list[list[Pair]], workers: int
) -> Iterator[_Result]:
    if workers <= 1:
        yield from map(work, batches)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)
    try:
        yield from pool.map(work, batches)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process died; was it killed, or a source file cut while it was read?"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """One thread, and no life beyond the parent's: a killed parent could not tell its workers to stop."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
