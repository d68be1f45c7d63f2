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
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpsearch.cluster.efficiency import Efficiency, efficiency_of
from hpsearch.errors import InfeasibleError
from hpsearch.estimate import ParallelLayout
from hpsearch.estimate.optimizer import traffic_bytes
from hpsearch.estimate.stages import sizes_of
from hpsearch.space.around import Around, around
from hpsearch.space.bound import Pipes, even_s, least_s, without_memory_s
from hpsearch.space.exact import Choice, fitted, simulated
from hpsearch.space.rules import Rules
from hpsearch.space.space import IN_WORDS, Inside, Space
from hpsearch.space.tables import Inner, Table, inner, table, whole_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BATCH = 16384
"""Layouts whose second bound is computed together."""
NEAR = 1.02
"""A layout this near to the best has its cut polished."""
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


Row = tuple[int, int, int, int, int, int]
"""An outside: pp, vpp, dp, micro-batches, ZeRO level, shard ranks."""
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
    space: Space
    rules: Rules = field(default_factory=Rules)
    insides: list[Inside] = field(default_factory=list)
    inners: list[Inner] = field(default_factory=list)
    tables: dict[tuple[int, int, int, float], Table] = field(default_factory=dict)
    """(inside, data ranks, shard ranks, recomputed share of the tangent), all but the first 0 without full sharding."""
    arounds: dict[tuple[int, ...], Around] = field(default_factory=dict)
    tried: list[tuple[float, int, Row, Choice]] = field(default_factory=list)
    numbers: dict[Inside, int] = field(default_factory=dict)
    solved: set[tuple[int, Row]] = field(default_factory=set)
    considered: int = 0
    least_tried_s: float = float("inf")
    """Least bound among those that were solved."""

    @cached_property
    def rates(self) -> Efficiency:
        return efficiency_of(self.space.cluster.device.name, self.space.cluster.efficiency)

    @property
    def best_s(self) -> float:
        return self.tried[0][0] if self.tried else float("inf")

    def enumerate(self) -> _Candidates:
        """Prices every inside, and bounds every layout without looking at its memory. Layouts of insides that cannot be
        better than an answer at hand, even spread over all devices without any loss, are only counted."""
        space, outsides = self.space, dict[tuple[int, ...], Ints]()
        parts: list[tuple[Ints, Ints, Floats]] = []
        for inside in space.insides(self.rules):
            key = (inside.tp, inside.cp, inside.ep, inside.etp, inside.micro_batch)
            if key not in outsides:
                outsides[key] = space.outsides(inside, self.rules)
            rows = outsides[key]
            if not len(rows):
                continue
            number = self._price(inside)
            self.considered += len(rows)
            if self._spread_s(number) < self.best_s:
                parts.append((np.full(len(rows), number, dtype=np.int64), rows, self._first_bound(number, rows)))
                if len(parts) == FIRST:
                    self._look_ahead(_sorted(parts))
        if not self.considered:
            raise InfeasibleError("search", "expected a legal layout, but the rules leave none", _remedy(self.rules))
        return _sorted(parts)

    def _price(self, inside: Inside) -> int:
        """The number of an inside, priced."""
        alike = replace(inside, recompute="full")
        at_hand = self.inners[self.numbers[alike]] if alike in self.numbers else None
        self.numbers[inside] = len(self.insides)
        self.insides.append(inside)
        self.inners.append(inner(self.space.shape, inside.layout(self.space.base), self.space.cluster, at_hand))
        return self.numbers[inside]

    def _spread_s(self, number: int) -> float:
        """All micro-batches spread evenly over all devices."""
        inside, space = self.insides[number], self.space
        rounds = space.global_batch * inside.tp * inside.cp / (inside.micro_batch * space.devices)
        return whole_s(space.shape, self.inners[number], self.rates) * rounds + self.rates.step_s

    def _look_ahead(self, candidates: _Candidates) -> None:
        """Some answer, to measure the rest by."""
        for entry in sorted(self.refine([candidates.at(i) for i in seeds(candidates)]))[:TRIES]:
            self.solve(*entry)

    def _first_bound(self, number: int, rows: Ints) -> Floats:
        """Base times of the whole model through the pipeline, the optimizer's traffic, and what a step costs once."""
        held, space = self._plain(number), self.space
        pp, vpp, dp, m, zero, shard_ranks = rows.T.astype(np.float64)
        pipe = np.where(vpp > 1, m * held.total_s / pp, without_memory_s(held.total_s, m, pp))
        params = float(held.dense[-1] + held.expert[-1]) / pp
        shards = np.where(zero > 0, np.where(shard_ranks > 0, shard_ranks, dp * self.insides[number].cp), 1.0)
        device = space.cluster.device
        stream = device.memory_bytes_per_s * device.memory_efficiency
        update = self.rates.moved * traffic_bytes(self.inners[number].layout) * params / shards / stream
        return np.asarray(pipe + (0.0 if space.base.lora else update) + self.rates.step_s)

    def table(self, number: int, row: Row, again: float = 0.0) -> Table:
        """Of an inside; of its outside too where storage is fully sharded."""
        _, _, dp, _, zero, shard_ranks = row
        inside = self.insides[number]
        key = (number, dp * inside.cp, shard_ranks, again) if zero == 3 else (number, 0, 0, 0.0)
        if key not in self.tables:
            outer = self.space.layout(inside, row) if zero == 3 else self.inners[number].layout
            self.tables[key] = table(
                self.space.shape, self.inners[number], self.rates, self.space.cluster, outer, again
            )
        return self.tables[key]

    def around(self, number: int, row: Row) -> Around:
        """What a layout's surroundings cost, whatever the rows of its micro-batches."""
        inside = self.insides[number]
        pp, _, dp, _, zero, shard_ranks = row
        key = (inside.tp, inside.cp, inside.ep, inside.etp, pp, dp, zero, shard_ranks)
        if key not in self.arounds:
            plain = (pp, 1, dp, 1, zero, shard_ranks)
            self.arounds[key] = around(
                self.space, self.space.layout(inside, plain), self._plain(number), self.rates, self.inners[number].works
            )
        return self.arounds[key]

    def _plain(self, number: int) -> Table:
        return self.table(number, (1, 1, 1, 1, 0, 0))

    def refine(self, chosen: list[tuple[int, Row]]) -> list[Entry]:
        """(bound over all cuts and recomputed layers, layout, cut) of those that fit and may be better than the best so
        far."""
        groups: dict[tuple[int, int], list[tuple[int, Row]]] = {}
        for number, row in chosen:
            if (number, row) not in self.solved and self._sharded_bound(number, row) < self.best_s:
                groups.setdefault(row[:2], []).append((number, row))
        found: list[Entry] = []
        for _, members in sorted(groups.items()):
            once = np.array([self.around(*one).once_s for one in members])
            pipe_s, cuts = self._second_bound(members, self.best_s - once)
            for one, bound_s, cut in zip(members, (pipe_s + once).tolist(), cuts.tolist(), strict=True):
                if bound_s < self.best_s:
                    found.append((bound_s, *one, tuple(cut)))
        return found

    def _sharded_bound(self, number: int, row: Row) -> float:
        """Of fully sharded storage: its gathers beside the compute of the whole model. 0 for any other."""
        pp, vpp, _, m, zero, _ = row
        if zero != 3:
            return 0.0
        found, plain = self.around(number, row), self._plain(number)
        overlap = self.space.cluster.device.overlap_efficiency if self.space.base.prefetch else 0.0
        whole = sum(
            max(compute, link) + (1 - overlap) * min(compute, link)
            for compute, link in zip(plain.compute_s, found.links_s, strict=True)
        )
        pipe = m * whole / pp if vpp > 1 else float(without_memory_s(whole, np.array(float(m)), pp))
        return pipe + found.once_s

    def _second_bound(self, members: list[tuple[int, Row]], cutoff_s: Floats) -> tuple[Floats, Ints]:
        """Pipeline seconds at least, and the cut that reaches them; layouts of one number of stages and chunks."""
        pp, vpp = members[0][1][:2]
        pipe_s, cuts = np.zeros(len(members)), np.zeros((len(members), pp * vpp), dtype=np.int64)
        for again in (0.0, 1.0):
            some = np.flatnonzero(np.isfinite(pipe_s))
            if again:
                some = np.array([i for i in some.tolist() if members[i][1][4] == 3], dtype=np.int64)
            if not len(some):
                continue
            pipes = self._pipes([members[i] for i in some.tolist()], again)
            if vpp > 1:
                sizes = sizes_of(self.space.shape, pp * vpp)
                more, cuts[some] = even_s(pipes, sizes), np.array(sizes)
            else:
                bounds = least_s(pipes, cutoff_s[some])
                more, cuts[some] = bounds.pipe_s, bounds.cuts
            pipe_s[some] = np.maximum(pipe_s[some], more)
        return pipe_s, cuts

    def _pipes(self, members: list[tuple[int, Row]], again: float) -> Pipes:
        tables = [self.table(number, row, again) for number, row in members]
        around = [self.around(number, row) for number, row in members]
        places = dict[int, int]()
        which = np.array([places.setdefault(id(one), len(places)) for one in tables], dtype=np.int64)
        distinct = {id(one): one for one in tables}
        hops = [one.hop_s + held.hop_bytes * one.hop_s_per_byte for one, held in zip(around, tables, strict=True)]
        pp, vpp = members[0][1][:2]
        return Pipes(
            tuple(distinct.values()), which, pp, np.array([float(row[3]) for _, row in members]), np.array(hops),
            np.array([one.room_bytes for one in around]), np.array([one.per_dense for one in around]),
            np.array([one.per_expert for one in around]), vpp,
        )  # fmt: skip

    def solve(self, bound_s: float, number: int, row: Row, cut: tuple[int, ...]) -> bool:
        """Cuts, fits and simulates a layout; whether it is the best so far."""
        self.solved.add((number, row))
        priced, before = self.inners[number], self.best_s
        layout = self.space.layout(self.insides[number], row, cut)
        is_exact = layout.pp == 1 or layout.vpp > 1  # the cut is given, and more recompute than has to be is slower
        at_hand = self._priced(layout, priced)
        if at_hand is None and not is_exact:
            at_hand = self._priced(replace(layout, cut=tuple(sizes_of(self.space.shape, layout.pp))), priced)
        if not is_exact:
            self.least_tried_s = min(self.least_tried_s, bound_s)
        if at_hand is None:
            return False
        if not is_exact and at_hand.step_s < before * NEAR:
            at_hand = self._polished(at_hand, priced)
        self.tried.append((at_hand.step_s, number, row, at_hand))
        self.tried.sort(key=lambda one: one[:3])
        return at_hand.step_s < before

    def _priced(self, layout: ParallelLayout, priced: Inner) -> Choice | None:
        space = self.space
        made = fitted(space.shape, layout, priced, float(space.cluster.device.memory_bytes))
        if made is None:
            return None
        return Choice(made, simulated(space.shape, made, space.cluster, priced, self.rates))

    def _polished(self, choice: Choice, priced: Inner) -> Choice:
        """Moves single layers between neighbouring stages as long as the simulated step gets shorter."""
        better = True
        while better:
            better = False
            for stage in range(choice.layout.pp - 1):
                for give in (1, -1):
                    cut = list(choice.layout.cut)
                    cut[stage] -= give
                    cut[stage + 1] += give
                    if min(cut) < 1:
                        continue
                    other = self._priced(replace(choice.layout, cut=tuple(cut), recomputed=()), priced)
                    if other is not None and other.step_s < choice.step_s * (1 - 1e-9):
                        choice, better = other, True
        return choice


def _remedy(rules: Rules) -> str:
    return "; ".join(f"{rule}: {what}" for rule, what, _ in rules.rows()[:3]) or "Pin less."


def answers(space: Space, *, gap: float = 0.0, time_limit_s: float = float("inf")) -> Iterator[Found]:
    """Better and better answers; the last one is within `gap` of the bound, unless time ran out.

    Raises InfeasibleError when nothing fits.
    """
    started = time.monotonic()
    search = _Search(space)
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
        raise InfeasibleError(
            "search", f"expected a layout that fits in {space.cluster.device.memory_bytes / 1e9:.4g} GB, but none of "
            f"{search.considered} does", "Use more devices, a smaller batch or sequence, or offload.",
        )  # fmt: skip
    yield found()


def seeds(candidates: _Candidates) -> list[int]:
    """The most promising of each inside and pipeline: among them is a good answer to prune with."""
    first: dict[tuple[int, ...], int] = {}
    for i in range(min(len(candidates), 100 * SEEDS)):
        number, (pp, vpp, *_) = candidates.at(i)
        first.setdefault((number, pp, min(vpp, 2)), i)
        if len(first) >= SEEDS:
            break
    return list(first.values())


FIRST, SEEDS, TRIES = 48, 64, 6
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
