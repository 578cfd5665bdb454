"""Checkpoints in three formats: converted there and back, compared, and refused.

Second sources: transformers and safetensors read the Hugging Face side, `torch.load` and torch's own
distributed checkpoints the Megatron side; where a slice lies is written out by hand for one layout.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import convert
from megatron_tree.reshard.formats import CARRIED, open_weights
from tests.tiny_models import make_model

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, dict] = {
    "qwen2_tied": {"family": "qwen2", "tied": True},
    "qwen2_untied": {"family": "qwen2", "tied": False},
    "llama_untied": {"family": "llama", "tied": False},
    "llama3": {"family": "llama", "tied": False, "rope_parameters": LLAMA3},
    "mistral": {"family": "mistral", "tied": False, "head_dim": 16, "sliding_window": None},
    "qwen3": {"family": "qwen3", "tied": True, "head_dim": 48},
}
LAYOUTS: dict[str, tuple[ParallelLayout | None, int]] = {
    "dist": (None, 1),
    "tp2pp2": (ParallelLayout(tp=2, pp=2), 1),
    "tp4_above_kv_heads": (ParallelLayout(tp=4), 128),
    "tp2pp2vpp2": (ParallelLayout(tp=2, pp=2, vpp=2), 1),
    "uneven": (ParallelLayout(pp=3, stage_split=(1, 2, 1)), 64),
}
VOCAB = 125  # no multiple of 2
BRIEF = [("qwen2_tied", layout) for layout in LAYOUTS] + [
    ("qwen2_untied", "tp2pp2vpp2"),
    ("llama3", "uneven"),
]
BRIEF += [
    ("llama_untied", "tp4_above_kv_heads"),
    ("mistral", "tp2pp2"),
    ("qwen3", "tp2pp2"),
    ("bf16", "dist"),
]
PAIRS = [
    pytest.param(name, layout, marks=[] if (name, layout) in BRIEF else pytest.mark.full)
    for name in (*MODELS, "bf16")
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, kind in MODELS.items():
        make_model(root / name, vocab_size=VOCAB, seed=2, **kind)
    make_model(root / "bf16", vocab_size=VOCAB, seed=2, dtype=torch.bfloat16)
    return root


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_there_and_back_is_bit_equal(models: Path, tmp_path: Path, name: str, layout: str):
    source, (ranks, multiple) = models / name, LAYOUTS[layout]
    before = digest(source)
    convert.to_megatron(open_weights(source), tmp_path / "there", ranks, vocab_multiple=multiple)
    convert.to_hf(open_weights(tmp_path / "there"), tmp_path / "back")
    assert digest(source) == before
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == sorted(p.name for p in source.iterdir())
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
    expected, got = load_file(source / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert expected.keys() == got.keys()
    for tensor, value in expected.items():
        assert got[tensor].dtype == value.dtype
        assert torch.equal(got[tensor], value), tensor
    assert convert.verify(open_weights(source), open_weights(tmp_path / "there")) is None


def digest(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_legacy_slices_lie_where_megatron_has_them(models: Path, tmp_path: Path):
    """4 heads of 32 in 2 KV groups, hidden 128, ffn 192, 125 words padded to 128, on tp 2."""
    convert.to_megatron(open_weights(models / "qwen2_untied"), tmp_path / "m", ParallelLayout(tp=2, pp=2))
    hf = load_file(models / "qwen2_untied/model.safetensors")
    step = tmp_path / "m" / "iter_0000001"
    assert (tmp_path / "m" / "latest_checkpointed_iteration.txt").read_text() == "1"
    first = torch.load(step / "mp_rank_01_000/model_optim_rng.pt", weights_only=False)
    last = torch.load(step / "mp_rank_01_001/model_optim_rng.pt", weights_only=False, mmap=True)
    assert vars(first["args"])["num_query_groups"] == 2
    assert (first["checkpoint_version"], first["iteration"]) == (3.0, 1)
    layer = "model.layers.1.self_attn."
    qkv = [
        hf[layer + "q_proj.weight"][64:],
        hf[layer + "k_proj.weight"][32:],
        hf[layer + "v_proj.weight"][32:],
    ]
    assert torch.equal(first["model"]["decoder.layers.1.self_attention.linear_qkv.weight"], torch.cat(qkv))
    bias = [hf[layer + "q_proj.bias"][64:], hf[layer + "k_proj.bias"][32:], hf[layer + "v_proj.bias"][32:]]
    assert torch.equal(first["model"]["decoder.layers.1.self_attention.linear_qkv.bias"], torch.cat(bias))
    rows = torch.cat([hf["model.embed_tokens.weight"][63:], torch.zeros(1, 128)])
    assert torch.equal(first["model"]["embedding.word_embeddings.weight"], rows)
    mlp = "model.layers.3.mlp."  # layer 1 of stage 1
    gate_up = [hf[mlp + "gate_proj.weight"][96:], hf[mlp + "up_proj.weight"][96:]]
    assert torch.equal(last["model"]["decoder.layers.1.mlp.linear_fc1.weight"], torch.cat(gate_up))
    down = hf[mlp + "down_proj.weight"][:, 96:]
    assert torch.equal(last["model"]["decoder.layers.1.mlp.linear_fc2.weight"], down)
    assert torch.equal(last["model"]["output_layer.weight"][:62], hf["lm_head.weight"][63:])
    assert torch.equal(last["model"]["decoder.final_layernorm.weight"], hf["model.norm.weight"])


def test_torch_reads_the_distributed_checkpoint(models: Path, tmp_path: Path):
    convert.to_megatron(open_weights(models / "llama_untied"), tmp_path / "m")
    state = {
        "decoder.layers.mlp.linear_fc1.weight": torch.empty(4, 384, 128),
        "decoder.layers.input_layernorm.weight": torch.empty(4, 128),
        "output_layer.weight": torch.empty(VOCAB, 128),
    }
    torch_dcp.load(state, checkpoint_id=tmp_path / "m", no_dist=True)
    hf = load_file(models / "llama_untied/model.safetensors")
    mlp = [
        torch.cat([hf[f"model.layers.{i}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
        for i in range(4)
    ]
    assert torch.equal(state["decoder.layers.mlp.linear_fc1.weight"], torch.stack(mlp))
    norms = [hf[f"model.layers.{i}.input_layernorm.weight"] for i in range(4)]
    assert torch.equal(state["decoder.layers.input_layernorm.weight"], torch.stack(norms))
    assert torch.equal(state["output_layer.weight"], hf["lm_head.weight"])


def test_shards_have_a_right_index_and_load(models: Path, tmp_path: Path):
    """125 x 128 fp32 embeddings are 64,000 bytes; 100,000 a shard leaves room for one 96 KiB matrix."""
    source = models / "qwen2_untied"
    written = convert.to_hf(open_weights(source), tmp_path / "sharded", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    hf = load_file(source / "model.safetensors")
    assert index["metadata"]["total_size"] == written == sum(t.nbytes for t in hf.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file in files:
        held = load_file(tmp_path / "sharded" / file)
        assert held.keys() == {name for name, where in index["weight_map"].items() if where == file}
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 100_000
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "sharded").state_dict().items():
        assert torch.equal(value, hf[name]), name
    convert.to_megatron(open_weights(tmp_path / "sharded"), tmp_path / "m", ParallelLayout(tp=4))
    assert convert.verify(open_weights(tmp_path / "m"), open_weights(source)) is None


def test_dtype_is_cast_and_declared(models: Path, tmp_path: Path):
    source = models / "qwen3"
    convert.to_megatron(open_weights(source), tmp_path / "m")
    convert.to_hf(open_weights(tmp_path / "m"), tmp_path / "half", dtype=torch.bfloat16)
    hf, half = load_file(source / "model.safetensors"), load_file(tmp_path / "half/model.safetensors")
    assert all(torch.equal(half[name], value.to(torch.bfloat16)) for name, value in hf.items())
    config = json.loads((tmp_path / "half/config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}


def test_processes_share_the_work(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convert, "BATCH_BYTES", 100_000)
    seen: list[tuple[int, int]] = []
    source = open_weights(models / "llama_untied")
    convert.to_megatron(
        source, tmp_path / "m", ParallelLayout(tp=2), workers=2, progress=lambda *step: seen.append(step)
    )
    assert len(seen) > 10
    assert seen[-1][0] == seen[-1][1] > sum(math.prod(s) * 4 for s in source.shape.tensors().values())
    assert convert.verify(open_weights(tmp_path / "m"), source) is None


def test_verify_names_the_first_difference(models: Path, tmp_path: Path):
    source = models / "qwen2_tied"
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = math.nan
    tensors["model.layers.3.mlp.up_proj.weight"][0, 0] = 1.5
    a, b = altered(source, tmp_path / "a", tensors), altered(source, tmp_path / "b", tensors)
    assert convert.verify(a, b) is None  # the same NaN is no difference
    name = "model.layers.2.mlp.up_proj.weight"
    value = load_file(source / "model.safetensors")[name][5, 7].item()
    assert convert.verify(open_weights(source), a) == f"{name}[5, 7]: {value!r} and nan"
    half = {key: t.to(torch.bfloat16) if key == name else t for key, t in tensors.items()}
    c = altered(source, tmp_path / "c", half)
    assert convert.verify(a, c) == f"{name}: torch.float32 in {a.path}, torch.bfloat16 in {c.path}"
    other = open_weights(models / "llama_untied")
    assert convert.verify(open_weights(source), other) == (
        f"model.layers.0.self_attn.q_proj.bias: only in {source}"
    )


def altered(source: Path, target: Path, tensors: dict[str, torch.Tensor], **config: object):
    shutil.copytree(source, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(values))
    return open_weights(target)


def test_a_tied_head_may_be_stored_but_not_differ(models: Path, tmp_path: Path):
    source = models / "qwen2_tied"
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    same = altered(source, tmp_path / "same", tensors)
    assert convert.verify(same, open_weights(source)) is None
    convert.to_megatron(same, tmp_path / "m")
    assert convert.verify(open_weights(tmp_path / "m"), same) is None
    tensors["lm_head.weight"][3, 4] += 1
    other = altered(source, tmp_path / "other", tensors)
    assert (convert.verify(open_weights(source), other) or "").startswith("model.embed_tokens.weight[3, 4]: ")
    with pytest.raises(ValueError, match=r"copies of model.embed_tokens.weight\[3, 4\]"):
        convert.to_megatron(other, tmp_path / "refused")
    assert not list(tmp_path.glob("refused*"))


def test_copies_on_ranks_are_compared_and_padding_is_not(models: Path, tmp_path: Path):
    source = open_weights(models / "qwen2_tied")
    convert.to_megatron(source, tmp_path / "m", ParallelLayout(tp=2, pp=2))
    path = tmp_path / "m/iter_0000001/mp_rank_01_001/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["output_layer.weight"][62:] = 9  # row 125 of the vocabulary, beyond its end
    torch.save(state, path)
    assert convert.verify(source, open_weights(tmp_path / "m")) is None
    state["model"]["decoder.layers.0.input_layernorm.weight"][2] = 9
    torch.save(state, path)
    found = convert.verify(source, open_weights(tmp_path / "m"))
    assert (found or "").startswith("model.layers.2.input_layernorm.weight[2]: ")
    with pytest.raises(ValueError, match="its copies of model"):
        convert.to_hf(open_weights(tmp_path / "m"), tmp_path / "back")


class Setting:
    """A class that a foreign pickle names; a reader that looked it up would run this."""

    def __reduce__(self) -> tuple:
        return pytest.fail, ("the pickle ran code",)


def test_legacy_files_of_megatron_lm(models: Path, tmp_path: Path):
    """Transformer Engine's names of the norms, extra state, an optimizer, and objects of unknown classes."""
    source = open_weights(models / "llama_untied")
    convert.to_megatron(source, tmp_path / "m", ParallelLayout(tp=2), vocab_multiple=128)
    for rank in ("00", "01"):
        path = tmp_path / f"m/iter_0000001/mp_rank_{rank}/model_optim_rng.pt"
        state = torch.load(path, weights_only=False)
        renamed = {}
        for name, value in state["model"].items():
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            renamed[name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = torch.nn.Parameter(
                value
            )
        renamed["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
        state |= {
            "model": renamed,
            "optimizer": {"state": torch.ones(3, dtype=torch.float64)},
            "rng": Setting(),
        }
        torch.save(state, path)
    assert convert.verify(source, open_weights(tmp_path / "m")) is None


def test_header_of_a_foreign_safetensors_file(models: Path, tmp_path: Path):
    shutil.copytree(models / "qwen3", tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(ValueError, match=r"cannot read .*model\.safetensors"):
        open_weights(tmp_path / "hf")
    assert not (tmp_path / "hf" / CARRIED).exists()
