"""Converted checkpoints in real Megatron ranks, against two second sources.

- What `dist_checkpointing` loads of a converted checkpoint equals what the ranks loaded of the Hugging Face
  folder, bit by bit, and gives transformers' log-probs.
- What a run's ranks save, optimizer and all, has the keys, shapes and chunk places that a converted
  checkpoint has, and converts back; a legacy file holds the state dict of its rank.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_tree.algo.batch import scoring_batch
from megatron_tree.config import OptimizerConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import convert, formats
from megatron_tree.reshard.formats import open_weights
from megatron_tree.train.rank import TrainRank
from tests.dist.harness import Case, run
from tests.dist.reference import path_logprobs
from tests.dist.test_gradients import MODELS, VOCAB, spec_of
from tests.tiny_models import make_model
from tests.toy_trees import random_group

LAYOUTS = {"tp2pp2": ParallelLayout(tp=2, pp=2), "tp1pp1": ParallelLayout()}
NAMES = ("qwen2_tied", "llama_untied", "qwen3")
SAVED = ("qwen2_tied-tp2pp2", "llama_untied-tp1pp1")


def load_and_save(trainer: TrainRank, case: Case, out: Path) -> None:
    """On each rank: empties the model, loads the converted checkpoint, scores, compares, saves."""
    from megatron.core import dist_checkpointing

    expected = {name: param.detach().clone() for name, param in trainer.actor[0].named_parameters()}
    _same(expected, _legacy_state(trainer, case))
    for param in trainer.actor[0].parameters():
        param.data.fill_(7)
    wanted = {"model": trainer.actor[0].sharded_state_dict(metadata={})}
    loaded = dist_checkpointing.load(wanted, f"{case.model}_dist")
    trainer.actor[0].load_state_dict(loaded["model"])
    _same(expected, dict(trainer.actor[0].named_parameters()))
    if (scored := trainer.score(case.batch[0], "actor")) is not None:
        for index, values in enumerate(scored):
            np.save(out / f"logprobs_{index}.npy", values)
    if case.name not in SAVED:
        return
    trainer.begin(OptimizerConfig(), total_steps=1)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    trainer.optimizer.step()  # it has states now
    trainer.save(str(out / "saved"))
    assert trainer.saved(blocking=True)


def _legacy_state(trainer: TrainRank, case: Case) -> dict[str, torch.Tensor]:
    folder = formats.rank_folder(case.layout, trainer.rank)
    path = Path(f"{case.model}_{case.name.split('-')[1]}") / "iter_0000001" / folder / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    assert state["checkpoint_version"] == 3.0
    assert state["args"].tensor_model_parallel_size == case.layout.tp
    return state["model"]


def _same(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One launch."""
    root = tmp_path_factory.mktemp("convert")
    rng = np.random.default_rng(11)
    found: dict = {"root": root, "models": {}}
    cases = []
    for name in NAMES:
        found["models"][name] = make_model(root / name, vocab_size=VOCAB, seed=5, **MODELS[name])
        source = open_weights(root / name)
        convert.to_megatron(source, root / f"{name}_dist")
        trees = random_group(rng, vocab=VOCAB, depth=4, branches=3).trees
        for key, layout in LAYOUTS.items():
            convert.to_megatron(source, root / f"{name}_{key}", layout)
            batch, found[f"{name}-{key}"] = scoring_batch(trees, spec_of(layout))
            found[f"{name}-trees"] = {
                id(tree.nodes[i]): (tree, i) for tree in trees for i in range(len(tree.nodes))
            }
            cases.append(Case(f"{name}-{key}", root / name, layout, batch, None, then=load_and_save))
    run(cases, root)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_transformers(results: dict, name: str, layout: str) -> None:
    case, compared = f"{name}-{layout}", 0
    for index, nodes in enumerate(results[case][0]):
        got = np.load(results["root"] / case / f"logprobs_{index}.npy")
        for span in nodes:
            tree, node = results[f"{name}-trees"][id(span.node)]
            expected = path_logprobs(results["models"][name], tree, node, temperature=1.0)
            np.testing.assert_allclose(got[span.start : span.stop], expected, atol=1e-4)
            compared += span.stop - span.start
    assert compared > 20


@pytest.mark.parametrize("case", SAVED)
def test_what_ranks_save_converts_back(results: dict, case: str, tmp_path: Path) -> None:
    root, name = results["root"], case.split("-")[0]
    saved = open_weights(root / case / "saved", config=root / name)
    assert convert.verify(saved, open_weights(root / name)) is None
    convert.to_hf(saved, tmp_path / "back")
    assert convert.verify(open_weights(tmp_path / "back"), open_weights(root / name)) is None


@pytest.mark.parametrize("case", SAVED)
def test_a_converted_checkpoint_is_as_ranks_save_it(results: dict, case: str) -> None:
    root, name = results["root"], case.split("-")[0]
    ours = formats.read_metadata(root / f"{name}_dist").state_dict_metadata
    saved = formats.read_metadata(root / case / "saved").state_dict_metadata
    # Megatron-Core 0.19 keeps among the tensors what lies in common.pt before; it reads either
    theirs = {k: entry for k, entry in saved.items() if not k.startswith(("optimizer.", "common_state/"))}
    assert len(saved) > len(theirs)
    # Megatron-LM's own loader asks for the extra states of layers; our ranks, whatever their layers, do not
    assert {key for key in ours if "._extra_state/" not in key} == theirs.keys()
    for key, entry in theirs.items():
        if hasattr(entry, "size"):
            if not case.endswith("tp1pp1"):
                continue  # chunks are the ranks', and the vocabulary is padded
            assert ours[key].size == entry.size, key
            assert ours[key].properties.dtype == entry.properties.dtype
            places = [
                sorted((tuple(c.offsets), tuple(c.sizes)) for c in e.chunks) for e in (ours[key], entry)
            ]
            assert places[0] == places[1], key
