"""One Ray and one engine for all tests that talk to actors themselves (test_run starts whole runs in
processes).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_tree.cluster import running_ray
from tests.e2e.engines import Served, serving


@pytest.fixture(scope="session")
def _ray() -> Iterator[None]:
    with running_ray():
        yield


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory, _ray: None) -> Iterator[Served]:
    """A pool of one engine, TP 1, of a model with tied embeddings."""
    with serving(tmp_path_factory.mktemp("tied"), family="qwen2", tied=True, tp=1) as served:
        yield served
