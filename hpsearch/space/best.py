"""The best layout of a space, and the proof how good it is: bounds for all, exact prices for the few that may win.

    1. every inside is priced, every outside gets the bound of a pipeline without memory     (arrays)
    2. the most promising get a look at the memory of some rank                              (arrays, in batches)
    3. of those, the most promising get the bound over all cuts and recomputed layers        (arrays, in batches)
    4. of those, the most promising are cut, fitted into memory and simulated                (one by one)

until no bound is below the best simulated step. Nothing is dropped but by a bound, so the least bound left says how
much better any layout of the space could be.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate import ParallelLayout
from hpsearch.schedule import KINDS
from hpsearch.space.bound import PRECISION
from hpsearch.space.candidates import Candidates, Part, Some
from hpsearch.space.cutting import Cutting
from hpsearch.space.exact import Choice
from hpsearch.space.prices import Prices, dealt, is_dealt, others
from hpsearch.space.refusal import none_fits, none_in_time, none_is_legal
from hpsearch.space.rules import Rules
from hpsearch.space.space import IN_WORDS, ON_GROUPS, Row, Slot, Space, apart, layouts, names_of
from hpsearch.space.unlike import Placed, Unlike

Ints = NDArray[np.int64]
BATCH = 4096
"""Layouts whose bounds are computed together, at most."""
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
    left: int = 0
    """Neither excluded nor solved when the search ended; if it ended early, of those it had come to."""


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
Watch = Callable[[float, float], bool]
"""Called with the best step so far and the bound, in seconds; False ends the search with the best so far."""


@dataclass
class _Search:
    prices: Prices
    rules: Rules = field(default_factory=Rules)
    tried: list[tuple[float, int, Row, Choice]] = field(default_factory=list)
    solved: set[tuple[int, Row]] = field(default_factory=set)
    considered: int = 0
    least_tried_s: float = float("inf")
    """Least that is proven of those that were solved."""
    pool: list[tuple[float, int, Row]] = field(default_factory=list)
    """Looked at, not refined: bound, inside, outside."""
    heap: list[Entry] = field(default_factory=list)
    """Refined, not solved."""
    near: list[Entry] = field(default_factory=list)
    """Refined, and not better than the best so far, but nearly as good."""
    ways: dict[tuple[int, Row], tuple[Placed, ...]] = field(default_factory=dict)
    """To put refined layouts on groups of unlike nodes."""
    started: float = field(default_factory=lambda: time.monotonic())

    @property
    def best_s(self) -> float:
        return self.tried[0][0] if self.tried else float("inf")

    @cached_property
    def unlike(self) -> Unlike:
        return Unlike(self.prices)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self.prices.space.slots(self.rules))

    def opened(self, slot: Slot, told: Callable[[Ints], Ints] = apart) -> Iterator[Part]:
        """Every layout of a slot that may be better than an answer at hand, by its first bound. Others are counted.
        `told`: rows of one schedule each, of some rows."""
        each, experts, space = slot.count // len(slot.experts), range(len(slot.experts)), self.prices.space
        every = [space.outsides(slot.inside(which * each), self.rules) for which in experts]
        self.considered += each * sum(map(layouts, every))
        if not any(map(len, every)):
            return
        wholes = self.prices.wholes_below(slot, self.best_s)
        if wholes is None:
            return
        for which, rows in enumerate(every):
            if len(rows) and self.prices.least_spread_s(slot, wholes, which) < self.best_s:
                bound = self.prices.first_bounds(slot, wholes, which, rows, self.best_s)
                rows = told(rows[(bound < self.best_s).any(axis=0)])
                bound = self.prices.first_bounds(slot, wholes, which, rows, self.best_s)
                inside, row = np.nonzero(bound < self.best_s)
                if len(row):
                    yield Part(slot, rows, inside + which * each, row, bound[inside, row])

    def seed(self, goes_on: Callable[[], bool]) -> Iterator[bool]:
        """Some answers, to measure the rest by; one item for each: where one fits at all, one fits with the smallest
        micro-batch and any number of layers recomputed. The most promising of each tp, ep and pipeline."""
        fewest = min((slot.micro_batch for slot in self.slots), default=0)
        small = [slot for slot in self.slots if slot.micro_batch == fewest]
        for cp in sorted({slot.cp for slot in small}):
            firsts = {slot.tp: slot for slot in reversed(small) if slot.cp == cp}
            counted = self.considered
            parts = [part for slot in firsts.values() for part in self.opened(slot, dealt)]
            candidates = Candidates.of(parts, self.best_s)
            self.considered = counted
            some, chosen = candidates.some(0, len(candidates)), dict[tuple[int, ...], int]()
            for i, (slot, number, row) in enumerate(some):
                if number % (len(slot.kinds) * len(slot.recomputes)) == 0:
                    chosen.setdefault((slot.tp, number, row[0]), i)
                if len(chosen) >= SEEDS:
                    break
            usual = sorted(chosen, key=lambda one: one[2] > DEEP)
            for several in (usual[:AT_ONCE], usual[AT_ONCE:]):
                yield from self._tried_first(some.of([chosen[one] for one in several]), goes_on)
                if self.tried:
                    yield from self._tried_first(self._alike(list(firsts.values())), goes_on)
                    return

    def _alike(self, slots: list[Slot]) -> Some:
        """Layouts under other schedules, of slots split as the best so far is."""
        counted, tp = self.considered, self.tried[0][3].layout.tp
        parts = [part for slot in slots if slot.tp == tp for part in self.opened(slot, others)]
        candidates = Candidates.of(parts, self.best_s)
        self.considered = counted
        return candidates.some(0, AT_ONCE)

    def _tried_first(self, some: Some, goes_on: Callable[[], bool]) -> Iterator[bool]:
        """Glances at the most promising; one item for each that is the best so far."""
        self.look(some)
        for entry in sorted(self.refine(len(self.pool), lambda: True, ROUGHLY) or ())[:TRIES]:
            if self.tried and (entry[0] > self.best_s * (1 - NEAR_ENOUGH) or not goes_on()):
                return
            if self.glance(entry, goes_on if self.tried else lambda: True):
                yield True

    def look(self, chosen: Some) -> None:
        """Puts those of some layouts into the pool that may be better than the best so far."""
        wanted, inside = np.unique(chosen.inside, return_inverse=True)
        priced = [self.prices.price(slot.inside(at)) for slot, at in (chosen.insides[i] for i in wanted.tolist())]
        numbers = np.array(priced, dtype=np.int64)[inside]
        bound = np.maximum(chosen.bound_s, self.prices.first_look(numbers, chosen.rows))
        near = np.flatnonzero(bound < self.best_s).tolist()
        for bound_s, number, (_, _, row) in zip(
            bound[near].tolist(), numbers[near].tolist(), chosen.of(near), strict=True
        ):
            heapq.heappush(self.pool, (bound_s, number, row))

    def refine(self, count: int, goes_on: Callable[[], bool], precision: float = PRECISION) -> list[Entry] | None:
        """Of the `count` most promising of the pool, (bound over all cuts and recomputed layers, layout, cut) of those
        that fit and may be better than the best so far; None: had to end, and the pool is as before."""
        taken = [heapq.heappop(self.pool) for _ in range(min(count, len(self.pool)))]
        groups: dict[tuple[int, ...], list[tuple[int, Row]]] = {}
        known = {(number, row): bound_s for bound_s, number, row in taken if bound_s < self.best_s}
        for number, row in self.prices.with_gathers(list(known), self.best_s):
            if (number, row) not in self.solved:
                groups.setdefault(() if is_dealt(row) else (row[0], row[1], row[6]), []).append((number, row))
        found: list[Entry] = []
        for key, members in sorted(groups.items()):
            if not goes_on():
                self.pool = sorted([*self.pool, *taken])
                return None
            once = np.array([self.prices.around(*one).once_s for one in members])
            cutoff_s = self.best_s * (1 + SIMPLER_WITHIN) - once
            if key:
                pipe_s, cuts = self.prices.second_bound(members, cutoff_s)
            else:
                pipe_s, cuts = self.prices.dealt_bound(members, cutoff_s, precision)
            for one, bound_s, cut in zip(members, (pipe_s + once).tolist(), cuts, strict=True):
                if bound_s < self.best_s:
                    found.append((max(bound_s, known[one]), *one, cut))
                elif bound_s <= self.best_s * (1 + SIMPLER_WITHIN):
                    self.near.append((bound_s, *one, cut))
        return list(self._placed(found)) if self.prices.space.cluster.groups else found

    def _placed(self, entries: list[Entry]) -> Iterator[Entry]:
        """With the bound over all ways to put the stages on groups of unlike nodes; without those that it excludes."""
        for bound_s, number, row, cut in entries:
            ways = tuple(self.unlike.placed(number, row, cut, self.best_s))
            if ways:
                self.ways[number, row] = ways
                yield max(bound_s, ways[0].bound_s), number, row, cut

    def glance(self, entry: Entry, goes_on: Callable[[], bool]) -> bool:
        """A layout as it is, of which nothing is proven yet; whether it is the best so far."""
        _, number, row, cut = entry
        space, before = self.prices.space, self.best_s
        layout = space.layout(self.prices.insides[number], row, cut)
        cutting = Cutting(space, layout, self.prices.inner(number, row), self.prices.rates, goes_on=goes_on)
        for way in self.ways.get((number, row), ())[:1]:
            cutting = cutting.on(way)
        at_hand, _ = cutting.solved(0.0)
        if at_hand is None:
            return False
        self.tried = sorted([*self.tried, (at_hand.step_s, number, row, at_hand)], key=lambda one: one[:3])
        return at_hand.step_s < before

    def solve(self, entry: Entry, goes_on: Callable[[], bool]) -> bool:
        """Cuts, fits and simulates a layout; whether it is the best so far. Had it to end, its bound is what is known
        of it."""
        bound_s, number, row, cut = entry
        self.solved.add((number, row))
        space, before = self.prices.space, self.best_s
        layout = space.layout(self.prices.insides[number], row, cut)
        ways = self.ways.get((number, row), ())
        cutting = Cutting(space, layout, self.prices.inner(number, row), self.prices.rates, ways, goes_on)
        at_hand, least_s = cutting.solved(before)
        self.least_tried_s = min(self.least_tried_s, bound_s if least_s is None else least_s)
        if at_hand is None:
            return False
        if at_hand.step_s > bound_s * (1 + SIMPLER_WITHIN):
            self.prices.learn(number, row, at_hand.layout)
        others = [one for one in self.tried if one[1:3] != (number, row) or one[0] < at_hand.step_s]
        self.tried = sorted([*others, (at_hand.step_s, number, row, at_hand)], key=lambda one: one[:3])
        return at_hand.step_s < before

    def ties(self, goes_on: Callable[[], bool]) -> None:
        """Solves a few layouts simpler than the one chosen that are, by their bounds, nearly as good as the best."""
        first: dict[tuple[int, ...], Entry] = {}
        for entry in sorted(one for one in (*self.heap, *self.near) if one[1:3] not in self.solved):
            first.setdefault(self._axes(entry[1], entry[2]), entry)
        for axes, entry in sorted(first.items())[:TIES]:
            chosen = simplest(tuple(choice for *_, choice in self.tried))
            if axes >= _complexity(chosen.layout)[: len(axes)] or not goes_on():
                break
            if entry[0] <= self.best_s * (1 + SIMPLER_WITHIN):
                self.solve(entry, goes_on)
        self.heap[:] = sorted(one for one in self.heap if one[1:3] not in self.solved)

    def _axes(self, number: int, row: Row) -> tuple[int, ...]:
        """What `_complexity` begins with, known before a layout is solved."""
        inside, (pp, vpp, dp, *_) = self.prices.insides[number], row
        axes = sum(size > 1 for size in (inside.tp, inside.cp, pp, dp, inside.ep))
        return axes, vpp, int(KINDS[names_of(row[6])[0]].split)

    def is_sharper(self, entry: Entry) -> bool:
        """Whether chains found since say more of a layout than its bound; then it is put back with what they say."""
        bound_s, number, row, cut = entry
        if row[1] == 1 or (names_of(row[6])[0], row[0], row[1]) not in self.prices.chains:
            return False
        pipe_s, _ = self.prices.second_bound([(number, row)], np.array([np.inf]))
        sharper_s = float(pipe_s[0]) + self.prices.around(number, row).once_s
        if sharper_s <= bound_s:
            return False
        if sharper_s < self.best_s:
            heapq.heappush(self.heap, (sharper_s, number, row, cut))
        return True

    def found(self, left_s: float, left: int) -> Found:
        """The answer so far; `left_s`: least bound of what was neither excluded nor solved, `left` layouts and what was
        not looked at."""
        least = min(left_s, self.least_tried_s, self.best_s)
        solved, refused = len(self.solved), tuple(self.rules.rows())
        considered = max(self.considered, solved + left)
        pruned = considered - solved - left
        words = IN_WORDS + (ON_GROUPS if self.prices.space.cluster.groups else "")
        proof = Certificate(words, least, 1 - least / self.best_s, considered, pruned, solved, refused, left)
        tried = tuple(choice for *_, choice in self.tried)
        return Found(tried[0], simplest(tried), proof, tried, time.monotonic() - self.started)


def _always(best_s: float, bound_s: float) -> bool:
    """Nobody watches."""
    return True


def answers(
    space: Space, *, gap: float = 0.0, time_limit_s: float = float("inf"), watch: Watch = _always
) -> Iterator[Found]:
    """Better and better answers; the last one is within `gap` of the bound, unless time ran out or `watch` had enough.

    After the last better answer it comes again, with all that is proven about it. The most promising layouts are tried
    for a first answer whatever the limit; LegalityError if none of them fits and time is over. Raises LegalityError or
    InfeasibleError when pins or rules leave nothing, InfeasibleError when nothing fits.
    """
    search = _Search(Prices(space))
    floor_s, parts = search.prices.floor_s, list[Part]()

    def goes_on(left_s: float) -> bool:
        bound_s = min(left_s, search.least_tried_s, search.best_s)
        is_over = time.monotonic() - search.started >= time_limit_s
        if is_over and not search.tried:
            raise none_in_time(time_limit_s)
        return not search.tried or (watch(search.best_s, bound_s) and not is_over)

    for _ in search.seed(lambda: goes_on(floor_s)):
        yield search.found(floor_s, 0)
    for slot in search.slots:
        if not goes_on(floor_s):
            yield search.found(floor_s, sum(len(part.row) for part in parts))
            return
        parts += search.opened(slot)
    if not search.considered:
        raise none_is_legal(space)
    candidates, at, size, heap = Candidates.of(parts, search.best_s), 0, FIRST, search.heap

    def left_s() -> float:
        return min(candidates.least_s(at), *(queue[0][0] for queue in (search.pool, heap) if queue), float("inf"))

    def found() -> Found:
        unseen = int((candidates.bound_s[at:] < search.best_s).sum())
        waiting = [one[0] for one in search.pool] + [one[0] for one in heap]
        return search.found(left_s(), unseen + sum(bound_s < search.best_s for bound_s in waiting))

    dives = False
    while left_s() < min(search.best_s * (1 - gap), float("inf")) and goes_on(left_s()):
        if heap and (dives or heap[0][0] <= left_s()):
            dives = False
            entry = heapq.heappop(heap)
            if not search.is_sharper(entry) and search.solve(entry, partial(goes_on, min(entry[0], left_s()))):
                yield found()
        elif candidates.least_s(at) <= left_s():
            search.look(candidates.some(at, at + BATCH))
            at += BATCH
        else:
            refined = search.refine(size, partial(goes_on, left_s()))  # the bound with those that are at work
            if refined is None:
                break
            for entry in refined:
                heapq.heappush(heap, entry)
            size, dives = min(2 * size, BATCH), True  # the best of each batch is solved: it may exclude the next
    if not search.tried:
        raise none_fits(search.prices)
    search.ties(lambda: goes_on(left_s()))
    yield found()


TIES = 4
"""Simpler layouts solved in the end."""
SEEDS, AT_ONCE, TRIES = 256, 64, 6
"""So many layouts are bounded, at first only some, and so many of them solved, to measure the rest by."""
DEEP = 64
"""Pipelines of more stages are tried late for a first answer."""
ROUGHLY, NEAR_ENOUGH = 0.02, 0.05
"""Precision of their bounds; and no more are solved where the next could be shorter by no more than this."""
FIRST = 32
"""Layouts first refined together; then each time twice as many as before."""


def best(space: Space, *, gap: float = 0.0, time_limit_s: float = float("inf"), watch: Watch = _always) -> Found:
    """The last of `answers`."""
    *_, last = answers(space, gap=gap, time_limit_s=time_limit_s, watch=watch)
    return last


def simplest(tried: tuple[Choice, ...]) -> Choice:
    """The simplest of the layouts at most 1 % slower than the first."""
    near = [one for one in tried if one.step_s <= tried[0].step_s * (1 + SIMPLER_WITHIN)]
    return min(near, key=lambda one: (_complexity(one.layout), one.step_s))


def _complexity(layout: ParallelLayout) -> tuple[int, ...]:
    """Fewer mesh axes, then no virtual stages, whole backwards, equal stages, no recompute, a lower ZeRO level."""
    axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep))
    uneven = len(set(layout.cut)) > 1 or bool(layout.uneven)
    return axes, layout.vpp, int(layout.is_split), int(uneven), int(layout.recompute != "none"), layout.zero
