"""`Tier`: one level of links; and how a group of ranks lies on the tiers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from math import ceil, gcd, lcm, log2

import numpy as np
from numpy.typing import NDArray

from hpsearch.cluster.curve import Curve, Floats, bus_factor, price_from_curves
from hpsearch.cluster.protocol import Protocol, Switches, SwitchTree

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tier:
    """Links between the domains of the tier inside it: dies of a package, packages of a node, nodes of a fabric."""

    name: str
    size: int
    """Devices in one domain of this tier."""
    link: str
    bytes_per_s: float
    """Of one device, one direction, while every device of its domain sends at once: the device's share of a NIC."""
    latency_s: float
    """Of one small message."""
    efficiency: float = 1.0
    """Share of `bytes_per_s` that a long collective reaches."""
    pipelining: float | None = None
    """How well an all-reduce overlaps this tier with the tiers inside: the slower part takes 1/pipelining as long.
    None: the parts run one after the other."""
    curves: tuple[Curve, ...] = ()
    wiring: str = "switch"
    """switch, or full-mesh: `bytes_per_s` is that of the links to all others, and a smaller group uses fewer."""
    like: str = ""
    """Name of an inner tier on the same switches: a group costs what it does there, by its size alone."""
    protocols: tuple[Protocol, ...] = ()
    """How a library crosses the domains in one call; empty: any composition of tiers may be taken."""
    switches: Switches | None = None
    """One way more for all_reduce inside this tier, where no curve was measured on a group of that size."""
    switch_tree: SwitchTree | None = None
    """One way more for all_reduce, where the switches inside the domains add up; beside `protocols`."""

    @property
    def rate(self) -> float:
        return self.bytes_per_s * self.efficiency

    def rate_within(self, members: int) -> float:
        """Bytes per second of one of `members` that exchange inside one domain."""
        return self.rate * (members - 1) / (self.size - 1) if self.wiring == "full-mesh" else self.rate


@dataclass(frozen=True)
class GroupShape:
    """How the groups of `size` ranks spaced `stride` apart lie on the tiers, the same for all groups or not at all.

    counts[t] is the number of domains of tier t that a group touches, each with equally many members; counts of -1
    stand where groups touch unequal domains. Tier -1 is the ranks themselves: `size` domains.
    """

    size: int
    counts: tuple[int, ...]

    @property
    def outermost(self) -> int:
        """Index of the innermost tier whose domains hold every group whole."""
        return self.counts.index(1)

    def count(self, tier: int) -> int:
        return self.size if tier < 0 else self.counts[tier]

    @property
    def cuts(self) -> tuple[int, ...]:
        """Tiers inside the outermost at which the group falls into equal parts of more than one rank."""
        found, before = [], self.size
        for t in range(self.outermost):
            if 1 < self.counts[t] < before:
                found.append(t)
                before = self.counts[t]
        return tuple(found)

    def inside(self, low: int, high: int) -> GroupShape:
        """The shape of the subgroup that joins the domains of tier `low` inside one domain of tier `high`."""
        parts = self.count(high)
        size = self.count(low) // parts
        counts = [size if t <= low else 1 if t >= high else count for t, count in enumerate(self.counts)]
        between = range(low + 1, high)
        return GroupShape(size, tuple(c // parts if t in between and c > 0 else c for t, c in enumerate(counts)))


def group_shape(tier_sizes: tuple[int, ...], devices: int, size: int, stride: int) -> GroupShape:
    """The shape of all groups of `size` ranks, `stride` apart, that tile `devices` ranks; inner tiers fill first."""
    return GroupShape(size, tuple(_touched(domain_size, devices, size, stride) for domain_size in tier_sizes))


def _touched(domain_size: int, devices: int, size: int, stride: int) -> int:
    """Domains of one tier that each group touches; -1 where groups lie unlike each other, or unevenly."""
    block = size * stride
    if domain_size % block == 0 or domain_size >= devices:
        return 1
    if stride >= domain_size:
        return size
    if block % domain_size == 0 and domain_size % stride == 0:
        return block // domain_size
    # Groups a common multiple apart lie alike, and so do those whose first ranks stand in one common divisor.
    blocks = np.arange(min(devices // block, lcm(block, domain_size) // block))
    first = (blocks[:, None] * block + np.arange(0, stride, gcd(stride, domain_size))).reshape(-1, 1)
    few = first[:: max(len(first) // FEW, 1)]  # where groups lie unlike each other, mostly some of these do
    return -1 if _alike(few, domain_size, size, stride) < 0 else _alike(first, domain_size, size, stride)


FEW = 64
"""Groups looked at before all are."""


def _alike(first: Ints, domain_size: int, size: int, stride: int) -> int:
    """`_touched` of groups whose first ranks these are, [groups, 1]."""
    domain = (first + np.arange(size) * stride) // domain_size
    touched = 1 + (domain[:, 1:] > domain[:, :-1]).sum(axis=1)
    count = int(touched[0])
    if not (touched == count).all() or size % count:
        return -1
    parts = domain.reshape(len(domain), count, size // count)
    return count if (parts == parts[:, :, :1]).all() else -1


def leaf_seconds(
    kind: str, tier: Tier, curves: list[tuple[Curve, GroupShape]], shape: GroupShape, nbytes: Floats, launch_s: float
) -> tuple[Floats, str, str]:
    """Seconds of one flat collective at `tier`, with its basis and wording.

    `curves` are the tier's, each with the shape of the groups it was measured on. A curve speaks for a group that lies
    on the tiers as its own did, or, between groups with one rank in each inner domain, for other sizes too.
    """
    alike = curves_alike(kind, curves, shape)
    words = f"{kind} {tier.name} x{shape.size}"
    if alike:
        seconds, basis, how = price_from_curves(alike, shape.size, nbytes)
        return seconds, basis, f"{words} ({how})"
    seconds, how = alpha_beta_seconds(kind, tier, shape.size, nbytes)
    return launch_s + seconds, "modelled", f"{words} ({how})"


def curves_alike(kind: str, curves: list[tuple[Curve, GroupShape]], shape: GroupShape) -> tuple[Curve, ...]:
    """The curves that speak for such groups."""
    alike = tuple(c for c, measured in curves if c.kind == kind and measured == shape)
    if not alike and _one_each(shape):
        alike = tuple(c for c, measured in curves if c.kind == kind and _one_each(measured))
    return alike


def _one_each(shape: GroupShape) -> bool:
    """No two ranks of the group share a domain inside the tier it spans."""
    return all(count == shape.size for count in shape.counts[: shape.outermost])


def alpha_beta_seconds(kind: str, tier: Tier, size: int, nbytes: Floats) -> tuple[Floats, str]:
    """Latency per step plus bytes by bandwidth: a ring, or for small all-reduces a tree (Sanders et al. 2009).

    Ring: (n-1) steps and (n-1)/n of the bytes, twice for all_reduce. Tree: 2·log2(n) steps and twice the bytes.
    """
    steps = (size - 1) * (2 if kind == "all_reduce" else 1)
    rate = tier.rate_within(size)
    ring = steps * tier.latency_s + bus_factor(kind, size) * nbytes / rate
    if kind != "all_reduce":
        return ring, "ring" if kind != "all_to_all" else "pairwise"
    tree = 2 * ceil(log2(size)) * tier.latency_s + 2 * nbytes / rate
    return np.minimum(ring, tree), "ring or tree"


def node_size(tiers: tuple[Tier, ...]) -> int:
    """Devices of one node: the tier named `node`, else the innermost tier."""
    return next((tier.size for tier in tiers if tier.name == "node"), tiers[0].size)


NETWORKS = ("infiniband", "roce", "efa", "ethernet")
"""Links over which one device does not read another's memory."""


def memory_domain(tiers: tuple[Tier, ...]) -> int:
    """Devices that reach each other's memory: those inside the innermost network, and at least one."""
    inside = [tier.size for tier in takewhile(lambda tier: tier.link not in NETWORKS, tiers)]
    return inside[-1] if inside else 1


def packed(tiers: tuple[Tier, ...], devices: int) -> tuple[Tier, ...]:
    """The tiers as a job of `devices` fills them: domains it needs several of are filled alike.

    256 devices in racks of 72 lie as 4 times 64, as schedulers place them, and not as 72 + 72 + 72 + 40, which no mesh
    axis lies evenly on. Left as it is where equal parts would leave more than half of a domain empty.
    """
    found: list[Tier] = []
    for tier in tiers[:-1]:
        inner = found[-1].size if found else 1
        parts = -(-devices // tier.size)
        equal = (p for p in range(parts, 2 * parts + 1) if devices % p == 0 and devices // p % inner == 0)
        size = tier.size if devices <= tier.size else devices // next(equal, devices)
        found.append(replace(tier, size=size) if 2 * size >= tier.size else tier)
    return (*found, tiers[-1])
