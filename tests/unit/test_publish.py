"""The two image slots of a run: who may have them, what a full disk does, what is swept. Nothing is
simulated."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_tree.reshard import image
from megatron_tree.reshard.publish import Slots, check_room, sweep
from tests.unit.shapes import small_shape

SHAPE = small_shape()
HOLD = """
import sys, torch
from megatron_tree.reshard.publish import Slots
from tests.unit.shapes import small_shape
slots = Slots(sys.argv[1], sys.argv[2])
for version in (1, 2):
    slots.create(version, small_shape(), torch.float32)
print("held", flush=True)
sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the slots of the run `other`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "other"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_versions_take_turns_and_pages_are_used_again(tmp_path: Path):
    slots = Slots(str(tmp_path), "run")
    paths = [slots.create(version, SHAPE, torch.float32) for version in range(1, 5)]
    assert [path.name for path in paths] == [f"megatron-tree-run-{slot}.safetensors" for slot in (1, 0, 1, 0)]
    inode = paths[0].stat().st_ino
    image.writable(paths[0])["model.norm.weight"].fill_(7.0)
    assert slots.create(5, SHAPE, torch.float32).stat().st_ino == inode
    assert load_file(paths[0])["model.norm.weight"].tolist() == [7.0] * 3
    slots.close()
    assert names(tmp_path) == []


def test_a_second_run_of_the_same_id_is_refused(tmp_path: Path, holder: subprocess.Popen[str]):
    before = names(tmp_path)
    with pytest.raises(ValueError, match=r"^run\.dir: another run uses the images megatron-tree-other-. in "):
        Slots(str(tmp_path), "other")
    assert names(tmp_path) == before
    assert len(before) == 3
    mine = Slots(str(tmp_path), "mine")  # another id is free
    mine.create(1, SHAPE, torch.float32)
    mine.close()
    assert names(tmp_path) == before


def test_a_live_run_is_not_swept_and_a_killed_one_is(tmp_path: Path, holder: subprocess.Popen[str]):
    assert sweep(tmp_path) == []
    assert len(names(tmp_path)) == 3
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    (tmp_path / "psm_of_somebody").touch()
    assert sweep(tmp_path) == ["other"]
    assert names(tmp_path) == ["psm_of_somebody"]


def test_another_users_lock_is_left_alone(tmp_path: Path):
    """/dev/shm is everybody's: a lock file that may not be opened belongs to somebody's live or dead run."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o777)
        (folder / "megatron-tree-theirs.lock").touch(mode=0o400)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.getuid() == 0:
                    os.setuid(65534)  # root may open everything
                status = 0 if sweep(folder) == [] else 1
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert names(folder) == ["megatron-tree-theirs.lock"]
    finally:
        shutil.rmtree(folder)


def test_a_killed_runs_id_can_be_used_again(tmp_path: Path, holder: subprocess.Popen[str]):
    holder.kill()
    holder.wait()
    before = names(tmp_path)
    slots = Slots(str(tmp_path), "other")
    assert names(tmp_path) == before  # engines may still load what it committed
    image.create(slots.path(1), small_shape(vocab=4), torch.float32)  # another model's
    resized = slots.create(1, SHAPE, torch.float32)
    assert load_file(resized)["model.embed_tokens.weight"].shape == (SHAPE.vocab, SHAPE.hidden)
    slots.close()
    assert names(tmp_path) == []


def _contend(folder: str, rounds: int) -> None:
    """Takes and leaves the slots; the marker file says whether somebody else has them too."""
    marker = Path(folder) / "marker"
    for _ in range(rounds):
        try:
            slots = Slots(folder, "run")
        except ValueError:
            continue
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        marker.unlink()
        slots.close()


def test_contenders_never_hold_the_slots_together(tmp_path: Path):
    """A lock file is removed by whoever sweeps: a lock on a removed file must not count."""
    context = multiprocessing.get_context("fork")
    contenders = [context.Process(target=_contend, args=(str(tmp_path), 1000)) for _ in range(3)]
    for process in contenders:
        process.start()
    for process in contenders:
        process.join(60)
    assert [process.exitcode for process in contenders] == [0, 0, 0]


def test_a_full_disk_is_one_line_and_leaves_nothing():
    """1e15 words of 3 floats are 12 PB: the kernel refuses to reserve them in shared memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        slots = Slots(str(folder), "run")
        with pytest.raises(ValueError, match="no room") as refusal:
            slots.create(1, small_shape(vocab=10**15), torch.float32)
        size = image.size(small_shape(vocab=10**15), torch.float32)
        assert str(refusal.value) == f"engine.image_dir: {folder} has no room for an image of {size} bytes"
        assert isinstance(refusal.value.__cause__, OSError)
        assert refusal.value.__cause__.errno == errno.ENOSPC
        assert names(folder) == ["megatron-tree-run.lock"]
        assert slots.create(1, SHAPE, torch.float32).exists()
        slots.close()
    finally:
        shutil.rmtree(folder)


def test_no_folder(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^engine\.image_dir: must be a folder, got .*none$"):
        Slots(str(tmp_path / "none"), "run")


def test_two_images_must_fit_beside_what_others_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on has one of its images there already; what a dead run left is swept first."""
    size = image.size(SHAPE, torch.float32)
    free = shutil.disk_usage(tmp_path)._replace(free=size + size // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    message = f"must have room for two images of {size} bytes, got {size + size // 2}"
    with pytest.raises(ValueError, match=f"^engine.image_dir: {tmp_path} {message}$"):
        check_room(str(tmp_path), "run", size)
    slots = Slots(str(tmp_path), "run")
    slots.create(1, SHAPE, torch.float32)
    check_room(str(tmp_path), "run", size)
    slots.close()
    with pytest.raises(ValueError, match=r"^engine.image_dir: must be a folder, got /nowhere$"):
        check_room("/nowhere", "run", size)
