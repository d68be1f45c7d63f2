"""One pool of ranks for a module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.ranks import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
