"""Tokens to experts over real gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.mark.dist
def test_gloo_ranks(pool: RankPool) -> None:
    """The first rank of a group has no token; groups are all ranks or some of them."""
    cases = [
        (None, (0, 1, 2, 3), "float32"),
        ((2, 2), (0, 1, 2, 3), "float64"),
        ((4,), (0, 1, 2, 3), "bfloat16"),
        (None, (0, 3), "float64"),
    ]
    pool.run("tests.lower.exchange_rank:layers", ranks=4, timeout_s=60, cases=cases)
