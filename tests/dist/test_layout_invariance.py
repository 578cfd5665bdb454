"""One gradient, whatever the layout: loss, gradient norm and every gradient of packed trees.

Over tp, pp, vpp, dp, cp, uneven stages, sequence parallelism, the distributed optimizer, recomputation,
micro-batch split, vocabulary padding and tied embeddings. Second source: one rank without sharing (every
leaf's whole path a sequence of its own), itself held against transformers in test_gradients.
`make test-layouts` runs every way and prints the table; `make test` runs those of BRIEF.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_tree.layout import ParallelLayout
from tests.dist.harness import run
from tests.dist.ways import CORE, FULL, MLP, PAIRS, Way, case_of, copied_case, make_models, off

TOLERANCE = 1e-5  # relative, fp32

BRIEF = (
    Way(ParallelLayout(tp=2, pp=2, vpp=2), sequence_parallel=True),
    Way(ParallelLayout(pp=2, vpp=2), "untied", recompute=FULL),
    Way(ParallelLayout(cp=2, dp=2), distributed_optimizer=True),
    Way(ParallelLayout(tp=2, cp=2), "untied", sequence_parallel=True, recompute=MLP),
    Way(ParallelLayout(pp=2, stage_split=(1, 3)), micro_batch_tokens=160),
)
ALL = (
    *BRIEF,
    Way(),
    Way(micro_batch_tokens=1000),
    Way(recompute=PAIRS),
    Way(ParallelLayout(tp=2)),
    Way(ParallelLayout(tp=2), sequence_parallel=True),
    Way(ParallelLayout(tp=2), "untied", sequence_parallel=True, recompute=FULL),
    Way(ParallelLayout(tp=4), "untied"),  # more ranks than KV heads
    Way(ParallelLayout(tp=4), sequence_parallel=True),
    Way(ParallelLayout(pp=2)),
    Way(ParallelLayout(pp=4), "untied", recompute=CORE),
    Way(ParallelLayout(pp=3, stage_split=(1, 2, 1))),
    Way(ParallelLayout(pp=2, vpp=2)),
    Way(ParallelLayout(pp=2, vpp=2, stage_split=(0, 2, 1, 1)), recompute=CORE),
    Way(ParallelLayout(pp=4, vpp=1, dp=2), "untied", distributed_optimizer=True),
    Way(ParallelLayout(cp=2)),
    Way(ParallelLayout(cp=4), "untied", recompute=FULL),
    Way(ParallelLayout(dp=2)),
    Way(ParallelLayout(dp=2), "untied", distributed_optimizer=True),
    Way(ParallelLayout(dp=4), distributed_optimizer=True, micro_batch_tokens=160),
    Way(ParallelLayout(tp=2, pp=2), "untied"),
    Way(ParallelLayout(pp=2, vpp=2, dp=2), "untied", distributed_optimizer=True),
    Way(ParallelLayout(pp=2, vpp=2, cp=2), recompute=MLP),
    Way(ParallelLayout(tp=2, pp=2, cp=2), "untied", sequence_parallel=True, recompute=FULL),
    Way(ParallelLayout(tp=2, pp=2, dp=2), sequence_parallel=True, distributed_optimizer=True),
    Way(ParallelLayout(pp=2, cp=2, dp=2), distributed_optimizer=True),
)


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch for the ways that were asked for."""
    root = tmp_path_factory.mktemp("layouts")
    wanted = {item.callspec.params["way"] for item in request.session.items if item.fspath == request.fspath}
    cases = []
    for model, groups in make_models(root).items():
        cases.append(copied_case(model, root, groups))
        cases += [case_of(way, root, groups) for way in ALL if way in wanted and way.model == model]
    run(cases, root, timeout_s=900)
    return root


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in BRIEF else pytest.mark.full, id=str(way)) for way in ALL]
)
def test_gradients_do_not_depend_on_the_layout(
    root: Path, way: Way, record_property: Callable[[str, object], None]
) -> None:
    loss, norm, worst = off(root, str(way), way.model, TOLERANCE)
    record_property("layout", (str(way), way.layout.world_size, loss, norm, worst))
    assert norm <= TOLERANCE
    assert abs(loss) <= 1e-6
