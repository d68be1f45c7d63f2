"""Bytes between supernodes, counted where they are sent: tokens to experts and back, and sums over two axes.

Held to the closed form of the domains a token meets (`hpsearch.cluster.dispatch.parts_met`). The lists of experts and
the weights that travel too are counted and are in the 5 %.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpsearch.cluster.dispatch import parts_met
from hpsearch.cluster.exchange import CALLS
from hpsearch.lower.exchange import hop_ranks
from tests.end_to_end.ranks import RankPool
from tests.lower.simulate import Collectives, on_ranks
from tests.lower.slow_tier import EXPERTS, TOKEN, TOP_K, drawn, layer

TOKENS = 64
CASES = [(2, None, 0.70), (4, None, 0.50), (2, 1, 0.70), (4, 2, 0.70)]
"""Supernodes, most that a token may go to, share of bytes saved at least."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def expected(supernodes: int, limit: int | None, together: bool, tokens: int) -> float:
    """Bytes that cross: dispatch, combine, and both again for gradients."""
    allowed = limit or supernodes
    met = parts_met(allowed, EXPERTS * allowed // supernodes, TOP_K) if together else TOP_K
    return 4 * tokens * TOKEN * met * (supernodes - 1) / supernodes


def crossing(sent: list[dict[int, int]], supernodes: int) -> int:
    """Bytes to ranks of other supernodes."""
    size = len(sent) // supernodes
    return sum(n for rank, to in enumerate(sent) for other, n in to.items() if other // size != rank // size)


def handed_over(ranks: int, supernodes: int, limit: int | None, together: bool) -> list[dict[int, int]]:
    """Bytes given to exchanges for each other rank, in as many calls as prices are for."""
    everyone = tuple(range(ranks))

    def work(rank: int, collectives: Collectives) -> dict[int, int]:
        hops = hop_ranks(everyone, (supernodes, ranks // supernodes), rank) if together else None
        layer(drawn(rank, TOKENS, supernodes, limit), everyone, hops)  # type: ignore[arg-type]
        assert len(collectives.log) == 4 * CALLS * (2 if together else 1)
        return collectives.sent

    return on_ranks(ranks, work)


@pytest.mark.parametrize(("supernodes", "limit", "fewer"), CASES)
def test_bytes_given_to_exchanges(supernodes: int, limit: int | None, fewer: float) -> None:
    """Supernodes of four ranks."""
    ranks, crossed = 4 * supernodes, {}
    for together in (False, True):
        crossed[together] = crossing(handed_over(ranks, supernodes, limit, together), supernodes)
        assert crossed[together] == pytest.approx(expected(supernodes, limit, together, ranks * TOKENS), rel=0.05)
    assert crossed[True] <= (1 - fewer) * crossed[False]


@pytest.mark.dist
def test_bytes_on_sockets(pool: RankPool) -> None:
    """Of gloo ranks: two supernodes of two, and four of one."""
    cases = [(supernodes, limit) for supernodes, limit, _ in CASES]
    by_rank = pool.run("tests.lower.slow_tier:dispatched", ranks=4, timeout_s=60, cases=cases, tokens=4 * TOKENS)
    for (supernodes, limit, fewer), sent in zip(CASES, zip(*by_rank, strict=True), strict=True):
        apart, together = (crossing(list(each), supernodes) for each in zip(*sent, strict=True))
        assert apart == pytest.approx(expected(supernodes, limit, False, 16 * TOKENS), rel=0.05)
        assert together == pytest.approx(expected(supernodes, limit, True, 16 * TOKENS), rel=0.05)
        assert together <= (1 - fewer) * apart
        print(f"{supernodes} supernodes, limit {limit}: {apart} B apart, {together} B together")


@pytest.mark.dist
def test_a_sum_over_two_axes_crosses_once(pool: RankPool) -> None:
    """A ring over two supernodes sends each tensor once each way; axis by axis both ranks of a supernode send it."""
    nbytes = 2**21
    for axis_by_axis, copies in ((False, 1), (True, 2)):
        sent = pool.run(
            "tests.lower.slow_tier:summed", ranks=4, timeout_s=60, elements=nbytes // 4, axis_by_axis=axis_by_axis
        )
        assert crossing(sent, 2) == pytest.approx(2 * copies * nbytes, rel=0.02)


EXCHANGES: list[tuple[tuple[int, ...], dict[str, int], dict[str, int], dict[str, int]]] = [
    ((64, 64, 64), {"tp": 4}, {"tp": 0}, {"tp": 1}),
    ((64, 64, 64), {"dp_shard": 2, "tp": 2}, {"dp_shard": 0, "tp": 1}, {"dp_shard": 0, "tp": 2}),
]
"""Shape, mesh, the dims that its axes cut before and after."""


@pytest.mark.dist
@pytest.mark.parametrize(("shape", "axes", "source", "target"), EXCHANGES)
def test_from_cut_to_cut_sends_each_piece_once(
    pool: RankPool, shape: tuple[int, ...], axes: dict[str, int], source: dict[str, int], target: dict[str, int]
) -> None:
    """A rank keeps one of the pieces it has and sends each other to the rank whose it is. DTensor gathers on CPU: all
    that a rank has goes to each other rank of the axis, tp times as much."""
    moves = {"shape": shape, "axes": axes, "source": source, "target": target}
    local, size = 4 * 64**3 // 4, axes["tp"]
    for rank, (ours, theirs) in enumerate(pool.run("tests.lower.slow_tier:exchanged", ranks=4, timeout_s=60, **moves)):
        group = range(rank // size * size, rank // size * size + size)
        for other in range(4):
            there = local / size if other in group and other != rank else 0
            assert ours.get(other, 0) == pytest.approx(there, rel=0.01, abs=4096)
        assert sum(theirs.values()) > 1.9 * sum(ours.values())
