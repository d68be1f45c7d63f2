"""One pool of ranks and one empty cache of graphs for all cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.conftest import hpsearch
from tests.end_to_end.ranks import RankPool

__all__ = ["hpsearch"]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPSEARCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
