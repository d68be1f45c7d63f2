"""Ways to run one collective over several tiers, each priced; the cheapest is the price.

switches      all_reduce summed by the switches of one tier, where they can and no curve of such a group was measured
flat          one ring over the slowest tier the group spans
hierarchical  inner reduce-scatter, outer all-reduce on the piece left, inner all-gather; the halves of it for
              all_gather and reduce_scatter; one exchange a tier for all_to_all
pipelined     the hierarchical all-reduce with its tiers at work at the same time, where the cluster says how well
direct        all_to_all in which every pair exchanges at once; each tier carries what leaves the tier inside it

library       what one call runs across a tier whose protocols are known: one ring, or for all_reduce a tree, of ranks
              or of the sums that switches make in each domain; then no other way is open to all_gather, reduce_scatter
              and all_reduce

Inner tiers can be merged into one flat step, so that a tier as fast as its neighbour costs no step of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from hpsearch.cluster.curve import Curve, Floats, price_from_curves, weakest
from hpsearch.cluster.protocol import Span, ring_seconds, switch_tree_seconds, tree_seconds
from hpsearch.cluster.tier import GroupShape, Tier, curves_alike, leaf_seconds


@dataclass(frozen=True)
class Price:
    """Seconds of one call on every rank, what they rest on, and which way the collective runs."""

    seconds: float
    basis: str
    """exact, measured, published or modelled: the weakest of the parts."""
    how: str


@dataclass(frozen=True)
class Links:
    """The tiers of a cluster with what prices need beside them."""

    tiers: tuple[Tier, ...]
    launch_s: float
    curves: list[list[tuple[Curve, GroupShape]]]
    """Of each tier, with the shape of the groups they were measured on."""

    def leaf(self, kind: str, shape: GroupShape, nbytes: Floats) -> tuple[Floats, str, str]:
        top = shape.outermost
        shared = self._shared(kind, top)
        if shared:
            seconds, _, how = price_from_curves(shared, shape.size, nbytes)
            return seconds, "modelled", f"{kind} {self.tiers[top].name} x{shape.size} ({how})"
        return leaf_seconds(kind, self.tiers[top], self.curves[top], shape, nbytes, self.launch_s)

    def _shared(self, kind: str, top: int) -> tuple[Curve, ...]:
        """Curves of the inner tier that the tier is like."""
        like = self.tiers[top].like
        inner = [curves for tier, curves in zip(self.tiers, self.curves, strict=True) if tier.name == like]
        return tuple(curve for curves in inner for curve, _ in curves if curve.kind == kind)


Way = tuple[Floats, str, str]
"""Seconds for each size, basis, wording."""


def ways(links: Links, kind: str, shape: GroupShape, nbytes: Floats) -> list[Way]:
    """Every way to run the collective, the flat one first."""
    found = [links.leaf(kind, shape, nbytes)]
    found += _switched(links, kind, shape, nbytes)
    span = _span(links, kind, shape)
    if span is not None:
        measured = curves_alike(kind, links.curves[shape.outermost], shape)
        return found if measured else _library(links, kind, shape, span, nbytes)
    for count in range(1, len(shape.cuts) + 1):
        for cuts in combinations(shape.cuts, count):
            parts = _parts(shape, cuts)
            if kind == "all_to_all":
                found.append(_in_turn([links.leaf(kind, part, nbytes) for part in parts]))
            elif kind == "all_reduce":
                found.extend(_all_reduce(links, parts, nbytes))
            else:
                found.append(_one_way(links, kind, parts, nbytes))
    if kind == "all_to_all" and shape.cuts and not links.tiers[shape.outermost].like:
        found.append(_direct(links, shape, nbytes))
    return found


def cheapest(found: list[Way], index: int = 0) -> Price:
    """The price of the cheapest way for the `index`-th size; the first of equals."""
    seconds, basis, how = min(found, key=lambda way: float(way[0][index]))
    return Price(float(seconds[index]), basis, how)


def _parts(shape: GroupShape, cuts: tuple[int, ...]) -> list[GroupShape]:
    """Subgroups from the innermost to the outermost, one for each stretch of tiers between cuts."""
    edges = (-1, *cuts, shape.outermost)
    return [shape.inside(low, high) for low, high in pairwise(edges)]


def _in_turn(steps: list[Way]) -> Way:
    seconds = np.sum([s for s, _, _ in steps], axis=0)
    return seconds, weakest([basis for _, basis, _ in steps]), " + ".join(how for _, _, how in steps)


def _one_way(links: Links, kind: str, parts: list[GroupShape], nbytes: Floats) -> Way:
    """all_gather or reduce_scatter, tier by tier: the outer step works on the piece that the inner step leaves."""
    steps, piece = [], nbytes
    for part in parts:
        steps.append(links.leaf(kind, part, piece))
        piece = piece / part.size
    return _in_turn(steps if kind == "reduce_scatter" else steps[::-1])


def _all_reduce(links: Links, parts: list[GroupShape], nbytes: Floats) -> list[Way]:
    """Hierarchical, and pipelined when the outermost tier says how well."""
    down, up, piece = [], [], nbytes
    for part in parts[:-1]:
        down.append(links.leaf("reduce_scatter", part, piece))
        up.append(links.leaf("all_gather", part, piece))
        piece = piece / part.size
    outer = links.leaf("all_reduce", parts[-1], piece)
    found = [_in_turn([*down, outer, *up[::-1]])]
    overlap = links.tiers[parts[-1].outermost].pipelining
    if overlap is not None:
        found.append(_pipelined(links, parts, _in_turn([*down, *up[::-1]]), outer, overlap))
    return found


def _pipelined(links: Links, parts: list[GroupShape], inner: Way, outer: Way, overlap: float) -> Way:
    """Latencies add up; of the time that grows with bytes the slower part counts, divided by `overlap`."""
    zero = np.zeros(1)
    inner_latency = sum(
        float(links.leaf(kind, part, zero)[0][0]) for part in parts[:-1] for kind in ("reduce_scatter", "all_gather")
    )
    outer_latency = float(links.leaf("all_reduce", parts[-1], zero)[0][0])
    busy = np.maximum(inner[0] - inner_latency, outer[0] - outer_latency) / overlap
    how = f"pipelined: {outer[2]} over {inner[2]}"
    return inner_latency + outer_latency + busy, "modelled", how


def _span(links: Links, kind: str, shape: GroupShape) -> Span | None:
    """The group as the protocols of its outermost tier see it; None where there are none or it lies unevenly."""
    top = links.tiers[shape.outermost]
    domains = shape.count(shape.outermost - 1)
    if not top.protocols or kind == "all_to_all" or domains < 0:
        return None
    members = shape.size // domains
    if members == 1:
        return Span(shape.size, domains, top.rate)
    return Span(shape.size, domains, members * top.rate, links.tiers[shape.outermost - 1].rate_within(members))


def _library(links: Links, kind: str, shape: GroupShape, span: Span, nbytes: Floats) -> list[Way]:
    """A ring of each protocol, and for all_reduce a tree of each and one of switches where they add up; none starts
    before the device's collectives do."""
    top = links.tiers[shape.outermost]
    late = [max(0.0, links.launch_s - p.start_s) for p in top.protocols]
    words = f"{kind} {top.name} x{span.size}"
    found = []
    for p, wait in zip(top.protocols, late, strict=True):
        found.append((wait + ring_seconds(p, kind, span, nbytes), "modelled", f"{words} ({p.name} ring)"))
        if kind == "all_reduce":
            found.append((wait + tree_seconds(p, span, nbytes), "modelled", f"{words} ({p.name} tree)"))
    switches = top.switch_tree
    if kind == "all_reduce" and switches is not None and span.members >= switches.members:
        inside, _, _ = links.leaf(kind, shape.inside(-1, shape.outermost - 1), nbytes)
        found.append((switch_tree_seconds(switches, span, inside, nbytes), "modelled", f"{words} (switch tree)"))
    return found


def _switched(links: Links, kind: str, shape: GroupShape, nbytes: Floats) -> list[Way]:
    """The sum made by the switches of the tier, unless what such a group takes was measured."""
    top = links.tiers[shape.outermost]
    switches = top.switches
    known = {curve.size for curve in curves_alike(kind, links.curves[shape.outermost], shape)}
    if kind != "all_reduce" or switches is None or shape.size < switches.members or shape.size in known:
        return []
    seconds = max(switches.start_s, links.launch_s) + nbytes / (switches.share * top.bytes_per_s)
    return [(seconds, "modelled", f"{kind} {top.name} x{shape.size} (switches)")]


def _direct(links: Links, shape: GroupShape, nbytes: Floats) -> Way:
    """All pairs at once: each tier carries the bytes for ranks outside the domain inside it, all tiers together."""
    top = links.tiers[shape.outermost]
    latency = links.launch_s + (shape.size - 1) * top.latency_s
    busy = np.zeros_like(nbytes)
    members = 1
    for t in (*shape.cuts, shape.outermost):
        inside = shape.size // shape.count(t)
        busy = np.maximum(busy, nbytes * (shape.size - members) / shape.size / links.tiers[t].rate_within(inside))
        members = inside
    return latency + busy, "modelled", f"direct all_to_all {top.name} x{shape.size}"
