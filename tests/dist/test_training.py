"""Optimizer steps of real ranks: AdamW against torch, non-finite gradients, checkpoints in another layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_tree.algo.batch import PackingSpec, scoring_batch, sft_batch
from megatron_tree.config import OptimizerConfig
from megatron_tree.layout import ParallelLayout
from megatron_tree.train.rank import TrainRank
from megatron_tree.train.step import learning_rate
from tests.dist.harness import Case, export, run
from tests.tiny_models import make_model
from tests.toy_trees import random_tree

# a large eps: with 1e-8 AdamW turns rounding noise of gradients near zero into whole steps
OPTIMIZER = OptimizerConfig(lr=2e-2, warmup_steps=2, weight_decay=0.1, clip_grad=0.5, eps=1e-3)
TP2PP2, TP1PP2 = ParallelLayout(tp=2, pp=2), ParallelLayout(pp=2)
SPEC = PackingSpec(dp=1, micro_batch_tokens=70, pad_to=1, hidden_size=64)
STEPS = 3
SHARDED = {  # where a checkpoint of a distributed optimizer goes on
    "vpp2": ParallelLayout(pp=2, vpp=2),
    "tp2_dp2": ParallelLayout(tp=2, dp=2),
    "tp2": ParallelLayout(tp=2),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("training")
    make_model(root / "model", seed=3)
    batch = sft_batch(_trees(), SPEC)[0]
    scored = scoring_batch(_trees(), SPEC)[0]

    def sharded(name: str, layout: ParallelLayout, then: Callable[..., None]) -> Case:
        spec = replace(SPEC, dp=layout.dp, count_multiple=2)
        return Case(
            name,
            root / "model",
            layout,
            sft_batch(_trees(), spec)[0],
            "sft",
            then=then,
            distributed_optimizer=True,
        )

    run(
        [
            Case("steps", root / "model", TP2PP2, batch, "sft", then=_three_steps),
            Case(
                "poisoned", root / "model", ParallelLayout(dp=2), [*batch, _poison(batch[0])], then=_one_step
            ),
            Case("saved", root / "model", TP2PP2, batch, "sft", then=_save_and_go_on),
            Case("loaded", root / "model", TP1PP2, batch, "sft", then=_load_and_go_on),
            sharded("dopt_saved", ParallelLayout(pp=2, dp=2), _save_and_go_on),
            Case("refused", root / "model", ParallelLayout(), batch, "sft", then=_load_the_other_kind),
            *(sharded(f"dopt_{name}", layout, _load_sharded) for name, layout in SHARDED.items()),
            Case("scored_tp2_pp2", root / "model", TP2PP2, scored, then=_load_and_score),
            Case("scored_tp1_pp4", root / "model", ParallelLayout(pp=4), scored, then=_load_and_score),
            Case("scored_tp1_pp1", root / "model", ParallelLayout(), scored, then=_load_and_score),
        ],
        root,
    )
    return root


def test_three_steps_equal_torch_adamw(root: Path) -> None:
    """Second source: torch.optim.AdamW with the same schedule, clipping and Megatron's rule of weight decay
    (none for norms and biases) on the transformers model."""
    model = make_model(root / "again", seed=3)
    model.get_input_embeddings().padding_idx = None
    flat = [p for p in model.parameters() if p.dim() < 2]
    wide = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": wide, "weight_decay": OPTIMIZER.weight_decay}, {"params": flat, "weight_decay": 0.0}]
    torch_adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), eps=OPTIMIZER.eps)
    for step in range(STEPS):
        for group in torch_adamw.param_groups:
            group["lr"] = learning_rate(OPTIMIZER, step, STEPS)
        model.zero_grad()
        _nll(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        torch_adamw.step()
    got = load_file(root / "steps" / "model.safetensors")
    moved = 0.0
    for name, start in load_file(root / "model" / "model.safetensors").items():
        expected = model.state_dict()[name]
        torch.testing.assert_close(got[name], expected, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        moved = max(moved, float((expected - start).abs().max()))
    assert moved > 1e-2


def test_a_non_finite_gradient_skips_the_step_on_all_ranks(root: Path) -> None:
    """Only dp rank 1 got the NaN; both skip and keep their weights."""
    for rank in (0, 1):
        assert (root / "poisoned" / f"result_{rank}.txt").read_text() == "skipped, unchanged"


def test_a_checkpoint_goes_on_in_another_layout(root: Path) -> None:
    """Saved by TP2 x PP2 after two steps, loaded by TP1 x PP2: the third step ends at the same weights."""
    saved = load_file(root / "saved" / "model.safetensors")
    loaded = load_file(root / "loaded" / "model.safetensors")
    three = load_file(root / "steps" / "model.safetensors")
    for name, expected in three.items():
        torch.testing.assert_close(saved[name], expected, atol=0, rtol=0)
        torch.testing.assert_close(loaded[name], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["saved", *SHARDED])
def test_a_distributed_optimizer_goes_on_in_another_layout(root: Path, layout: str) -> None:
    """Saved by DP2 x PP2 after two steps, with its states split over the dp ranks: the third step ends at the
    weights of the plain optimizer, itself torch's AdamW."""
    expected = load_file(root / "steps" / "model.safetensors")
    got = load_file(root / f"dopt_{layout}" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_a_plain_optimizer_refuses_the_states_of_a_distributed_one(root: Path) -> None:
    refusal = (root / "refused" / "refusal.txt").read_text()
    folder = root / "dopt_saved" / "checkpoint"
    field = "train.parallel.distributed_optimizer"
    assert refusal == f"{field}: the checkpoint {folder} was saved with true, got false"


@pytest.mark.parametrize("layout", ["tp1_pp4", "tp1_pp1"])
def test_a_checkpoint_scores_the_same_in_another_layout(root: Path, layout: str) -> None:
    here = np.load(root / "scored_tp2_pp2" / "logprobs.npy")
    there = np.load(root / f"scored_{layout}" / "logprobs.npy")
    np.testing.assert_allclose(there, here, atol=1e-5)
    assert np.ptp(here) > 1  # not all alike


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OptimizerConfig(lr=1.0), [1, 1, 1, 1]),
        (OptimizerConfig(lr=1.0, warmup_steps=2), [0.5, 1, 1, 1]),
        (OptimizerConfig(lr=1.0, min_lr=0.2, schedule="linear"), [1, 0.8, 0.6, 0.4]),
        (OptimizerConfig(lr=1.0, schedule="cosine"), [1, 0.853553, 0.5, 0.146447]),  # (1 + cos(pi k / 4)) / 2
    ],
)
def test_learning_rates(config: OptimizerConfig, expected: list[float]) -> None:
    rates = [learning_rate(config, step, 4) for step in range(4)]
    np.testing.assert_allclose(rates, expected, atol=1e-6)


def _trees() -> list:
    rng = np.random.default_rng(11)
    return [random_tree(rng, vocab=128, depth=3, branches=0) for _ in range(6)]


def _nll(model: torch.nn.Module) -> torch.Tensor:
    parts = []
    for tree in _trees():
        ids = np.concatenate([np.concatenate([n.action_ids, n.observation_ids]) for n in tree.nodes])
        logprobs = model(torch.tensor(ids, dtype=torch.long)[None]).logits[0].log_softmax(-1)
        start = 0
        for node in tree.nodes:
            rows = torch.arange(start - 1, start - 1 + len(node.action_ids))
            parts.append(logprobs[rows, torch.tensor(node.action_ids, dtype=torch.long)])
            start += node.num_tokens
    return -torch.cat(parts).mean()


def _poison(batches: list) -> list:
    return [replace(batch, adv_pos=batch.adv_pos * np.nan) for batch in batches]


def _three_steps(trainer: TrainRank, case: Case, out: Path) -> None:
    trainer.begin(OPTIMIZER, STEPS)
    for _ in range(STEPS):
        trainer.train(case.share(trainer.rank), "sft")
    export(trainer, out)


def _save_and_go_on(trainer: TrainRank, case: Case, out: Path) -> None:
    trainer.begin(OPTIMIZER, STEPS)
    for _ in range(STEPS - 1):
        trainer.train(case.share(trainer.rank), "sft")
    trainer.save(str(out / "checkpoint"))
    trainer.train(
        case.share(trainer.rank), "sft"
    )  # while it is written: the checkpoint holds two steps all the same
    assert trainer.saved(blocking=True)
    export(trainer, out)


def _load_and_go_on(trainer: TrainRank, case: Case, out: Path, saved: str = "saved") -> None:
    trainer.begin(OPTIMIZER, STEPS)
    trainer.load(str(out.parent / saved / "checkpoint"))
    trainer.train(case.share(trainer.rank), "sft")
    export(trainer, out)


def _load_sharded(trainer: TrainRank, case: Case, out: Path) -> None:
    _load_and_go_on(trainer, case, out, saved="dopt_saved")


def _load_the_other_kind(trainer: TrainRank, case: Case, out: Path) -> None:
    trainer.begin(OPTIMIZER, STEPS)
    with pytest.raises(ValueError, match="distributed_optimizer") as refusal:
        trainer.load(str(out.parent / "dopt_saved" / "checkpoint"))
    (out / "refusal.txt").write_text(str(refusal.value))


def _load_and_score(trainer: TrainRank, case: Case, out: Path) -> None:
    trainer.begin(OPTIMIZER, STEPS)
    trainer.load(str(out.parent / "saved" / "checkpoint"))
    logprobs = trainer.score(case.batch[0], "actor")
    if logprobs is not None:
        np.save(out / "logprobs.npy", np.concatenate(logprobs))


def _one_step(trainer: TrainRank, case: Case, out: Path) -> None:
    trainer.begin(OPTIMIZER, STEPS)
    before = [p.detach().clone() for p in trainer.actor[0].parameters()]
    result = trainer.train(case.batch[trainer.rank], "policy")
    same = all(torch.equal(a, b) for a, b in zip(before, trainer.actor[0].parameters(), strict=True))
    text = f"{'skipped' if result.skipped else 'stepped'}, {'unchanged' if same else 'changed'}"
    (out / f"result_{trainer.rank}.txt").write_text(text)
