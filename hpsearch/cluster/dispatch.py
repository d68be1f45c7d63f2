"""Tokens on their way to the experts of a mixture, and back: an exchange in which copies of one token go together.

A token goes to `top_k` experts. Sent one by one, as an all_to_all does, its copies cross a slow tier once an expert.
Sent together, a copy crosses once a destination domain and is copied on inside it. Which is quicker depends on sizes:
the second way is two hops and the first one. Each tier works on its own; the slower one counts.

Expected copies: experts are drawn without return, so of P parts that hold E / P experts each, a token meets
P · (1 - C(E - E/P, k) / C(E, k)) (DeepEP's dispatch, https://github.com/deepseek-ai/DeepEP).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from hpsearch.cluster.route import Links, Way
from hpsearch.cluster.tier import GroupShape
from hpsearch.errors import ClusterError


@dataclass(frozen=True)
class Routing:
    """What one rank sends: its tokens, each to `top_k` of `experts`."""

    tokens: int
    token_bytes: float
    """Of one token on the wire, scales included."""
    top_k: int
    experts: int
    most_domains: int | None = None
    """Domains of the outermost tier that a token may go to (routing limited to groups); None: no limit."""


def parts_met(parts: int, experts: int, top_k: int) -> float:
    """Of `parts` that hold the experts in equal shares: how many hold at least one of `top_k` different experts."""
    if experts % parts:
        raise ClusterError(
            f"{experts} experts over {parts} parts", f"expected equal shares, but {experts} / {parts} is not whole",
            "Use a divisor of the number of experts.",
        )  # fmt: skip
    if not 1 <= top_k <= experts:
        raise ClusterError(f"top {top_k} of {experts} experts", "expected 1 to all of them", "Correct the routing.")
    return parts * (1 - comb(experts - experts // parts, top_k) / comb(experts, top_k))


def dispatch_ways(links: Links, routing: Routing, shape: GroupShape) -> list[Way]:
    """Each copy on its own, and copies for one domain together."""
    return [_separate(links, routing, shape), _together(links, routing, shape)]


def steps(shape: GroupShape) -> list[tuple[int, int, int]]:
    """(tier, parts it joins in the group, members in one of its domains), from the innermost."""
    found, before = [], shape.size
    for tier in (*shape.cuts, shape.outermost):
        found.append((tier, before, shape.size // shape.count(tier)))
        before = shape.count(tier)
    return found


def _latency_s(links: Links, shape: GroupShape) -> float:
    return links.launch_s + sum(links.tiers[tier].latency_s for tier, _, _ in steps(shape))


def _separate(links: Links, routing: Routing, shape: GroupShape) -> Way:
    """A tier carries the copies for ranks inside its domain but outside the domains within."""
    busy, sent = 0.0, routing.tokens * routing.token_bytes * routing.top_k
    for tier, parts, members in steps(shape):
        inside = shape.size // parts
        share = (members - inside) / shape.size
        busy = max(busy, sent * share / links.tiers[tier].rate_within(members))
    latency = links.launch_s + links.tiers[shape.outermost].latency_s
    words = f"dispatch {links.tiers[shape.outermost].name} x{shape.size} (each copy on its own)"
    return np.array([latency + busy]), "modelled", words


def _together(links: Links, routing: Routing, shape: GroupShape) -> Way:
    """A tier carries one copy for each part it joins that the token meets, less the share that entered there; the
    innermost carries the copy for the rank itself too, which passes the same buffers."""
    busy, sent = 0.0, routing.tokens * routing.token_bytes
    for tier, parts, members in steps(shape):
        met = parts_of(routing, parts, shape)
        inside = shape.size // parts
        leaving = met if inside == 1 else met * (members - inside) / members
        busy = max(busy, sent * leaving / links.tiers[tier].rate_within(members))
    words = f"dispatch {links.tiers[shape.outermost].name} x{shape.size} (one copy a domain)"
    return np.array([_latency_s(links, shape) + busy]), "modelled", words


def parts_of(routing: Routing, parts: int, shape: GroupShape) -> float:
    """Parts that a token meets, where the outermost domains it may go to are limited."""
    domains = steps(shape)[-1][1]
    limit = routing.most_domains
    if limit is None or limit >= domains:
        return parts_met(parts, routing.experts, routing.top_k)
    return parts_met(parts * limit // domains, routing.experts * limit // domains, routing.top_k)
