"""Finding tiers: machines of one to three levels, with the noise of real measurements, which only ever adds."""

from __future__ import annotations

import random

import pytest

from hpsearch.measure.tiers import Partition, agreed, find_tiers, from_hosts, nested

Levels = tuple[tuple[int, float], ...]
"""(domain size, seconds between ranks that share this domain and no inner one), innermost first."""


def machine(levels: Levels, seed: int, noise: float = 0.25, outliers: float = 0.03) -> list[list[float]]:
    """Seconds between each two ranks: the level's, up to `noise` more, now and then five times as much."""
    draw, world = random.Random(seed), levels[-1][0]
    found = [[0.0] * world for _ in range(world)]
    for a in range(world):
        for b in range(a):
            base = next(s for size, s in levels if a // size == b // size)
            late = 5.0 if draw.random() < outliers else 1.0
            found[a][b] = found[b][a] = base * (1 + noise * draw.random()) * late
    return found


def blocks(world: int, size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + size)) for first in range(0, world, size))


MACHINES: dict[str, Levels] = {
    "one node": ((8, 1.0),),
    "two ranks": ((2, 1.0),),
    "two nodes of two": ((2, 1.0), (4, 8.0)),
    "two nodes of eight": ((8, 1.0), (16, 5.0)),
    "eight nodes of four": ((4, 1.0), (32, 3.0)),
    "three nodes of three": ((3, 1.0), (9, 2.5)),
    "switches in nodes": ((4, 1.0), (8, 2.5), (32, 12.0)),
    "dies, supernodes, fabric": ((2, 1.0), (8, 3.0), (24, 9.0)),
    "sixteen by four by two": ((2, 1.0), (8, 4.0), (128, 16.0)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_each_level_is_found_whatever_the_noise(name: str) -> None:
    levels = MACHINES[name]
    world = levels[-1][0]
    for seed in range(20 if world < 100 else 2):
        found = find_tiers(machine(levels, seed))
        assert [p.domains for p in found] == [blocks(world, size) for size, _ in levels[:-1]], seed
        assert all(partition.is_regular for partition in found)


def test_the_factor_of_a_tier_is_that_of_its_median_messages() -> None:
    (found,) = find_tiers(machine(((4, 1.0), (8, 6.0)), 0, noise=0.0, outliers=0.0))
    assert found.factor == pytest.approx(6.0)


def test_differences_below_the_gap_are_no_tier() -> None:
    assert find_tiers(machine(((4, 1.0), (8, 1.3)), 0, noise=0.1)) == ()


def test_ranks_in_another_order_are_found_as_they_lie() -> None:
    """Ranks dealt out over two nodes in turn: the domains are right, and no blocks of neighbours."""
    straight = machine(((4, 1.0), (8, 6.0)), 1)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    (found,) = find_tiers([[straight[a][b] for b in order] for a in order])
    assert found.domains == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert not found.is_regular


def test_uneven_domains_are_found_and_are_no_blocks() -> None:
    fast = {frozenset((a, b)) for group in ((0, 1, 2), (3, 4)) for a in group for b in group if a != b}
    seconds = [[1.0 if frozenset((a, b)) in fast else 9.0 for b in range(5)] for a in range(5)]
    (found,) = find_tiers(seconds)
    assert (found.domains, found.is_regular) == (((0, 1, 2), (3, 4)), False)


def test_what_one_of_two_measurements_shows_is_noise() -> None:
    real, chance = Partition(blocks(8, 4), 5.0), Partition(blocks(8, 2), 1.7)
    assert agreed((chance, real), (real,)) == (real,)
    assert agreed((chance,), ()) == ()


def test_tiers_that_latency_and_bandwidth_show_are_put_together() -> None:
    node, die = Partition(blocks(8, 4), 5.0), Partition(blocks(8, 2), 2.0)
    across = Partition(((0, 4), (1, 5), (2, 6), (3, 7)), 1.7)
    assert nested((node, across, die)) == (die, node)
    assert nested((node, node)) == (node,)


def test_hosts_are_a_tier_when_there_are_several_with_several_ranks() -> None:
    found = from_hosts(["b", "b", "a", "a"])
    assert found is not None
    assert found.domains == ((0, 1), (2, 3))
    assert from_hosts(["a", "a"]) is None
    assert from_hosts(["a", "b"]) is None


def test_the_same_figures_always_give_the_same_tiers() -> None:
    seconds = machine(((4, 1.0), (16, 4.0)), 3)
    assert find_tiers(seconds) == find_tiers([row[:] for row in seconds])
