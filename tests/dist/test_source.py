"""What trainer ranks send to engines, on real gloo ranks: 4 layers, a vocabulary of 101 that tensor
parallelism pads, biases or an untied head. The second source is transformers' own state dict; the groups and
the check of every name against them are vLLM's (`WeightSource.iter_groups`).

About 25 s: one launch for all layouts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard import plan, source
from megatron_tree.train.rank import TrainRank, by_chunk
from tests.dist.harness import Case, run
from tests.tiny_models import make_model
from tests.unit.shapes import small_shape

BUCKET_BYTES = 100_000
LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "pp2vpp2": ParallelLayout(pp=2, vpp=2),
    "tp4": ParallelLayout(tp=4),  # more than the two KV heads
    "tp2dp2": ParallelLayout(tp=2, dp=2),
    "pp2cp2": ParallelLayout(pp=2, cp=2),
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2", "tied": True},
    "llama": {"family": "llama", "tied": False},
}
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS if model == "qwen2" or layout != "tp2dp2"]
DTYPES = {"qwen2": torch.float32, "llama": torch.bfloat16}


def send(trainer: TrainRank, case: Case, out: Path) -> None:
    """Iterates as a sender would, once: what was yielded, what it said before, and the most bytes it held."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    dtype = DTYPES[case.model.name]
    sender = source.SliceSource(
        trainer.shape, case.layout, trainer.rank, dtype, group, bucket_bytes=BUCKET_BYTES
    )
    sender.keep(1, by_chunk(trainer.actor, plan.owned(trainer.shape, case.layout, trainer.rank)))
    for chunk in trainer.actor:  # what is sent is what was kept
        for parameter in chunk.parameters():
            parameter.detach().zero_()
    yielded, relayed = [], []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        for name, tensor in sender:
            yielded.append((name, tensor.view(torch.uint8).numpy().copy(), tensor.shape))
            del tensor
    live = counted(sender)
    for flat in sender.relayed():
        relayed.append(flat.view(torch.uint8).numpy().copy())
        del flat
    told = {
        "metadata": [(meta.name, meta.dtype, meta.shape) for meta in sender.metadata()],
        "held": sender.held_names(),
        "yielded": [(n, torch.from_numpy(raw).view(dtype).view(shape)) for n, raw, shape in yielded],
        "peak_bytes": peak_bytes(run),
        "relayed": relayed,
        "relayed_peak_bytes": max(live),
    }
    torch.save(told, out / f"told_{trainer.rank}.pt")


def peak_bytes(run: torch.profiler.profile) -> int:
    """The most that torch had allocated at a time, over what it had at the start."""
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def counted(sender: source.SliceSource) -> list[int]:
    """Bytes that it has at a time, after each allocation. A tensor that gloo sent is let go by a thread of
    gloo, which the profile does not see, and a moment later: it is waited for."""
    made: list[tuple[StorageWeakRef, int]] = []
    live: list[int] = []
    allocate, peers = sender._empty, len(sender._peers)
    largest = max(meta.num_elements * meta.dtype.itemsize for meta in sender.metadata())
    allowed = (1 + (peers > 1)) * (BUCKET_BYTES + largest)

    def empty(num_elements: int) -> torch.Tensor:
        flat = allocate(num_elements)
        made.append((StorageWeakRef(flat.untyped_storage()), flat.nbytes))
        deadline = time.monotonic() + 5
        while (held := sum(size for ref, size in made if not ref.expired())) > allowed:
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        live.append(held)
        return flat

    sender._empty = empty  # type: ignore[method-assign]
    return live


class Told:
    """What a rank said; the ranks import this file, and vLLM takes long."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told

    def metadata(self) -> list[source.ParamMeta]:
        return [source.ParamMeta(*meta) for meta in self.told["metadata"]]

    def held_names(self) -> list[str]:
        return self.told["held"]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.told["yielded"])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from vllm.distributed.weight_transfer.base import WeightSource

    class Checked(Told, WeightSource):
        """With vLLM's own `groups` and `iter_groups` on top."""

    root = tmp_path_factory.mktemp("source")
    found: dict[str, Any] = {
        name: make_model(root / name, vocab_size=101, seed=3, **options) for name, options in MODELS.items()
    }
    cases = [
        Case(f"{model}-{key}", root / model, LAYOUTS[key], [[] for _ in range(LAYOUTS[key].dp)], then=send)
        for model, key in CASES
    ]
    run(cases, root)
    for case in cases:
        paths = [root / case.name / f"told_{rank}.pt" for rank in case.layout.ranks()]
        found[case.name] = [Checked(torch.load(path, weights_only=False)) for path in paths]
    return found


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_metadata_is_the_whole_model_in_layer_order_on_every_rank(
    results: dict[str, Any], model: str, layout: str
) -> None:
    told = results[f"{model}-{layout}"]
    state = results[model].state_dict()
    names = [meta.name for meta in told[0].metadata()]
    assert set(names) == set(state) - ({"lm_head.weight"} if model == "qwen2" else set())
    blocks = [name.split(".")[2] if ".layers." in name else name for name in names]
    head = ["lm_head.weight"] if model == "llama" else []
    whole = ["model.embed_tokens.weight", "0", "1", "2", "3", "model.norm.weight", *head]
    assert [block for block, _ in groupby(blocks)] == whole  # each layer in one piece
    for rank in told:
        assert rank.metadata() == told[0].metadata()
    for meta in told[0].metadata():
        assert (meta.dtype, meta.shape) == (DTYPES[model], tuple(state[meta.name].shape))


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_tensor_is_held_by_exactly_one_rank_and_yielded_in_metadata_order(
    results: dict[str, Any], model: str, layout: str
) -> None:
    told = results[f"{model}-{layout}"]
    held = [name for rank in told for name in rank.held_names()]
    order = [meta.name for meta in told[0].metadata()]
    assert sorted(held) == sorted(order)
    assert sum(bool(rank.held_names()) for rank in told) == LAYOUTS[layout].pp
    for rank in told:
        of_groups = [name for names, _ in rank.iter_groups() for name in names]  # raises out of order
        assert of_groups == rank.held_names() == [name for name, _ in rank]
        assert of_groups == [name for name in order if name in set(of_groups)]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_what_is_yielded_is_the_hugging_face_tensor(results: dict[str, Any], model: str, layout: str) -> None:
    state = results[model].state_dict()
    for rank in results[f"{model}-{layout}"]:
        for name, tensor in rank:
            assert torch.equal(tensor, state[name].to(DTYPES[model])), name


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_rank_has_bounded_memory(results: dict[str, Any], model: str, layout: str) -> None:
    """A bucket is at most BUCKET_BYTES and the tensor that closes it; a peer's part of one is no more."""
    told, tp = results[f"{model}-{layout}"], LAYOUTS[layout].tp
    size = DTYPES[model].itemsize
    largest = max(tensor.numel() for rank in told for _, tensor in rank) * size
    bucket, whole = BUCKET_BYTES + largest, sum(t.numel() for rank in told for _, t in rank) * size
    for rank in told:
        peak = rank.told["peak_bytes"]
        if rank.held_names():
            assert largest <= peak <= 2 * bucket + (bucket if tp > 1 else 0) < whole
        elif peak:
            assert peak <= bucket
        assert largest <= rank.told["relayed_peak_bytes"] <= bucket + (bucket if tp > 1 else 0)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_rank_gets_what_is_relayed(results: dict[str, Any], model: str, layout: str) -> None:
    """Buckets begin anew where another stage's tensors do: a receiver is told of them segment by segment."""
    state, told = results[model].state_dict(), results[f"{model}-{layout}"]
    tensors = {meta.name: state[meta.name].to(DTYPES[model]) for meta in told[0].metadata()}
    whole = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    ends = set(accumulate(tensor.nbytes for tensor in tensors.values()))
    for rank in told:
        relayed = rank.told["relayed"]
        assert b"".join(bucket.tobytes() for bucket in relayed) == whole
        assert set(accumulate(len(bucket) for bucket in relayed)) <= ends


def test_the_senders_segments() -> None:
    """Two stages of two chunks each take turns: layers 0 | 1 | 2 | 3 of 4."""

    def layers(names: tuple[str, ...]) -> list[str]:
        return sorted({name.split(".")[2] for name in names if ".layers." in name})

    found = source.segments(small_shape(num_layers=4), ParallelLayout(pp=2, vpp=2))
    assert [(s.stage, layers(s.names)) for s in found] == [(0, ["0"]), (1, ["1"]), (0, ["2"]), (1, ["3"])]
    assert found[0].names[0] == "model.embed_tokens.weight"
    assert found[3].names[-1] == "model.norm.weight"
