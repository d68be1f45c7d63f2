"""The best layout of a space, and the proof how good it is: bounds for all, exact prices for the few that may win.

    1. every inside is priced, every outside gets the bound of a pipeline without memory     (arrays)
    2. the most promising get the bound over all cuts and recomputed layers                  (arrays, in batches)
    3. of those, the most promising are cut, fitted into memory and simulated                (one by one)

until no bound is below the best simulated step. Nothing is dropped but by a bound, so the least bound left says how
much better any layout of the space could be.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate import ParallelLayout
from hpsearch.space.cutting import Cutting
from hpsearch.space.exact import Choice
from hpsearch.space.prices import Prices
from hpsearch.space.refusal import none_fits, none_is_legal
from hpsearch.space.rules import Rules
from hpsearch.space.space import IN_WORDS, Row, Space

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BATCH = 16384
"""Layouts whose second bound is computed together."""
SIMPLER_WITHIN = 0.01
"""A simpler layout this little slower is chosen over the best."""


@dataclass(frozen=True)
class Certificate:
    """What is proven about the best layout, for this cost model over this space."""

    space: str
    bound_s: float
    """No layout of the space takes less."""
    gap: float
    """(best - bound) / best."""
    considered: int
    pruned: int
    """Do not fit in memory, however cut and recomputed, or have a bound that is not below the best step."""
    solved: int
    """Cut, fitted and simulated."""
    refused: tuple[tuple[str, str, int], ...]
    """(rule, examples, how often)."""


@dataclass(frozen=True)
class Found:
    """The answer of a search."""

    best: Choice
    chosen: Choice
    """Simpler than the best and at most 1 % slower, or the best."""
    certificate: Certificate
    tried: tuple[Choice, ...]
    """Everything simulated, the fastest first."""
    seconds: float
    """Of the search so far."""


Entry = tuple[float, int, Row, tuple[int, ...]]
"""Bound, inside, outside, cut."""


@dataclass
class _Candidates:
    """Layouts as columns, in order of their first bound."""

    inside: Ints
    outside: Ints
    """[layouts, 6]: a row each."""
    bound_s: Floats

    def __len__(self) -> int:
        return len(self.inside)

    def at(self, i: int) -> tuple[int, Row]:
        pp, vpp, dp, count, zero, shard_ranks = self.outside[i].tolist()
        return int(self.inside[i]), (pp, vpp, dp, count, zero, shard_ranks)


@dataclass
class _Search:
    prices: Prices
    rules: Rules = field(default_factory=Rules)
    tried: list[tuple[float, int, Row, Choice]] = field(default_factory=list)
    solved: set[tuple[int, Row]] = field(default_factory=set)
    considered: int = 0
    least_tried_s: float = float("inf")
    """Least that is proven of those that were solved."""

    @property
    def best_s(self) -> float:
        return self.tried[0][0] if self.tried else float("inf")

    def enumerate(self) -> _Candidates:
        """Prices every inside, and bounds every layout without looking at its memory. Layouts of insides that cannot be
        better than an answer at hand, even spread over all devices without any loss, are only counted."""
        space, outsides = self.prices.space, dict[tuple[int, ...], Ints]()
        parts: list[tuple[Ints, Ints, Floats]] = []
        ahead, hopeless = FIRST, None
        for inside in space.insides(self.rules):
            key = (inside.tp, inside.cp, inside.ep, inside.etp, inside.micro_batch)
            if key not in outsides:
                outsides[key] = space.outsides(inside, self.rules)
            rows = outsides[key]
            if not len(rows):
                continue
            self.considered += len(rows)
            alike = replace(inside, recompute="full")
            if alike == hopeless:  # a part computed again by every layer only takes longer
                continue
            number = self.prices.price(inside)
            if self.prices.spread_s(number) >= self.best_s:
                hopeless = alike if inside == alike else hopeless
            else:
                bound = self.prices.first_bound(number, rows)
                some = np.flatnonzero(bound < self.best_s)
                if len(some):
                    parts.append((np.full(len(some), number, dtype=np.int64), rows[some], bound[some]))
                if not self.tried and len(parts) >= ahead:
                    self._look_ahead(parts)
                    ahead *= 3
        if not self.considered:
            raise none_is_legal(space)
        return _sorted(parts)

    def _look_ahead(self, parts: list[tuple[Ints, Ints, Floats]]) -> None:
        """Some answer, to measure the rest by: where one fits at all, one fits with the smallest micro-batch and any
        number of layers recomputed. The most promising of each tp, ep and pipeline."""
        small = [part for part in parts if self._is_small(int(part[0][0]))]
        candidates, first = _sorted(small), dict[tuple[int, ...], int]()
        for i in range(len(candidates)):
            number, (pp, vpp, *_) = candidates.at(i)
            inside = self.prices.insides[number]
            if vpp == 1:
                first.setdefault((inside.tp, inside.ep, pp), i)
            if len(first) >= SEEDS:
                break
        for entry in sorted(self.refine([candidates.at(i) for i in first.values()]))[:TRIES]:
            self.solve(*entry)

    def _is_small(self, number: int) -> bool:
        inside = self.prices.insides[number]
        return inside.recompute == "full" and inside.micro_batch == self.prices.insides[0].micro_batch

    def refine(self, chosen: list[tuple[int, Row]]) -> list[Entry]:
        """(bound over all cuts and recomputed layers, layout, cut) of those that fit and may be better than the best so
        far."""
        groups: dict[tuple[int, int], list[tuple[int, Row]]] = {}
        for number, row in chosen:
            if (number, row) not in self.solved and self.prices.sharded_bound(number, row) < self.best_s:
                groups.setdefault(row[:2], []).append((number, row))
        found: list[Entry] = []
        for _, members in sorted(groups.items()):
            once = np.array([self.prices.around(*one).once_s for one in members])
            pipe_s, cuts = self.prices.second_bound(members, self.best_s - once)
            for one, bound_s, cut in zip(members, (pipe_s + once).tolist(), cuts.tolist(), strict=True):
                if bound_s < self.best_s:
                    found.append((bound_s, *one, tuple(cut)))
        return found

    def solve(self, bound_s: float, number: int, row: Row, cut: tuple[int, ...]) -> bool:
        """Cuts, fits and simulates a layout; whether it is the best so far."""
        self.solved.add((number, row))
        space, before = self.prices.space, self.best_s
        layout = space.layout(self.prices.insides[number], row, cut)
        cutting = Cutting(space, layout, self.prices.inner(number, row), self.prices.rates)
        at_hand, least_s = cutting.solved(before)
        self.least_tried_s = min(self.least_tried_s, bound_s if least_s is None else least_s)
        if at_hand is None:
            return False
        self.tried.append((at_hand.step_s, number, row, at_hand))
        self.tried.sort(key=lambda one: one[:3])
        return at_hand.step_s < before


def answers(space: Space, *, gap: float = 0.0, time_limit_s: float = float("inf")) -> Iterator[Found]:
    """Better and better answers; the last one is within `gap` of the bound, unless time ran out.

    Raises LegalityError or InfeasibleError when pins or rules leave nothing, InfeasibleError when nothing fits.
    """
    started = time.monotonic()
    search = _Search(Prices(space))
    candidates = search.enumerate()
    at, heap = 0, list[Entry]()

    def left_s() -> tuple[float, float]:
        """Least bound of those not refined, and of those refined."""
        return candidates.bound_s[at] if at < len(candidates) else float("inf"), heap[0][0] if heap else float("inf")

    def found() -> Found:
        least = float(min(*left_s(), search.least_tried_s, search.best_s))
        solved, refused = len(search.solved), tuple(search.rules.rows())
        proof = Certificate(
            IN_WORDS, least, 1 - least / search.best_s, search.considered, search.considered - solved, solved, refused
        )
        tried = tuple(choice for *_, choice in search.tried)
        return Found(tried[0], simplest(tried), proof, tried, time.monotonic() - started)

    if search.tried:
        yield found()
    while time.monotonic() - started < time_limit_s or not search.tried:
        rest, head = left_s()
        if min(rest, head) >= search.best_s * (1 - gap) or min(rest, head) == float("inf"):
            break
        if rest > head:
            if search.solve(*heapq.heappop(heap)):
                yield found()
            continue
        stop = min(at + (BATCH if search.tried else SEEDS), len(candidates))
        for entry in search.refine(
            [candidates.at(i) for i in range(at, stop) if candidates.bound_s[i] < search.best_s]
        ):
            heapq.heappush(heap, entry)
        at = stop
    if not search.tried:
        raise none_fits(search.prices)
    yield found()


FIRST, SEEDS, TRIES = 48, 256, 6
"""After so many insides, so many layouts are bounded and so many of them solved, to measure the rest by."""


def _sorted(parts: list[tuple[Ints, Ints, Floats]]) -> _Candidates:
    if not parts:
        return _Candidates(np.zeros(0, dtype=np.int64), np.zeros((0, 6), dtype=np.int64), np.zeros(0))
    inside, outside, bound = (np.concatenate([part[i] for part in parts]) for i in range(3))
    order = np.argsort(bound, kind="stable")
    return _Candidates(inside[order], outside[order], bound[order])


def best(space: Space, *, gap: float = 0.0, time_limit_s: float = float("inf")) -> Found:
    """The last of `answers`."""
    *_, last = answers(space, gap=gap, time_limit_s=time_limit_s)
    return last


def simplest(tried: tuple[Choice, ...]) -> Choice:
    """The simplest of the layouts at most 1 % slower than the first."""
    near = [one for one in tried if one.step_s <= tried[0].step_s * (1 + SIMPLER_WITHIN)]
    return min(near, key=lambda one: (_complexity(one.layout), one.step_s))


def _complexity(layout: ParallelLayout) -> tuple[int, ...]:
    """Fewer mesh axes, then no virtual stages, equal stages, no recompute, a lower ZeRO level."""
    axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep))
    uneven = len(set(layout.cut)) > 1
    return axes, layout.vpp, int(uneven), int(layout.recompute != "none"), layout.zero
