"""A conversion that cannot be done: one line, exit code 2, source and destination untouched."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import convert
from megatron_tree.reshard.formats import open_weights
from megatron_tree.rollout.tokens import Tokens
from tests.tiny_models import make_model, make_tokenizer
from tools import reshard


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    make_model(root / "hf", vocab_size=125, tied=False, num_layers=2)
    source = open_weights(root / "hf")
    convert.to_hf(source, root / "sharded", max_shard_bytes=100_000)
    convert.to_megatron(source, root / "dist")
    convert.to_megatron(source, root / "legacy", ParallelLayout(tp=2, pp=2))
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    for folder in made.iterdir():
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path


@pytest.fixture
def tool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["reshard", *map(str, arguments), "--workers", "1"])
        with pytest.raises(SystemExit) as stopped:
            reshard.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return call


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def resave(path: Path, change: Callable[[dict], object]) -> None:
    state = torch.load(path, weights_only=False)
    change(state["model"])
    torch.save(state, path)


def reconfigure(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


WEIGHTS, RANK = "model.safetensors", "iter_0000001/mp_rank_01_001/model_optim_rng.pt"
FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated safetensors": ("hf", lambda f: cut(f / WEIGHTS), "cannot read .*model.safetensors"),
    "foreign safetensors": ("hf", lambda f: (f / WEIGHTS).write_text("hello"), "cannot read"),
    "no weights": ("hf", lambda f: (f / WEIGHTS).unlink(), "no checkpoint known"),
    "no config": ("hf", lambda f: (f / "config.json").unlink(), "carries no config.json"),
    "missing shard": (
        "sharded",
        lambda f: next(f.glob("*-00003-of-*")).unlink(),
        "cannot read .*-00003-of-.*No such file",
    ),
    "foreign index": ("sharded", lambda f: (f / f"{WEIGHTS}.index.json").write_text("[]"), "is no index"),
    "missing tensor": (
        "hf",
        lambda f: rewrite(f / WEIGHTS, lambda t: t.pop("model.norm.weight")),
        "lacks the tensor model.norm.weight",
    ),
    "unknown tensor": (
        "hf",
        lambda f: rewrite(f / WEIGHTS, lambda t: t.update(extra=torch.ones(2))),
        "has the tensor extra",
    ),
    "shape": (
        "hf",
        lambda f: rewrite(f / WEIGHTS, lambda t: t.update({"model.norm.weight": torch.ones(3)})),
        r"model.norm.weight must have shape \(128,\), got \(3,\)",
    ),
    "dtype": (
        "hf",
        lambda f: rewrite(f / WEIGHTS, lambda t: t.update({"model.norm.weight": torch.ones(128).double()})),
        "model.norm.weight must be one of F32, BF16, F16, got F64",
    ),
    "other family": (
        "hf",
        lambda f: reconfigure(f / "config.json", model_type="gpt2"),
        "model_type must be one",
    ),
    "truncated distcp": ("dist", lambda f: cut(f / "__0_0.distcp"), "is missing or truncated"),
    "missing distcp": ("dist", lambda f: (f / "__0_0.distcp").unlink(), "is missing or truncated"),
    "foreign metadata": (
        "dist",
        lambda f: (f / ".metadata").write_bytes(b"hello"),
        "cannot read .*.metadata",
    ),
    "truncated rank": ("legacy", lambda f: cut(f / RANK), "cannot read .*no whole file of torch.save"),
    "missing rank": (
        "legacy",
        lambda f: shutil.rmtree((f / RANK).parent),
        "is missing, the other files are of tp 2",
    ),
    "rank's shape": (
        "legacy",
        lambda f: resave(f / RANK, lambda m: m.update({"decoder.final_layernorm.weight": torch.ones(3)})),
        r"final_layernorm.weight must have shape \(128,\), got \(3,\)",
    ),
    "rank's dtype": (
        "legacy",
        lambda f: resave(
            f / RANK, lambda m: m.update({"output_layer.weight": m["output_layer.weight"].to(torch.bfloat16)})
        ),
        "lm_head.weight is stored as torch.float32 and as torch.bfloat16",
    ),
    "tracker": (
        "legacy",
        lambda f: (f / "latest_checkpointed_iteration.txt").write_text("soon"),
        "must hold a number or release, got 'soon'",
    ),
    "other vocabulary": (
        "dist",
        lambda f: reconfigure(f / "huggingface/config.json", vocab_size=100),
        "holds 125 vocabulary rows over tp 1, the config's vocab_size is 100",
    ),
    "other tokenizer": (
        "dist",
        lambda f: make_tokenizer(130).save_pretrained(f / "huggingface"),
        "has token ids up to 129, the model's vocabulary is 125",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_is_one_line(here: Path, tool: Callable, fault: str):
    kind, damage, message = FAULTS[fault]
    damage(here / kind)
    before = snapshot(here)
    code, out, err = tool("to-hf", here / kind, here / "target")
    assert (code, out) == (2, "")
    assert err.startswith("reshard: ")
    assert err.count("\n") == 1
    assert re.search(message, err), err
    assert snapshot(here) == before
    assert not list(here.glob("target*"))


def test_layouts_that_do_not_divide(here: Path, tool: Callable):
    for options, message in (
        (("--tp", 3), "tp: must divide the model's 4 heads, got 3"),
        (("--pp", 4), "pp: must divide the model's 2 layers, got 4"),
        (("--vpp", 2), "vpp: must be 1 where pp is 1, got 2"),
        (("--pp", 2, "--stage-split", "1,x"), "--stage-split: must be numbers with commas, got 1,x"),
        (("--pp", 0), "--pp: must be at least 1, got 0"),
    ):
        code, _, err = tool("to-megatron", here / "hf", here / "target", "--format", "legacy", *options)
        assert (code, err) == (2, f"reshard: {message}\n")
        assert not list(here.glob("target*"))


def test_the_destination_is_never_overwritten(here: Path, tool: Callable):
    before = snapshot(here)
    for target in ("legacy", "hf"):
        code, _, err = tool("to-hf", here / "dist", here / target)
        assert (code, err) == (2, f"reshard: {here / target}: exists and is not overwritten\n")
    code, _, err = tool("to-hf", here / "dist", here / "nowhere" / "target")
    assert (code, err) == (2, f"reshard: {here / 'nowhere'}: must be a folder, target is to be made in it\n")
    assert snapshot(here) == before


def test_verify_says_equal_or_differ(here: Path, tool: Callable):
    assert tool("verify", here / "legacy", here / "dist") == (0, "equal: 27 tensors\n", "")
    shutil.rmtree(here / "dist/huggingface")  # the other's config describes both
    assert tool("verify", here / "sharded", here / "dist")[:2] == (0, "equal: 27 tensors\n")
    rewrite(here / "hf" / WEIGHTS, lambda t: t["model.norm.weight"].add_(1))
    code, out, _ = tool("verify", here / "hf", here / "dist")
    assert code == 1
    assert out.startswith("differ: model.norm.weight[0]: ")


def test_a_checkpoint_without_a_config_needs_one(here: Path, tool: Callable):
    shutil.rmtree(here / "legacy/huggingface")
    assert tool("to-hf", here / "legacy", here / "target")[0] == 2
    assert tool("to-hf", here / "legacy", here / "target", "--hf-config", here / "hf")[0] == 0
    assert convert.verify(open_weights(here / "target"), open_weights(here / "hf")) is None


def test_a_runs_checkpoint_asks_for_its_tokenizer(here: Path, tool: Callable):
    folder = here / "checkpoints/iteration-3"
    shutil.copytree(here / "dist", folder / "megatron")
    shutil.rmtree(folder / "megatron/huggingface")
    own = Tokens(here / "hf").fingerprint
    (folder / "state.json").write_text(json.dumps({"tokenizer": own}))
    assert tool("to-hf", folder, here / "export", "--hf-config", here / "hf")[0] == 0
    assert convert.verify(open_weights(here / "export"), open_weights(here / "hf")) is None
    make_tokenizer(120).save_pretrained(here / "hf")
    code, _, err = tool("to-hf", folder / "megatron", here / "other", "--hf-config", here / "hf")
    assert code == 2
    assert f"its tokenizer must be the run's ({own}), got another" in err


@pytest.fixture
def full_disk(here: Path) -> Iterator[Path]:
    """No file may grow beyond 200,000 bytes: that is a full disk, as far as a writer sees."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    yield here
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("to", [("to-hf",), ("to-megatron",), ("to-megatron", "--format", "legacy")])
def test_no_space(full_disk: Path, tool: Callable, to: tuple[str, ...]):
    code, _, err = tool(to[0], full_disk / "sharded", full_disk / "target", *to[1:])
    assert code == 2
    assert "no room for" in err
    assert err.count("\n") == 1
    assert not list(full_disk.glob("target*"))


def test_no_permission(made: Path, tool: Callable):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        root = Path(folder)
        shutil.copytree(made / "hf", root / "hf")
        for path in (*(root / "hf").iterdir(), root / "hf", root):
            path.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            code, _, err = tool("to-megatron", root / "hf", root / "target")
        finally:
            os.seteuid(user)
            for path in (root, root / "hf"):
                path.chmod(0o755)
        assert (code, err) == (2, f"reshard: {root / 'target.partial'}: Permission denied\n")


def killed_half_way(source: Path, target: Path, layout: ParallelLayout | None) -> None:
    convert.BATCH_BYTES = 100_000
    steps = 0

    def progress(_done: int, _total: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    weights = open_weights(source)
    if target.name == "hf2":
        convert.to_hf(weights, target, progress=progress)
    else:
        convert.to_megatron(weights, target, layout, progress=progress)


def test_a_killed_run_leaves_nothing_that_loads(here: Path):
    """And the next run replaces what it left. One process dies in each direction."""
    context = multiprocessing.get_context("fork")
    layouts = {"hf2": None, "dist2": None, "legacy2": ParallelLayout(tp=2)}
    victims = [
        context.Process(target=killed_half_way, args=(here / "hf", here / name, layout))
        for name, layout in layouts.items()
    ]
    for victim in victims:
        victim.start()
    for victim in victims:
        victim.join(120)
        assert victim.exitcode == -signal.SIGKILL
    source = open_weights(here / "hf")
    for name, layout in layouts.items():
        left = here / f"{name}.partial"
        assert left.is_dir()
        assert not (here / name).exists()
        assert not any((left / file).exists() for file in ("config.json", ".metadata", "common.pt"))
        assert not list(left.rglob("latest_checkpointed_iteration.txt"))
        with pytest.raises(ValueError, match="unfinished conversion"):
            open_weights(left, here / "hf")
        if name == "hf2":
            convert.to_hf(source, here / name)
        else:
            convert.to_megatron(source, here / name, layout)
        assert not left.exists()
        assert convert.verify(source, open_weights(here / name)) is None


def test_a_living_runs_partial_is_left_alone(here: Path, tool: Callable):
    partial = here / "target.partial"
    partial.mkdir()
    handle = os.open(partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    code, _, err = tool("to-hf", here / "dist", here / "target")
    os.close(handle)
    assert (code, err) == (2, f"reshard: {partial}: is being written by another process\n")
    assert partial.is_dir()
