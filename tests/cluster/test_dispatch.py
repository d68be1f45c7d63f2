"""Tokens to experts and back: copies by counting, seconds by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from hpsearch.cluster import Cluster, Routing
from hpsearch.cluster.dispatch import parts_met
from hpsearch.errors import ClusterError

US = 1e-6


@pytest.mark.parametrize(
    ("parts", "experts", "top_k"), [(2, 4, 2), (4, 8, 3), (8, 8, 2), (3, 12, 4), (1, 6, 6), (5, 5, 1)]
)
def test_parts_met_equal_those_of_all_drawings(parts: int, experts: int, top_k: int) -> None:
    drawn = list(combinations(range(experts), top_k))
    mean = sum(len({e * parts // experts for e in draw}) for draw in drawn) / len(drawn)
    assert parts_met(parts, experts, top_k) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("parts", "experts", "top_k", "groups", "most"),
    [
        (4, 8, 2, 4, 2),
        (2, 8, 3, 4, 2),
        (8, 8, 2, 2, 1),
        (3, 12, 2, 4, 2),
        (4, 12, 3, 3, 2),
        (1, 6, 2, 3, 1),
        (2, 4, 2, 2, 2),
    ],
)
def test_parts_met_by_limited_routing_equal_those_of_all_drawings(
    parts: int, experts: int, top_k: int, groups: int, most: int
) -> None:
    """Groups first, then experts inside them; parts may hold pieces of groups, or several."""
    met, each = [], experts // groups
    for chosen in combinations(range(groups), most):
        inside = [e for e in range(experts) if e // each in chosen]
        met += [len({e * parts // experts for e in draw}) for draw in combinations(inside, top_k)]
    assert parts_met(parts, experts, top_k, groups, most) == pytest.approx(sum(met) / len(met))


def test_limits_that_cannot_be() -> None:
    with pytest.raises(ClusterError, match=r"9 of 8 groups of 256 experts: expected equal groups, and one to all"):
        parts_met(8, 256, 8, 8, 9)
    with pytest.raises(ClusterError, match=r"top 8 of 4 experts: expected 1 to all of those that a token may go to"):
        parts_met(8, 32, 8, 8, 1)


def test_both_ways_by_hand(toy: Cluster) -> None:
    """4 nodes of 8 at 100 GB/s and 1 us, 10 GB/s and 10 us between; 1,000 tokens of 10 kB, top 2 of 32 experts: 20 MB a
    rank in 2 copies each; 24 of 32 ranks stand in other nodes, 7 in one's own."""
    own = 10 * US + max(20e6 * 7 / 32 / 100e9, 20e6 * 24 / 32 / 10e9)
    nodes_met, ranks_met = 4 * (1 - (24 * 23) / (32 * 31)), 2.0
    together = 11 * US + max(10e6 * ranks_met / 100e9, 10e6 * nodes_met * 3 / 4 / 10e9)
    first, second = toy.dispatch(Routing(1000, 1e4, 2, 32), 32, 1)
    assert (first.how, first.basis) == ("dispatch fabric x32 (one copy a domain)", "modelled")
    assert first.seconds == pytest.approx(together)
    assert second.how == "dispatch fabric x32 (each copy on its own)"
    assert second.seconds == pytest.approx(own)


def test_limited_routing_meets_fewer_nodes(toy: Cluster) -> None:
    """Experts of at most two of four nodes: both are met but for 2 · 8·7 / (16·15) of the drawings."""
    free, limited = (toy.dispatch(Routing(1000, 1e4, 2, 32, most), 32, 1) for most in (None, 2))
    met = 2 * (1 - (8 * 7) / (16 * 15))
    assert limited[0].seconds == pytest.approx(11 * US + 10e6 * met * 3 / 4 / 10e9)
    assert limited[0].seconds < free[0].seconds
    assert limited[1] == free[1]


def test_few_tokens_take_the_one_hop(toy: Cluster) -> None:
    assert toy.dispatch(Routing(1, 1e3, 2, 32), 32, 1)[0].how.endswith("(each copy on its own)")
    assert toy.dispatch(Routing(1, 1e3, 2, 32), 1, 1)[0].seconds == 0.0


def test_three_tiers(deep: Cluster) -> None:
    """Pairs, nodes of 8, supernodes of 32, two of them: a slow tier carries one copy a destination on each level."""
    price = deep.dispatch(Routing(1000, 1e4, 4, 64), 64, 1)
    together = next(p for p in price if p.how.endswith("domain)"))
    met = [parts_met(parts, 64, 4) for parts in (64, 32, 8, 2)]
    busy = [met[0] / 400e9, met[1] * 6 / 8 / 100e9, met[2] * 3 / 4 / 25e9, met[3] / 2 / 6.25e9]
    assert together.seconds == pytest.approx(13 * US + 10e6 * max(busy))


def test_routings_that_cannot_be(toy: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"30 experts over 4 parts: expected equal shares, but 30 / 4 is not whole"):
        parts_met(4, 30, 2)
    with pytest.raises(ClusterError, match=r"top 9 of 8 experts: expected 1 to all of those"):
        parts_met(4, 8, 9)
