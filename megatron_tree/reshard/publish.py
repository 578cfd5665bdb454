"""The trainers' side of a publish: two image slots of one run, written in turn.

Engines may go on (re)loading the committed version from its slot while the next one is written to the other.
A lock file guards a run's slots for as long as its rank 0 lives; what a dead run left is swept when the next
one starts. Not here: the slices (`plan`, `image`), the engines' side (`receive`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

import torch

from megatron_tree.reshard import digest, image
from megatron_tree.reshard.names import ModelShape

PREFIX = "megatron-tree-"


class Slots:
    """The slots `<image_dir>/megatron-tree-<run_id>-<0|1>.safetensors`. ValueError where they cannot be
    had."""

    def __init__(self, image_dir: str, run_id: str) -> None:
        self._folder, self._run_id = _folder(image_dir), run_id
        sweep(self._folder, keep=run_id)  # engines may still have to load what this run committed last
        path = self._folder / f"{PREFIX}{run_id}.lock"
        lock = _lock(path)
        if lock is None:
            raise ValueError(f"run.dir: another run uses the images {path.stem}-* in {image_dir}")
        self._lock = lock

    def path(self, version: int) -> Path:
        return self._folder / f"{PREFIX}{self._run_id}-{version % 2}.safetensors"

    def create(self, version: int, shape: ModelShape, dtype: torch.dtype) -> Path:
        """The slot of a version in its full size; pages of an earlier version are used again."""
        path = self.path(version)
        digest.forget(path)
        if not path.exists() or path.stat().st_size != image.size(shape, dtype):
            path.unlink(missing_ok=True)
            try:
                image.create(path, shape, dtype)
            except OSError as error:
                path.unlink(missing_ok=True)
                if error.errno != errno.ENOSPC:
                    raise
                what = f"an image of {image.size(shape, dtype)} bytes"
                raise ValueError(f"engine.image_dir: {self._folder} has no room for {what}") from error
        return path

    def close(self) -> None:
        _remove(self._folder, self._run_id)
        self._lock.close()


def check_room(image_dir: str, run_id: str, image_bytes: int) -> None:
    """ValueError where the folder does not hold two images of this run. What dead runs left there goes."""
    folder = _folder(image_dir)
    sweep(folder, keep=run_id)
    own = sum(path.stat().st_size for path in folder.glob(f"{PREFIX}{run_id}-[01].safetensors"))
    room = shutil.disk_usage(folder).free + own
    if room < 2 * image_bytes:
        raise ValueError(
            f"engine.image_dir: {folder} must have room for two images of {image_bytes} bytes, got {room}"
        )


def _folder(image_dir: str) -> Path:
    if not Path(image_dir).is_dir():
        raise ValueError(f"engine.image_dir: must be a folder, got {image_dir}")
    return Path(image_dir)


def sweep(folder: Path, keep: str | None = None) -> list[str]:
    """Removes the images of runs that no longer live, but for run `keep`; returns their run ids."""
    swept = []
    for path in folder.glob(f"{PREFIX}*.lock"):
        run_id = path.stem.removeprefix(PREFIX)
        lock = _lock(path) if run_id != keep else None
        if lock is not None:
            with lock:
                _remove(folder, run_id)
                swept.append(run_id)
    return swept


def _lock(path: Path) -> IO[str] | None:
    """The open lock file, locked until it is closed; None where another process or another user has it."""
    while True:
        try:
            file = path.open("w")
        except PermissionError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # its holder removed it between our two steps: this lock keeps nobody out


def _remove(folder: Path, run_id: str) -> None:
    for path in folder.glob(f"{PREFIX}{run_id}-[01].safetensors*"):  # with their digests
        path.unlink(missing_ok=True)
    (folder / f"{PREFIX}{run_id}.lock").unlink(missing_ok=True)
