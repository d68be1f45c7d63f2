"""Prices that are wrong: the step of a layout simulated again while every term is off by a factor of its own.

Terms: device compute (matmuls, experts, attention), memory-bound kernels, the host, and the links of each tier; besides
them, how evenly tokens go to experts. What is dearer makes no step shorter: pipelines are longest chains, and what a
longer backward hides of a reduction is less than it adds. So the worst of all prices within a share is all of them
dearest at once, and the layout with the best worst case is the best one there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpsearch.aim.narrow import mesh_of
from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency, OwnNumber, doubts_of, efficiency_of
from hpsearch.cluster.tier import Tier
from hpsearch.estimate import ModelShape, ParallelLayout, Priced, price
from hpsearch.estimate.band import STATED, band
from hpsearch.estimate.pipeline import text
from hpsearch.schedule import schedules_s
from hpsearch.space import Choice, Found, Space
from hpsearch.space.best import SIMPLER_WITHIN, simplest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SHARE = 0.1
"""How far a price may be off."""
DRAWS = 1000
LEVELS = 5
"""Factors that links are drawn from, evenly spaced: layouts are priced once for each combination of them."""
TERMS: dict[str, tuple[str, ...]] = {"compute": ("clock",), "memory": ("moved",), "host": ("kernel_s", "step_s")}
"""Numbers of the cost model that a term scales."""


@dataclass(frozen=True)
class Draw:
    """Factors of prices, one row for each simulation."""

    terms: Floats
    """[draws, terms]."""
    links: Ints
    """[draws, tiers]: which of the levels."""
    levels: Floats

    @staticmethod
    def of(cluster: Cluster, draws: int, seed: int, share: float = SHARE) -> Draw:
        """Independent and even within `share` of 1; `seed` decides."""
        rng = np.random.default_rng(seed)
        terms = rng.uniform(1 - share, 1 + share, (draws, len(TERMS)))
        links = rng.integers(0, LEVELS, (draws, len(cluster.tiers)))
        return Draw(terms, links, np.linspace(1 - share, 1 + share, LEVELS))


def dearer_tier(tier: Tier, factor: float) -> Tier:
    """Links on which everything takes `factor` times as long."""

    def longer(seconds: float) -> float:
        return factor * seconds

    return replace(
        tier, bytes_per_s=tier.bytes_per_s / factor, latency_s=longer(tier.latency_s),
        curves=tuple(replace(c, seconds=tuple(map(longer, c.seconds))) for c in tier.curves),
        protocols=tuple(
            replace(
                p, start_s=longer(p.start_s), ring_inner_s=longer(p.ring_inner_s), ring_outer_s=longer(p.ring_outer_s),
                tree_inner_s=longer(p.tree_inner_s), tree_outer_s=longer(p.tree_outer_s),
                channel_bytes_per_s=None if p.channel_bytes_per_s is None else p.channel_bytes_per_s / factor,
            )
            for p in tier.protocols
        ),
        switches=None if tier.switches is None else replace(tier.switches, start_s=longer(tier.switches.start_s)),
        switch_tree=None if tier.switch_tree is None else replace(
            tier.switch_tree, start_s=longer(tier.switch_tree.start_s), outer_s=longer(tier.switch_tree.outer_s)
        ),
    )  # fmt: skip


def dearer(cluster: Cluster, terms: Sequence[float], tiers: Sequence[float]) -> Cluster:
    """`cluster` with the prices of each term and tier times a factor of its own."""
    rates = efficiency_of(cluster.device.name, cluster.efficiency)
    scaled = _scaled(rates, terms)
    known = {number.name: number for number in cluster.efficiency}
    for names in TERMS.values():
        for name in names:
            error = known[name].error if name in known else 0.0
            known[name] = OwnNumber(name, getattr(scaled, name), error)
    own = tuple(known[name] for name in sorted(known))
    links = tuple(dearer_tier(tier, factor) for tier, factor in zip(cluster.tiers, tiers, strict=True))
    return replace(cluster, tiers=links, efficiency=own)


def _scaled(rates: Efficiency, terms: Sequence[float]) -> Efficiency:
    factors = {name: f for names, f in zip(TERMS.values(), terms, strict=True) for name in names}
    return replace(rates, **{name: getattr(rates, name) * factor for name, factor in factors.items()})


def worst(space: Space, *, share: float = SHARE, imbalance: float = 1.0) -> Space:
    """`space` at its dearest: every price `share` higher, one expert rank with `imbalance` times the average tokens."""
    up = 1 + share
    cluster = dearer(space.cluster, [up] * len(TERMS), [up] * len(space.cluster.tiers))
    return replace(space, cluster=cluster, base=replace(space.base, imbalance=imbalance))


def again_s(shape: ModelShape, layout: ParallelLayout, cluster: Cluster, draw: Draw) -> Floats:
    """Seconds of the step of a layout in each simulation, every micro-batch on the timeline."""
    rates = efficiency_of(cluster.device.name, cluster.efficiency)
    terms = [_scaled(rates, row) for row in draw.terms.tolist()]
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, levels in enumerate(draw.links.tolist()):
        groups[tuple(levels)].append(i)
    priced: list[Priced | None] = [None] * len(terms)
    for levels, members in sorted(groups.items()):
        links = [dearer_tier(t, draw.levels[level]) for t, level in zip(cluster.tiers, levels, strict=True)]
        one = price(shape, layout, replace(cluster, tiers=tuple(links)))
        for i in members:
            priced[i] = one
    return _steps([one for one in priced if one is not None], terms)


def _steps(priced: list[Priced], rates: list[Efficiency]) -> Floats:
    """Of one layout, priced many times."""
    layout = priced[0].layout
    parts = [one.split_seconds(e) for one, e in zip(priced, rates, strict=True)]
    forward, backward, weight = (np.array([part[i] for part in parts]) for i in range(3))
    if layout.pp == 1:
        pipes = layout.micro_batches * (forward + backward + weight).sum(axis=1)
    else:
        hops = np.array([one.hop_s * e.links for one, e in zip(priced, rates, strict=True)])
        schedule = text(layout.schedule_kind, layout.pp, max(layout.vpp, 1), layout.micro_batches)
        pipes = schedules_s(schedule, forward, backward, weight, hops)
    rows = zip(priced, pipes.tolist(), forward, backward + weight, rates, strict=True)
    return np.array([one.around(pipe, f, b, e)[0] for one, pipe, f, b, e in rows])


def band_of(space: Space, layout: ParallelLayout) -> tuple[float, float]:
    """The plan's band around its simulated step."""
    cluster, rates = space.cluster, efficiency_of(space.cluster.device.name, space.cluster.efficiency)
    one = price(space.shape, layout, cluster)
    f, i, w = one.split_seconds(rates)
    step_s = float(_steps([one], [rates])[0])
    parts = one.around(step_s - (one.around(0.0, f, i + w, rates)[0]), f, i + w, rates)[1]
    return band(step_s, parts, doubts_of(cluster.device.name, cluster.efficiency), layout.low_precision)


@dataclass(frozen=True)
class Steadiness:
    """How a plan stands when prices are off."""

    draws: int
    seed: int
    low_s: float
    high_s: float
    """The plan's band."""
    inside: float
    """Share of simulations in the band."""
    least_s: float
    most_s: float


def steadiness(space: Space, layout: ParallelLayout, *, draws: int = DRAWS, seed: int = 0) -> Steadiness:
    """`draws` simulations of a plan with prices off by up to a tenth, each term on its own."""
    steps = again_s(space.shape, layout, space.cluster, Draw.of(space.cluster, draws, seed))
    low, high = band_of(space, layout)
    inside = float(((steps >= low) & (steps <= high)).mean())
    return Steadiness(draws, seed, low, high, inside, float(steps.min()), float(steps.max()))


@dataclass(frozen=True)
class Tie:
    """A plan beside the best one, in the same simulations."""

    choice: Choice
    slower: float
    """Than the best, as a share."""
    beaten: float
    """Share of simulations in which the best plan is faster."""

    @property
    def is_near(self) -> bool:
        return self.slower <= SIMPLER_WITHIN

    @property
    def is_open(self) -> bool:
        """Which of the two is faster is not known: the best one is in fewer simulations than a band holds."""
        return self.beaten < STATED


def ties(space: Space, found: Found, *, draws: int = DRAWS, seed: int = 0, most: int = 4) -> tuple[Tie, ...]:
    """The next best plans of other meshes that were solved, compared with the best one draw by draw."""
    draw = Draw.of(space.cluster, draws, seed)
    best = again_s(space.shape, found.best.layout, space.cluster, draw)
    seen, made = {mesh_of(found.best.layout)}, list[Tie]()
    for choice in found.tried:
        if mesh_of(choice.layout) in seen or len(made) == most:
            continue
        seen.add(mesh_of(choice.layout))
        other = again_s(space.shape, choice.layout, space.cluster, draw)
        made.append(Tie(choice, choice.step_s / found.best.step_s - 1, float((best < other).mean())))
    return tuple(made)


def steady(found: Found, others: Sequence[Tie]) -> Choice:
    """The simplest of the best plan and those that are nearly as fast, or not known to be slower."""
    alike = [found.best, *(one.choice for one in others if one.is_near or one.is_open)]
    layout = simplest(tuple(replace(one, step_s=found.best.step_s) for one in alike)).layout
    return next(one for one in alike if one.layout == layout)
