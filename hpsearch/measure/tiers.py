"""Which ranks share a fast domain, found in what a message between each two of them costs. Pure and deterministic.

Single linkage on the seconds of a message: at threshold h, ranks joined by a chain of messages faster than h are one
domain. As h grows, domains merge; where h can grow by a factor without any merging, there is a tier. What disturbs a
measurement only ever adds to it, so a slow outlier inside a domain is bridged by other chains and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

GAP = 1.6
"""The least factor between messages inside a domain and across that makes a tier: NUMA halves and PCIe switches differ
by 1.5 to 2, NVLink and a network by 5 to 10; pairs of one kind by less than 1.3."""

WHOLE = 0.75
"""Share of the ranks that must stand in undisturbed domains before the others are put together like them."""

Matrix = Sequence[Sequence[float]]
"""Seconds of a message between two ranks, symmetric; the diagonal is not read."""
Domains = tuple[tuple[int, ...], ...]
"""Ranks of each domain, sorted; domains by their first rank."""


@dataclass(frozen=True)
class Partition:
    """One way to cut the ranks into domains of one tier."""

    domains: Domains
    factor: float
    """How much slower the median message across is than the median one inside."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(domain) for domain in self.domains)

    @property
    def is_regular(self) -> bool:
        """Equal domains of neighbouring ranks: what a cluster file can say."""
        size = self.sizes[0]
        return all(domain == tuple(range(i * size, (i + 1) * size)) for i, domain in enumerate(self.domains))


def find_tiers(seconds: Matrix, gap: float = GAP) -> tuple[Partition, ...]:
    """The domains of every tier inside the whole, innermost first; none where all pairs are alike."""
    count = len(seconds)
    if count < 3:
        return ()
    merges = _merge_heights(seconds)
    found = []
    for low, high in pairwise(merges):
        if high < low * gap:
            continue
        domains = completed(_components(seconds, low))
        factor = _factor(seconds, domains)
        if 1 < len(domains) < count and factor >= gap and min(map(len, domains)) > 1:
            found.append(Partition(domains, factor))
    return tuple(found)


def completed(domains: Domains) -> Domains:
    """The domains with fragments put together, where at least WHOLE of all ranks stand in equal blocks of neighbours.

    A pair of two dies has one message that could show it; when it was disturbed, the others tell where it belongs.
    """
    count = sum(map(len, domains))
    sizes = sorted({len(domain) for domain in domains}, key=lambda s: (-sum(len(d) for d in domains if len(d) == s), s))
    size = sizes[0]
    if count % size or len(sizes) == 1:
        return domains
    blocks = tuple(tuple(range(first, first + size)) for first in range(0, count, size))
    whole = sum(size for domain in domains if domain in blocks)
    fits = all(any(set(domain) <= set(block) for block in blocks) for domain in domains)
    return blocks if fits and whole >= WHOLE * count else domains


def agreed(first: Sequence[Partition], second: Sequence[Partition]) -> tuple[Partition, ...]:
    """The partitions that both of two measurements found: what only one shows is noise."""
    other = {partition.domains for partition in second}
    return tuple(partition for partition in first if partition.domains in other)


def nested(partitions: Sequence[Partition]) -> tuple[Partition, ...]:
    """A chain of partitions each of which is made of whole domains of the one before; the clearest of rivals stay.

    Latency and bandwidth may show different tiers, and both are real as long as they nest.
    """
    chain: list[Partition] = []
    for partition in sorted(partitions, key=lambda p: (-p.factor, p.domains)):
        if all(_nests(partition, other) and partition.domains != other.domains for other in chain):
            chain.append(partition)
    return tuple(sorted(chain, key=lambda p: (max(p.sizes), p.domains)))


def from_hosts(hosts: Sequence[str]) -> Partition | None:
    """Ranks by the host they run on; None on one host, or where each rank has its own."""
    names = list(dict.fromkeys(hosts))
    domains = tuple(tuple(rank for rank, host in enumerate(hosts) if host == name) for name in names)
    if len(names) < 2 or len(names) == len(hosts):
        return None
    return Partition(tuple(sorted(domains)), float("inf"))


def _nests(a: Partition, b: Partition) -> bool:
    def inside(fine: Domains, coarse: Domains) -> bool:
        return all(any(set(d) <= set(c) for c in coarse) for d in fine)

    return inside(a.domains, b.domains) or inside(b.domains, a.domains)


def _merge_heights(seconds: Matrix) -> list[float]:
    """Edges of the minimum spanning tree, growing: the thresholds at which domains merge (Prim, ties by rank)."""
    count = len(seconds)
    nearest = {rank: _between(seconds, 0, rank) for rank in range(1, count)}
    heights = []
    while nearest:
        rank = min(nearest, key=lambda r: (nearest[r], r))
        heights.append(nearest.pop(rank))
        for other in nearest:
            nearest[other] = min(nearest[other], _between(seconds, rank, other))
    return sorted(heights)


def _components(seconds: Matrix, threshold: float) -> Domains:
    left, found = list(range(len(seconds))), []
    while left:
        domain, open_ranks = {left[0]}, [left[0]]
        while open_ranks:
            rank = open_ranks.pop()
            new = [r for r in left if r not in domain and _between(seconds, rank, r) <= threshold]
            domain.update(new)
            open_ranks += new
        found.append(tuple(sorted(domain)))
        left = [rank for rank in left if rank not in domain]
    return tuple(sorted(found))


def _between(seconds: Matrix, a: int, b: int) -> float:
    return min(seconds[a][b], seconds[b][a])


def _factor(seconds: Matrix, domains: Domains) -> float:
    home = {rank: index for index, domain in enumerate(domains) for rank in domain}
    inside, across = [], []
    for a in range(len(seconds)):
        for b in range(a + 1, len(seconds)):
            (inside if home[a] == home[b] else across).append(_between(seconds, a, b))
    return median(across) / median(inside) if inside and across else 0.0
