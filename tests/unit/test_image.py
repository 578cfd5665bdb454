"""Images are safetensors files; model folders are read slice by slice, and refused by name when they do not
fit."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_tree.reshard import digest, image
from megatron_tree.reshard.plan import SliceCopy
from tests.unit.shapes import small_shape

SHAPE = small_shape(family="qwen2", tied=False)


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=draw).to(dtype) for name, size in SHAPE.tensors().items()}


def save_shards(folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """Two shards with an index, as transformers saves large models."""
    names = sorted(weights)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in names if where[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_reads_an_image(tmp_path: Path, dtype: torch.dtype):
    path, expected = tmp_path / "image.safetensors", tensors(dtype)
    image.create(path, SHAPE, dtype)
    with safe_open(path, framework="pt") as empty:
        assert {name: tuple(empty.get_slice(name).get_shape()) for name in empty.keys()} == SHAPE.tensors()  # noqa: SIM118
    for name, target in image.writable(path).items():
        target.copy_(expected[name])
    got = load_file(path)
    assert got.keys() == expected.keys()
    assert all(got[name].dtype is dtype and torch.equal(got[name], expected[name]) for name in expected)


def test_an_image_is_reserved_in_full_and_aligned(tmp_path: Path):
    """A file with holes would be a SIGBUS in a writer once /dev/shm is full."""
    image.create(tmp_path / "image", SHAPE, torch.float32)
    data = 4 * sum(torch.Size(size).numel() for size in SHAPE.tensors().values())
    raw = (tmp_path / "image").read_bytes()
    header = int.from_bytes(raw[:8], "little")
    assert len(raw) == 8 + header + data
    assert header % 8 == 0
    assert (tmp_path / "image").stat().st_blocks * 512 >= len(raw)


def test_two_writers_see_one_file(tmp_path: Path):
    """Owners map the image on their own; slices of one tensor meet in it."""
    path, name = tmp_path / "image", "model.embed_tokens.weight"
    image.create(path, SHAPE, torch.float32)
    for rank in range(2):
        half = SliceCopy(name, (5 * rank, 0), "embedding", (0, 0), (5, 3))
        digest.write_slices(image.writable(path), {"embedding": torch.full((5, 3), 1.0 + rank)}, [half])
    assert load_file(path)[name].tolist() == [[1.0] * 3] * 5 + [[2.0] * 3] * 5


def test_maps_keep_a_file_and_notice_a_new_one(tmp_path: Path):
    """What a rank writes again lies in the same pages; a slot made anew under its name is another file."""
    path, name, maps = tmp_path / "image", "model.norm.weight", image.Maps(writable=True)
    image.create(path, SHAPE, torch.float32)
    first = maps.tensors(path)[name]
    assert maps.tensors(path)[name].data_ptr() == first.data_ptr()
    first.fill_(1.0)
    path.unlink()
    image.create(path, SHAPE, torch.bfloat16)
    maps.tensors(path)[name].fill_(2.0)
    got = load_file(path)[name]
    assert (got.dtype, got.unique().tolist()) == (torch.bfloat16, [2.0])
    assert first.unique().tolist() == [1.0]


def test_a_kept_map_sees_what_others_write(tmp_path: Path):
    """An engine's map of a slot outlives versions, also one whose header another file of that size has."""
    path, name, maps = tmp_path / "image", "model.norm.weight", image.Maps(writable=False)
    image.create(path, SHAPE, torch.float32)
    before = maps.tensors(path)
    assert before[name].unique().tolist() == [0.0]
    image.writable(path)[name].fill_(3.0)
    assert maps.tensors(path)[name].unique().tolist() == [3.0]
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"model.norm.weight", b"model.norm.WEIGHT"))
    assert before.keys() - maps.tensors(path).keys() == {name}


def test_a_file_that_cannot_grow_is_an_error(tmp_path: Path):
    """In a process of its own whose files end at 4 KiB: no signal, no silent short file."""
    code = (
        "import sys, torch; from pathlib import Path; from megatron_tree.reshard import image;"
        "from tests.unit.shapes import small_shape;"
        "image.create(Path(sys.argv[1]), small_shape(vocab=4096), torch.float32)"
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "image")],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "OSError: [Errno 27] File too large" in done.stderr


@pytest.mark.parametrize("sharded", [False, True])
def test_folders_with_one_file_and_with_shards(tmp_path: Path, sharded: bool):
    weights = tensors()
    if sharded:
        save_shards(tmp_path, weights)
    else:
        save_file(weights, tmp_path / "model.safetensors")
    folder = image.Folder(tmp_path)
    folder.check(SHAPE)
    name = "model.layers.1.self_attn.q_proj.weight"
    own = {"mine": torch.zeros(4, 3)}
    image.load_slices(folder, own, [SliceCopy(name, (2, 0), "mine", (1, 0), (3, 3))])
    assert torch.equal(own["mine"], torch.cat([torch.zeros(1, 3), weights[name][2:5]]))


def test_loading_converts_to_the_parameters_dtype(tmp_path: Path):
    save_file(tensors(torch.bfloat16), tmp_path / "model.safetensors")
    own = {"norm": torch.zeros(3)}
    image.load_slices(image.Folder(tmp_path), own, [SliceCopy("model.norm.weight", (0,), "norm", (0,), (3,))])
    assert torch.equal(own["norm"], tensors(torch.bfloat16)["model.norm.weight"].float())


BIAS = "model.layers.1.self_attn.k_proj.bias"
WRONG_TENSORS = {
    "lacks the tensor model.layers.1.self_attn.k_proj.bias, 26 are there": {BIAS: None},
    f"{BIAS} must have shape (4,), got (5,)": {BIAS: torch.zeros(5)},
    f"{BIAS} must have shape (4,), got (4, 1)": {BIAS: torch.zeros(4, 1)},
    f"{BIAS} must be one of F32, BF16, F16, got I8": {BIAS: torch.zeros(4, dtype=torch.int8)},
}


@pytest.mark.parametrize(("message", "change"), WRONG_TENSORS.items())
def test_refused_tensors(tmp_path: Path, message: str, change: dict[str, torch.Tensor | None]):
    weights = {name: tensor for name, tensor in (tensors() | change).items() if tensor is not None}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"^model\.path") as refusal:
        image.Folder(tmp_path).check(SHAPE)
    assert str(refusal.value).startswith(f"model.path: {tmp_path}")
    assert str(refusal.value).endswith(message)


def test_tensors_beyond_the_model_are_left_alone(tmp_path: Path):
    """transformers writes `lm_head.weight` of some tied models too."""
    save_file(tensors() | {"extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    image.Folder(tmp_path).check(SHAPE)


def test_refused_folders(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json$"
    ):
        image.Folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"^model\.path: cannot read .*model\.safetensors: "):
        image.Folder(tmp_path)


def test_refused_shards(tmp_path: Path):
    where = save_shards(tmp_path, tensors())
    index = tmp_path / "model.safetensors.index.json"
    gone, other = sorted(set(where.values()))
    (tmp_path / gone).unlink()
    with pytest.raises(ValueError, match=rf"^model\.path: cannot read .*{gone}: "):
        image.Folder(tmp_path).check(SHAPE)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(where, other)}))
    with pytest.raises(ValueError, match=rf"^model\.path: .*{other} lacks the tensor .* of its index: "):
        image.Folder(tmp_path).check(SHAPE)
    for text in ("{", "{}", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index\.json is no index of safetensors files: "):
            image.Folder(tmp_path)


def test_files_beside_the_weights_are_carried(tmp_path: Path):
    source, target = tmp_path / "a", tmp_path / "b"
    for folder in (source, target):
        folder.mkdir()
    kept = {"config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "spiece.model"}
    for name in {*kept, "model.safetensors", "model.safetensors.index.json", "run.py"}:
        (source / name).write_text(name)
    image.carry_files(source, target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {name: name for name in kept}
