"""Tokens on their way to the experts of a mixture, and back: an exchange in which copies of one token go together.

A token goes to `top_k` experts. Sent one by one, as an all_to_all does, its copies cross a slow tier once an expert.
Sent together, a copy crosses once a destination domain and is copied on inside it. Which is quicker depends on sizes:
the second way is two hops and the first one. Each tier works on its own; the slower one counts.

Expected copies: experts are drawn without return, so of P parts that hold E / P experts each, a token meets
P · (1 - C(E - E/P, k) / C(E, k)) (DeepEP's dispatch, https://github.com/deepseek-ai/DeepEP). A router that is limited
to L of G groups of experts (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2) draws the groups first, then
the experts inside them: fewer parts are met where a part holds whole groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
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


def parts_met(parts: int, experts: int, top_k: int, groups: int = 1, most_groups: int = 1) -> float:
    """Of `parts` that hold the experts in equal shares: how many hold at least one of `top_k` different experts, drawn
    from all, or from `most_groups` of `groups` neighbouring groups of equal size, which are drawn before."""
    if experts % parts:
        raise ClusterError(
            f"{experts} experts over {parts} parts", f"expected equal shares, but {experts} / {parts} is not whole",
            "Use a divisor of the number of experts.",
        )  # fmt: skip
    if experts % groups or not 1 <= most_groups <= groups:
        problem = "expected equal groups, and one to all of them for a token"
        raise ClusterError(f"{most_groups} of {groups} groups of {experts} experts", problem, "Correct the routing.")
    if not 1 <= top_k <= experts * most_groups // groups:
        problem = "expected 1 to all of those that a token may go to"
        raise ClusterError(f"top {top_k} of {experts * most_groups // groups} experts", problem, "Correct the routing.")
    if most_groups == groups:
        return parts * (1 - comb(experts - experts // parts, top_k) / comb(experts, top_k))
    return _limited(parts, experts, top_k, groups, most_groups)


@cache
def _limited(parts: int, experts: int, top_k: int, groups: int, most_groups: int) -> float:
    """Summed over parts; of one part the chosen groups are counted by how many of its experts they hold."""
    own, each, drawn = experts // parts, experts // groups, experts * most_groups // groups
    met = 0.0
    for part in range(parts):
        ways = {(0, 0): 1}
        for group in range(groups):
            held = max(0, min((part + 1) * own, (group + 1) * each) - max(part * own, group * each))
            for (chosen, inside), count in list(ways.items()):
                ways[chosen + 1, inside + held] = ways.get((chosen + 1, inside + held), 0) + count
        missed = sum(c * comb(drawn - inside, top_k) for (chosen, inside), c in ways.items() if chosen == most_groups)
        met += 1 - missed / (comb(groups, most_groups) * comb(drawn, top_k))
    return met


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
