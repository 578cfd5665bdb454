"""A run's folder: who may use it, what lies where, which checkpoint is the latest.

    config.yaml  metrics.jsonl  trees.jsonl  tensorboard/  summary.json
    reference/                 Hugging Face folder: the weights after a warm-up, which the reference holds
    checkpoints/iteration-N/   megatron/ (distributed checkpoint), state.json (the driver's part), config.yaml
    best/                      Hugging Face folder of the best evaluation

Folders are written aside as `NAME.partial` and renamed, so one that exists under its name is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from megatron_tree.config import Config

_STATE = "state.json"


class RunFolder:
    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir)
        self._config = config

    def claim(self) -> None:
        """Takes the folder for this process and writes the config into it. ValueError where it is used
        already."""
        if self._used() and not self._config.run.resume:
            raise ValueError(f"run.dir: must be new or empty unless run.resume is true, got {self.path}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "run.lock").open("w")
        except OSError as error:
            raise ValueError(f"run.dir: cannot write to {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"run.dir: {self.path} is in use by another run") from error
        text = yaml.safe_dump(self._config.model_dump(mode="json"), sort_keys=False)
        (self.path / "config.yaml").write_text(text, encoding="utf-8")

    def _used(self) -> bool:
        """Whether there is anything to lose. A run that failed while it started leaves nothing."""
        if not self.path.exists():
            return False
        nothing = ("run.lock", "config.yaml", "tensorboard", "wandb", "wandb.id")
        found = [path for path in self.path.iterdir() if path.name not in nothing]
        return any(path.is_dir() or path.stat().st_size for path in found)

    @property
    def run_id(self) -> str:
        """Names the run's images in shared memory; the same after a restart."""
        return hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16]

    @property
    def reference(self) -> Path:
        return self.path / "reference"

    @property
    def best(self) -> Path:
        return self.path / "best"

    def checkpoint(self, iteration: int) -> Path:
        return self.path / "checkpoints" / f"iteration-{iteration}"

    def partial(self, iteration: int) -> Path:
        """Where a checkpoint is written; whatever a killed run left there is removed."""
        aside = self.checkpoint(iteration).with_suffix(".partial")
        shutil.rmtree(aside, ignore_errors=True)
        return aside

    def has(self, iteration: int) -> bool:
        return self.checkpoint(iteration).exists()

    def finish(self, iteration: int, state: dict[str, Any]) -> None:
        """Makes a written checkpoint the latest and drops all but the last `train.keep_checkpoints`."""
        aside, target = self.checkpoint(iteration).with_suffix(".partial"), self.checkpoint(iteration)
        (aside / _STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        shutil.copy2(self.path / "config.yaml", aside / "config.yaml")
        shutil.rmtree(target, ignore_errors=True)  # the same iteration, done again after a restart
        aside.rename(target)
        for old in self.iterations()[: -self._config.train.keep_checkpoints]:
            shutil.rmtree(self.checkpoint(old))

    def iterations(self) -> list[int]:
        """Iterations with a whole checkpoint, in order."""
        names = (p.name for p in (self.path / "checkpoints").glob("iteration-*") if not p.suffix)
        return sorted(int(name.removeprefix("iteration-")) for name in names)

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """Folder and driver's state of the latest checkpoint."""
        found = self.iterations()
        if not found:
            return None
        folder = self.checkpoint(found[-1])
        try:
            return folder, json.loads((folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"run.resume: {folder / _STATE} cannot be read: {error}") from error
