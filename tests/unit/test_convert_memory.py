"""A model of 2.2 GB through the command line: memory per process, and kills at random moments.

Memory is `RssAnon` plus `RssShmem` of /proc/PID/status, of every process of the tool, sampled until it ends,
over what an interpreter with the same imports has. Pages of mapped files are the kernel's to take back.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_tree.reshard import create
from megatron_tree.reshard.names import read_shape
from tests.tiny_models import make_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
CONFIG = {  # TinyLlama's shape: 1.1 B parameters, the embedding is its largest tensor
    **{"model_type": "llama", "num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 2048, "dtype": "bfloat16", "tie_word_embeddings": False},
}
LARGEST = 32000 * 2048 * 2
LEGACY = ("--format", "legacy", "--tp", "2", "--pp", "2")
IMPORTS = "import tools.reshard, rich.progress, megatron_tree.reshard.convert, concurrent.futures.process"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    for folder in ("files", "hf"):
        (root / folder).mkdir()
    (root / "files/config.json").write_text(json.dumps(CONFIG))
    make_tokenizer().save_pretrained(root / "files")
    shape = read_shape(root / "files")
    dtypes = dict.fromkeys(shape.tensors(), torch.bfloat16)
    skeleton = create.hugging_face(root / "hf", shape, dtypes, root / "files", 1 << 30)
    rng = np.random.default_rng(0)
    for piece in skeleton.pieces:
        target = piece.array.map(writable=True).view(torch.int16)
        target.copy_(torch.from_numpy(rng.integers(-32768, 32767, target.shape, dtype=np.int16)))
    skeleton.finish()
    return root / "hf"


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tools/reshard.py"), *map(str, arguments), "--workers", "2"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def peak(*arguments: object) -> int:
    """Most bytes of one process while the tool runs; it must succeed."""
    process = start(*arguments)
    most = 0
    while process.poll() is None:
        most = max(most, *(held(pid) for pid in family(process.pid)))
        time.sleep(0.01)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    return most


def family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def held(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in fields)


def baseline() -> int:
    """Bytes of an interpreter with the tool's imports."""
    command = [sys.executable, "-c", f"{IMPORTS}; print('imported', flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        size = held(process.pid)
        process.communicate("\n")
    return size


def test_memory_of_a_process_stays_below_three_tensors(model: Path, tmp_path: Path):
    assert sum(file.stat().st_size for file in model.glob("*.safetensors")) > 2e9
    base = baseline()
    found = {
        "hf -> legacy": peak("to-megatron", model, tmp_path / "legacy", *LEGACY),
        "legacy -> hf": peak("to-hf", tmp_path / "legacy", tmp_path / "back"),
        "hf -> dist": peak("to-megatron", model, tmp_path / "dist"),
        "dist -> hf": peak("to-hf", tmp_path / "dist", tmp_path / "half", "--dtype", "fp32"),
        "verify": peak("verify", tmp_path / "legacy", model),
    }
    peak("verify", tmp_path / "back", tmp_path / "dist")
    over = {name: (size - base) / LARGEST for name, size in found.items()}
    print(f"baseline {base / 1e6:.0f} MB; over it, in largest tensors of {LARGEST / 1e6:.0f} MB:", over)
    assert max(over.values()) <= 3


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_it_leaves_nothing_that_loads(model: Path, tmp_path: Path, seed: int):
    target = tmp_path / "killed"
    process = start("to-megatron", model, target, *LEGACY)
    while not target.with_name("killed.partial").exists():
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0, 2))
    workers = list(family(process.pid))[1:]
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in workers):  # they follow it
        assert time.monotonic() < deadline, workers
        time.sleep(0.1)
    assert process.returncode == -signal.SIGKILL
    assert not target.exists()
    for place in (target, target.with_name("killed.partial")):
        refused = start("to-hf", place, tmp_path / "out", "--hf-config", model)
        assert refused.communicate()[1].startswith("reshard: ")
        assert refused.returncode == 2
    assert start("to-megatron", model, target, *LEGACY).wait() == 0
    assert start("verify", model, target).wait() == 0
