"""No bound is above the simulated step of any candidate, and none that fits is said not to: 10,000 at random."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hpsearch.cluster.efficiency import Efficiency
from hpsearch.estimate import memory
from hpsearch.estimate.estimate import Priced, assembled, blocks
from hpsearch.estimate.memory import RESERVE, context_bytes
from hpsearch.estimate.price import Seconds
from hpsearch.estimate.work import Work
from hpsearch.space import Space
from hpsearch.space.bound import Pipes
from hpsearch.space.prices import Prices, is_dealt
from hpsearch.space.rough import Looks
from hpsearch.space.rules import Rules
from hpsearch.space.space import Row, Slot
from tests.space.alone import alone_s
from tests.space.drawn import Candidate, a_space, candidates
from tests.space.naive import step_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SEEDS, INSIDES, ROWS, CUTS = 170, 3, 4, 32
SLACK = 1 + 1e-9


@dataclass
class Tight(Prices):
    """Prices whose devices have just the room that each candidate needs."""

    room_bytes: Floats = field(default_factory=lambda: np.zeros(0))

    def _pipes(self, members: list[tuple[int, Row]], again: float) -> Pipes:
        """Of fewer members, some were just said not to fit, and the others do not matter."""
        room = self.room_bytes if len(members) == len(self.room_bytes) else np.full(len(members), 1e18)
        return replace(super()._pipes(members, again), room_bytes=room)

    def _looks(self, numbers: Ints, rows: Ints, plain: bool) -> Looks:
        return replace(super()._looks(numbers, rows, plain), room_bytes=self.room_bytes)


@dataclass(frozen=True)
class Held:
    """One candidate: each bound beside what it may not be above."""

    candidate: Candidate
    bounds: dict[str, tuple[float, float]]

    @property
    def broken(self) -> list[str]:
        return [f"{name} {bound:.9g} > {truth:.9g}" for name, (bound, truth) in self.bounds.items()
                if not bound <= truth * SLACK]  # fmt: skip


def held(space: Space, group: list[Candidate], prices: Tight) -> Iterator[Held]:
    """`group`: candidates of one inside and one outside."""
    inside, row = group[0].inside, group[0].row
    number = prices.price(inside)
    made, priced = list[Priced](), dict[str, tuple[dict[str, Work], dict[str, Seconds]]]()
    peaks = []
    for one in group:
        how = one.layout.recompute
        if how not in priced:
            priced[how] = blocks(space.shape, one.layout, space.cluster)
        made.append(assembled(space.shape, one.layout, space.cluster, *priced[how]))
        peaks.append(memory(space.shape, one.layout, works=priced[how][0]).peak_bytes)
    steps = [step_s(one, prices.rates) for one in made]
    prices.room_bytes = (np.array(peaks) * (1 + 1e-12) - context_bytes(group[0].layout)) / (1 + RESERVE)
    once, members = prices.around(number, row).once_s, [(number, row)] * len(group)
    how = prices.dealt_bound if is_dealt(row) else prices.second_bound
    endless, _ = how(members, np.full(len(group), np.inf))
    cutoff, _ = how(members, np.array(steps) * SLACK - once)
    same = np.full(len(group), number), np.array([row] * len(group))
    rough = prices.rough_bound(*same)
    plain = prices.rough_bound(*same, plain=True) if space.base.fused or row[4] != 3 else rough
    whole = {"spread": prices.spread_s(number), "floor": prices.floor_s}
    for i, one in enumerate(group):
        device = replace(space.cluster.device, memory_bytes=int(peaks[i]) + 1)
        prices.space = replace(space, cluster=replace(space.cluster, device=device))
        first = float(prices.first_bound(number, np.array([row]))[0])
        bounds = whole | {
            "first": first,
            "rough": rough[i],
            "rough, without gathers": plain[i],
            "second": endless[i] + once,
            "second, cut off": cutoff[i] + once,
        }
        least = once_s(made[i], prices.rates)
        yield Held(one, {name: (float(bound), steps[i]) for name, bound in bounds.items()} | {
            "once": (once, least), "first without its pipeline": (least_once_s(prices, number, row), least),
        })  # fmt: skip
    prices.space = space


def once_s(made: Priced, rates: Efficiency) -> float:
    """What a step adds to its pipeline, if that is so long that it hides all it can."""
    forward, backward = made.chunk_seconds(rates)
    return made.around(0.0, 1e9 * forward, 1e9 * backward, rates)[0]


def least_once_s(prices: Prices, number: int, row: Row) -> float:
    """What the first bound adds to its pipeline."""
    slot = Slot.of(prices.insides[number])
    return float(prices.least_once_s(slot, prices.wholes(slot), 0, np.array([row]))[0])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_bound_is_above_a_simulated_step(seed: int) -> None:
    draw = random.Random(seed)
    space = a_space(draw)
    prices = Tight(space)
    found = [one for group in candidates(draw, space, INSIDES, ROWS, CUTS) for one in held(space, group, prices)]
    broken = [f"{', '.join(one.broken)}: {one.candidate.layout}" for one in found if one.broken]
    assert not broken, f"{len(broken)} of {len(found)} on {space.cluster.name}, {space.shape}\n" + broken[0]


@pytest.mark.parametrize("seed", range(0, SEEDS, 5))
def test_shared_blocks_are_those_of_each_layout(seed: int) -> None:
    """Works to the last number, seconds as exactly as products of other shapes beside them leave them."""
    draw = random.Random(seed)
    space = a_space(draw)
    prices = Prices(space)
    for inside in draw.sample(list(space.insides(Rules())), 12):
        works, seconds = blocks(space.shape, inside.layout(space.base), space.cluster)
        made = prices.inners[prices.price(inside)]
        assert made.works == works
        for name, one in seconds.items():
            mine = made.seconds[name]
            for vector, truth in (
                (mine.forward, one.forward),
                (mine.backward, one.backward),
                (mine.repeat, one.repeat),
            ):
                assert vector == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("seed", range(0, SEEDS, 10))
def test_any_numbers_of_stages_together_are_bounded_as_each_alone(seed: int) -> None:
    draw = random.Random(seed)
    space = a_space(draw)
    prices = Prices(space)
    groups = [group[0] for group in candidates(draw, space, 6, 6, 1)]
    members = [(prices.price(one.inside), one.row) for one in groups if is_dealt(one.row)]
    together, cuts = prices.dealt_bound(members, np.full(len(members), np.inf))
    for one, bound_s, cut in zip(members, together, cuts, strict=True):
        assert bound_s >= alone_s(prices, one) * (1 - 2e-3)  # more, where layers are computed again whole
        assert not np.isfinite(bound_s) or (len(cut) == one[1][0] and sum(cut) == space.shape.layers and min(cut) > 0)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(5, SEEDS, 5))]
)
def test_blocks_of_stages_exclude_nothing_that_stages_do_not(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits just below and above what each layout takes at least."""
    draw = random.Random(seed)
    space = a_space(draw)
    space = replace(space, shape=replace(space.shape, pattern=space.shape.pattern[:1] * space.shape.layers))
    prices, blocks = Prices(space), sys.modules["hpsearch.space.dealing"]
    groups = [group[0] for group in candidates(draw, space, 6, 6, 1)]
    members = [(prices.price(one.inside), one.row) for one in groups if is_dealt(one.row)]
    least, _ = prices.dealt_bound(members, np.full(len(members), np.inf))
    for factor in (0.8, 0.9, 0.99, 1.001, 1.01, 1.1, 1.3):
        limit = np.where(np.isfinite(least), least, 1.0) * factor
        monkeypatch.setattr(blocks, "BLOCKS", 1000)
        alone, _ = prices.dealt_bound(members, limit)
        monkeypatch.setattr(blocks, "BLOCKS", draw.choice((1, 2, 3)))
        together, _ = prices.dealt_bound(members, limit)
        assert (alone == together).all()
