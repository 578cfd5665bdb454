"""One Ray for all tests that talk to actors themselves. Whole runs (test_run) start their own, in their own
process.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_tree.cluster import running_ray


@pytest.fixture(scope="session")
def _ray() -> Iterator[None]:
    with running_ray():
        yield
