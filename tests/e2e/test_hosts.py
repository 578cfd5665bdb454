"""A run finds out by itself whether trainers and engines share memory. About 20 s: Ray on two nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_the_transport_follows_what_hosts_see(tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    alone.mkdir()
    shared.mkdir()
    mounts = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(alone)]
    if subprocess.run(mounts, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system in a namespace of its own")
    program = [sys.executable, "-m", "tests.e2e.hosts", str(alone), str(shared)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["hosts"] == ["127.0.0.2", "127.0.0.3"]
    assert told["blind"] == ["127.0.0.3"]
    assert told["left"] == []
    fact = f"{alone} of rank 0's host is not seen on 127.0.0.3"
    assert told["auto"] == f"stream; engine.transport: stream, since {fact}"
    assert told["shm"].startswith(f"engine.transport: shm is for one host, and {fact}; stream is for several")
    assert told["stream"] == "stream"
    assert told["auto, shared"] == "shm"
    assert told["no folder"].startswith("engine.image_dir: 127.0.0.2: [Errno 2] No such file or directory")
