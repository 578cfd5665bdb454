"""The ranks of `harness` live as long as the tests of this folder run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist import harness


@pytest.fixture(scope="package", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    harness.stop()
