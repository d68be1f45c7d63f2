"""No bound is above the simulated step of any candidate, and none that fits is said not to: 10,000 at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hpsearch.estimate import memory
from hpsearch.estimate.estimate import assembled, blocks
from hpsearch.estimate.memory import RESERVE, context_bytes
from hpsearch.space import Space
from hpsearch.space.bound import Pipes
from hpsearch.space.prices import Prices
from hpsearch.space.space import Row
from tests.space.drawn import Candidate, a_space, candidates
from tests.space.naive import step_s

Floats = NDArray[np.float64]
SEEDS, INSIDES, ROWS, CUTS = 100, 3, 4, 32
SLACK = 1 + 1e-9


@dataclass
class Tight(Prices):
    """Prices whose devices have just the room that each candidate needs."""

    room_bytes: Floats = field(default_factory=lambda: np.zeros(0))

    def _pipes(self, members: list[tuple[int, Row]], again: float) -> Pipes:
        """Of fewer members, some were just said not to fit, and the others do not matter."""
        room = self.room_bytes if len(members) == len(self.room_bytes) else np.full(len(members), 1e18)
        return replace(super()._pipes(members, again), room_bytes=room)


@dataclass(frozen=True)
class Held:
    """One candidate beside its bounds."""

    candidate: Candidate
    step_s: float
    bounds: dict[str, float]

    @property
    def broken(self) -> list[str]:
        return [f"{name} {bound:.9g} > {self.step_s:.9g}" for name, bound in self.bounds.items()
                if not bound <= self.step_s * SLACK]  # fmt: skip


def held(space: Space, group: list[Candidate], prices: Tight) -> Iterator[Held]:
    """`group`: candidates of one inside and one outside."""
    inside, row = group[0].inside, group[0].row
    number = prices.numbers[inside] if inside in prices.numbers else prices.price(inside)
    steps, rooms, priced = [], [], {}
    for one in group:
        how = one.layout.recompute
        if how not in priced:
            priced[how] = blocks(space.shape, one.layout, space.cluster)
        works, seconds = priced[how]
        steps.append(step_s(assembled(space.shape, one.layout, space.cluster, works, seconds), prices.rates))
        peak = memory(space.shape, one.layout, works=works).peak_bytes
        rooms.append((peak * (1 + 1e-12) - context_bytes(one.layout)) / (1 + RESERVE))
    prices.room_bytes = np.array(rooms)
    once, members = prices.around(number, row).once_s, [(number, row)] * len(group)
    endless, _ = prices.second_bound(members, np.full(len(group), np.inf))
    cutoff, _ = prices.second_bound(members, np.array(steps) * SLACK - once)
    common = {
        "spread": prices.spread_s(number),
        "first": float(prices.first_bound(number, np.array([row]))[0]),
        "sharded": prices.sharded_bound(number, row),
    }
    for one, seconds, free, below in zip(group, steps, endless, cutoff, strict=True):
        yield Held(one, seconds, common | {"second": float(free + once), "second, cut off": float(below + once)})


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_bound_is_above_a_simulated_step(seed: int) -> None:
    draw = random.Random(seed)
    space = a_space(draw)
    prices = Tight(space)
    found = [one for group in candidates(draw, space, INSIDES, ROWS, CUTS) for one in held(space, group, prices)]
    broken = [f"{', '.join(one.broken)}: {one.candidate.layout}" for one in found if one.broken]
    assert not broken, f"{len(broken)} of {len(found)} on {space.cluster.name}, {space.shape}\n" + broken[0]
