"""Settings that give wrong gradients in silence: each is set on purpose, and the comparison of
test_layout_invariance must see it. Why each is wrong was measured with gloo or read in Megatron-Core.
Left out: `deallocate_pipeline_outputs`, since gloo sends messages of a test's size before they are freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_tree.layout import ParallelLayout
from tests.dist.harness import run
from tests.dist.ways import MODELS, Way, case_of, copied_case, make_models, off

CAUGHT = 3e-5  # relative: three times what test_layout_invariance lets pass

VPP = Way(ParallelLayout(pp=2, vpp=2), equal_lengths=True)  # other lengths would not go unnoticed
SEQUENCE = Way(ParallelLayout(tp=2), sequence_parallel=True)
SPLIT = Way(ParallelLayout(tp=2))
PADDED = Way(ParallelLayout(tp=4), "untied")
HEAD_NORMS = Way(ParallelLayout(tp=2), "untied")
CONTEXT = Way(ParallelLayout(cp=2))
DATA = Way(ParallelLayout(dp=2))


@contextmanager
def _config(**settings: object) -> Iterator[None]:
    """Megatron's config with other settings."""
    from megatron_tree.train import model

    def changed(*args: Any) -> Any:
        config = ours(*args)
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    ours = model.transformer_config
    with patch.object(model, "transformer_config", changed):
        yield


def _batched_messages() -> AbstractContextManager[object]:
    """Two messages are under way between two interleaved stages; a batch mixes them up."""
    return _config(overlap_p2p_comm=False, batch_p2p_comm=True)


def _mean_over_tokens() -> AbstractContextManager[object]:
    """Megatron then divides by the micro-batches, once more than the weights of the loss do."""
    return _config(calculate_per_token_loss=False)


def _head_norms_unsummed() -> AbstractContextManager[object]:
    """Each tensor-parallel rank has the gradient of its own heads only."""
    return _config(qk_layernorm=False)


def _summed_gather() -> AbstractContextManager[object]:
    """The head's input gradient is the same on all ranks of a tensor-parallel group: summing gives tp times
    as much."""
    from megatron_tree.train import model

    ours = model.gather_from_sequence_parallel_region
    return patch.object(model, "gather_from_sequence_parallel_region", lambda hidden, **_: ours(hidden))


def _padding_counts() -> AbstractContextManager[object]:
    """Rows of the padded vocabulary enter the log-sum-exp."""
    from megatron_tree.train.model import TreeGPTModel

    return patch.object(TreeGPTModel, "_without_padding", lambda _, logits: logits)


def _no_marks() -> AbstractContextManager[object]:
    """The norm takes split weights for copies and counts one rank's part."""
    from megatron_tree.train import model

    return patch.object(model, "_mark_split_weights", lambda _: None)


@contextmanager
def _norms_unsummed() -> Iterator[None]:
    """Each rank has the gradient of its own tokens only."""
    from megatron_tree.train import model

    def unmarked(*args: Any) -> Any:
        chunks = ours(*args)
        for param in (param for chunk in chunks for param in chunk.parameters()):
            param.sequence_parallel = False
        return chunks

    ours = model.build
    from megatron_tree.train import rank

    with patch.object(rank, "build", unmarked):
        yield


def _two_values() -> AbstractContextManager[object]:
    """Megatron multiplies by cp and divides by the micro-batches where a loss has two values."""
    from megatron_tree.train import step

    def two(loss: Any, batch: Any, logprobs: Any) -> Any:
        return loss(logprobs, batch)

    return patch.object(step, "_lossy", two)


@contextmanager
def _own_keys_only() -> Iterator[None]:
    """The backward of the gathered keys and values keeps this rank's part of the sum."""
    from megatron_tree.train import context

    def own(local: Any, by_rank: Any, group: Any) -> None:
        local.copy_(by_rank.chunk(group.size())[group.rank()])

    with patch.object(context.dist, "reduce_scatter_tensor", own):
        yield


def _packed_positions() -> AbstractContextManager[object]:
    """Rotary angles by the packed index instead of the depth in the tree."""
    from megatron_tree.train.model import TreeGPTModel

    ours = TreeGPTModel._preprocess

    def packed(self: Any, *, position_ids: Any, **kwargs: Any) -> Any:
        index = position_ids.new_tensor(range(position_ids.shape[1])).expand_as(position_ids)
        return ours(self, position_ids=index, **kwargs)

    return patch.object(TreeGPTModel, "_preprocess", packed)


TRAPS: list[tuple[Callable[[], AbstractContextManager[object]], Way]] = [
    (_batched_messages, VPP),
    (_mean_over_tokens, DATA),
    (_head_norms_unsummed, HEAD_NORMS),
    (_summed_gather, SEQUENCE),
    (_padding_counts, PADDED),
    (_no_marks, SPLIT),
    (_norms_unsummed, SEQUENCE),
    (_two_values, CONTEXT),
    (_own_keys_only, CONTEXT),
    (_packed_positions, Way()),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("traps")
    models = make_models(root)
    cases = [copied_case(model, root, models[model]) for model in MODELS]
    cases += [
        case_of(way, root, models[way.model], f"trap{set_.__name__}", within=set_) for set_, way in TRAPS
    ]
    run(cases, root, timeout_s=600)
    return root


@pytest.mark.full
@pytest.mark.parametrize(("set_", "way"), [pytest.param(*trap, id=trap[0].__name__[1:]) for trap in TRAPS])
def test_a_wrong_setting_is_seen(
    root: Path, set_: Callable[[], AbstractContextManager[object]], way: Way
) -> None:
    _, norm, worst = off(root, f"trap{set_.__name__}", way.model, float("inf"))
    assert max(norm, worst) > CAUGHT
