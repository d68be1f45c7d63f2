"""Flat rings and trees as a communication library runs them across nodes, protocol by protocol.

One call on one process group is one ring (all_gather, reduce_scatter) or the better of a ring and a tree (all_reduce).
A ring passes every rank, so its latency grows with the number of ranks; a tree passes the members of one domain and
then log2 of the domains. A library has a protocol for small messages, quick a hop and poor in bandwidth, and one for
large messages, the other way round (NCCL: LL128 and Simple); it takes the faster one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from hpsearch.cluster.curve import Floats, bus_factor


@dataclass(frozen=True)
class Protocol:
    """How a library moves bytes between the domains of one tier. Inner hops stay in a domain, outer hops leave it."""

    name: str
    start_s: float
    """Of one collective, before its first hop."""
    ring_inner_s: float
    ring_outer_s: float
    tree_inner_s: float
    tree_outer_s: float
    ring_share: float
    """Share of the links' bandwidth that rings reach."""
    tree_share: float
    channel_bytes_per_s: float | None = None
    """Most that one channel moves, however many links there are: a ring is one, trees come in pairs (Sanders et al.
    2009). None: no such limit."""

    def rate(self, links_bytes_per_s: float, share: float, channels: int) -> float:
        reached = links_bytes_per_s * share
        return reached if self.channel_bytes_per_s is None else min(reached, channels * self.channel_bytes_per_s)


@dataclass(frozen=True)
class Span:
    """A group of `size` ranks, equally many in each of `domains`, whose domains exchange at `bytes_per_s`."""

    size: int
    domains: int
    bytes_per_s: float
    """Of all members in one domain together, and never above what one member passes on inside."""


def ring_seconds(protocol: Protocol, kind: str, span: Span, nbytes: Floats) -> Floats:
    """n - 1 hops, twice for all_reduce, of which one less than the domains are outer."""
    rounds = 2 if kind == "all_reduce" else 1
    inner, outer = span.size - span.domains, span.domains - 1
    hops = rounds * (inner * protocol.ring_inner_s + outer * protocol.ring_outer_s)
    moved = bus_factor(kind, span.size) * nbytes
    return protocol.start_s + hops + moved / protocol.rate(span.bytes_per_s, protocol.ring_share, 1)


def tree_seconds(protocol: Protocol, span: Span, nbytes: Floats) -> Floats:
    """Up and down: a chain through the members of a domain, log2 of the domains outside; twice the bytes."""
    inner, outer = span.size // span.domains - 1, ceil(log2(span.domains))
    hops = 2 * (inner * protocol.tree_inner_s + outer * protocol.tree_outer_s)
    return protocol.start_s + hops + 2 * nbytes / protocol.rate(span.bytes_per_s, protocol.tree_share, 2)
