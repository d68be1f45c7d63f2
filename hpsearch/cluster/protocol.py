"""Flat rings and trees as a communication library runs them across nodes, protocol by protocol.

One call on one process group is one ring (all_gather, reduce_scatter) or the better of a ring and a tree (all_reduce).
A ring passes every rank, so its latency grows with the number of ranks; a tree passes the members of one domain and
then log2 of the domains. A library has a protocol for small messages, quick a hop and poor in bandwidth, and one for
large messages, the other way round (NCCL: LL128 and Simple); it takes the faster one.

Where the switches of a domain add up what passes them (NVLink SHARP), an all_reduce has one way more: each rank sums
one share of the tensor over its domain in one go and joins a tree over the domains with it (NCCL: NVLSTree).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, log2

import numpy as np

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
class Switches:
    """Switches of one tier that add up what passes them: in an all_reduce each rank sends its tensor once and gets the
    sum once, however many ranks there are."""

    start_s: float
    share: float
    """Bytes of the tensor a second, by the bandwidth of one device."""
    members: int
    """Ranks from which on they take part."""


@dataclass(frozen=True)
class SwitchTree:
    """A tree over the domains whose leaves are sums made by the switches inside them."""

    start_s: float
    """Of the sum inside a domain and the way back."""
    outer_s: float
    """Of one hop between domains."""
    share: float
    """Bytes of the tensor a second, by the bandwidth of a domain's links, between two domains; more domains get half,
    since a domain then sends to two others."""
    window_bytes: float
    """Bytes in flight at once, chunks of all channels and ranks of a domain together: each hop waits for one window."""
    members: int
    """Ranks of one domain from which on the switches take part."""


@dataclass(frozen=True)
class Span:
    """A group of `size` ranks, equally many in each of `domains`."""

    size: int
    domains: int
    outer_bytes_per_s: float
    """Between domains, of all members in one domain together."""
    inner_bytes_per_s: float = inf
    """What one member passes on inside its domain."""

    @property
    def bytes_per_s(self) -> float:
        """Of all rings through a domain together: what leaves it has passed every member."""
        return min(self.outer_bytes_per_s, self.inner_bytes_per_s)

    @property
    def members(self) -> int:
        return self.size // self.domains


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


def switch_tree_seconds(tree: SwitchTree, span: Span, inside_s: Floats, nbytes: Floats) -> Floats:
    """Hops up and down, the first window through all of them, then the bytes at the rate of the slower links: those
    between domains, or those inside, where `inside_s` are the seconds of the same all_reduce in one domain.

    A message smaller than two windows is cut finer, down to half a window, so that chunks follow each other.
    """
    hops = 2 * ceil(log2(span.domains))
    window = np.minimum(nbytes, np.clip(nbytes / 2, tree.window_bytes / 2, tree.window_bytes))
    rate = tree.share * span.outer_bytes_per_s / (1 if span.domains <= 2 else 2)
    filled = hops * (tree.outer_s + window / span.outer_bytes_per_s)
    return filled + np.maximum(inside_s, tree.start_s + nbytes / rate)
