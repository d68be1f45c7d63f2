"""The search over pipelines where none is pinned: every degree, kind of schedule and number of stages a rank.

A candidate is a *form* (pp, kind, stages a rank), a mesh of one stage, micro-batches and recomputed blocks. Three
bounds, each below its simulated step and each dearer than the last:

    1. all micro-batches' work at the cheapest states, spread evenly over the ranks     (a table for many candidates)
    2. the longest chain of its schedule through the stages of its cuts                 (closed form)
    3. the same with the communication that the whole model needs at least,             (a table and a solution each)
       within the memory of the fullest ranks

Candidates that none of them excludes are solved, best bound first, as a pinned pipeline is: by the integer program with
the memory of every rank, and the schedule on its stages' seconds.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count as count_up
from math import prod

from hpsearch.cluster import Cluster
from hpsearch.cost import CostTable
from hpsearch.cost.op_time import Floats
from hpsearch.errors import LegalityError
from hpsearch.graph import ModelGraph
from hpsearch.layout.mesh import RANK_ORDER
from hpsearch.schedule import KINDS, make_schedule, refusal
from hpsearch.search.candidates import SEARCHED, Branch, Entry, branches_of
from hpsearch.search.fix import Fix
from hpsearch.search.in_flight import Kept, most_kept
from hpsearch.search.memory import usable_bytes
from hpsearch.search.pipeline import PipelineSearch, cuts_of
from hpsearch.search.spaces import Spaces
from hpsearch.search.stage_bound import (
    Frame,
    Least,
    StageBytes,
    least_bytes,
    passing,
    rank_bound_s,
    schedule_bound_s,
    with_passing_s,
)
from hpsearch.search.stage_prices import StagePrices
from hpsearch.search.tally import Tally
from hpsearch.solve import Problem, Row, Solution, solve

VIRTUAL = (2, 4)
"""Stages a rank of interleaved schedules."""
DIVE = 16
"""So many third bounds are made between two solutions: a better plan may spare the others theirs."""
MOST_BOUNDED, MOST_SOLVED = 100, 12
"""Third bounds and solutions after which a search ends with the bound of what is left: counts, so that the plan does
not depend on how busy the machine is."""

SPACE = (
    "or pipelines: every pp that divides the devices, up to one repeated block a stage; gpipe, 1f1b, zb-h1, zbv, "
    "dualpipev, and interleaved and interleaved-zb with 2 or 4 stages a rank; blocks cut evenly or by seconds; inside "
    "a stage the same meshes, micro-batches and recompute, and every op the same rule on all stages"
)

Cuts = tuple[tuple[float, Frame], ...]
"""Of a candidate, each with a bound, the least first."""


@dataclass(frozen=True)
class Form:
    pp: int
    kind: str
    virtual: int

    def label(self, branch: Branch, micro_batches: int) -> str:
        more = f" vpp={self.virtual}" if self.virtual > 1 else ""
        return f"pp={self.pp} {self.kind}{more} {branch.label(micro_batches)}"


@dataclass(order=True)
class Waiting:
    """A candidate with the bound of each of its cuts, the least first."""

    bound_s: float
    order: int
    form: Form = field(compare=False)
    branch: Branch = field(compare=False)
    micro_batches: int = field(compare=False)
    cuts: Cuts = field(compare=False)

    @property
    def label(self) -> str:
        return self.form.label(self.branch, self.micro_batches)


@dataclass
class Pipelines:
    """One search; lives for one call."""

    model: ModelGraph
    cluster: Cluster
    global_batch: int
    optimizer: str
    fix: Fix
    deadline_s: float
    tally: Tally
    spaces: Spaces
    progress: Callable[[str, int, int], None] | None = None
    considered: int = 0
    bounded: int = 0
    solved: int = 0
    excluded: int = 0
    """For another reason than their bound."""
    _order: Iterator[int] = field(default_factory=count_up)
    _tables: dict[tuple[Branch, int], CostTable] = field(default_factory=dict)
    _passing: dict[tuple[Branch, int], tuple[Problem, Solution]] = field(default_factory=dict)
    _ratio: dict[tuple[object, ...], float] = field(default_factory=dict)
    """Inside → work with communication over work alone, as last seen."""
    _bytes: dict[tuple[Branch, int], StageBytes] = field(default_factory=dict)
    _least: dict[tuple[object, ...], Least] = field(default_factory=dict)
    _times: dict[tuple[object, ...], list[tuple[Frame, Floats]]] = field(default_factory=dict)
    _bounds: dict[tuple[object, ...], Cuts] = field(default_factory=dict)
    _kept: dict[tuple[Form, int], tuple[tuple[Kept, ...], ...]] = field(default_factory=dict)
    _frames: dict[tuple[int, ...], Frame | None] = field(default_factory=dict)
    _prices: dict[tuple[CostTable, tuple[int, ...]], tuple[StagePrices, ...]] = field(default_factory=dict)
    _searches: dict[Form, PipelineSearch] = field(default_factory=dict)

    def run(self) -> float:
        """Finds what is better than the best so far; the least bound of all pipelines, infinity without any."""
        rough = [(one.bound_s, one) for one in self.candidates()]
        heapq.heapify(rough)
        ready, since, tally = list[Waiting](), 0, self.tally
        while rough or ready:
            least_s = min(one.bound_s for one in [*ready[:1], *(one for _, one in rough)])
            if least_s >= tally.best_s or self._is_over():
                break
            if ready and (since >= DIVE or not rough or ready[0].bound_s <= rough[0][0]):
                since = 0
                self.solve(heapq.heappop(ready))
                continue
            expected_s, one = heapq.heappop(rough)
            if (now_s := self.expected_s(one)) > expected_s:
                heapq.heappush(rough, (now_s, one))
            elif one.bound_s < tally.best_s:
                since += 1
                waiting = self.with_table(one)
                if waiting is not None:
                    heapq.heappush(ready, waiting)
        left = sorted([*(one for _, one in rough), *ready])
        tally.considered += self.considered
        tally.pruned += self.considered - self.solved - self.excluded
        tally.lost += [(one.bound_s, one.label, "at least ") for one in left[:3]]
        return min([one.bound_s for one in left[:1]] + [tally.best_s])

    def expected_s(self, one: Waiting) -> float:
        """The second bound with the communication that others with the same inside had: an order, no bound."""
        return one.bound_s * self._ratio.get(self.inside(one.branch, one.micro_batches), 1.0)

    def _is_over(self) -> bool:
        """Never before there is a plan."""
        if self.tally.best is None:
            return False
        late = time.monotonic() > self.deadline_s
        return late or self.solved >= MOST_SOLVED or self.bounded >= MOST_BOUNDED

    @cached_property
    def calls(self) -> int:
        return sum(1 for call in self.model.outer.calls if call.phase == "forward")

    def forms(self) -> Iterator[Form]:
        pinned = self.fix.degrees
        for pp in range(2, min(self.cluster.devices, self.calls) + 1):
            inside, rest = divmod(self.cluster.devices, pp)
            product = prod(pinned.get(name, 1) for name in RANK_ORDER)
            if rest or inside % product or (set(SEARCHED) <= set(pinned) and inside != product):
                continue
            for kind in KINDS.values():
                if kind.split and self.fix.offloads("activations"):
                    continue
                for virtual in (kind.least_virtual,) if kind.most_virtual is not None else VIRTUAL:
                    if pp * virtual <= self.calls:
                        yield Form(pp, kind.name, virtual)

    def candidates(self) -> Iterator[Waiting]:
        """Every one whose second bound is below the best so far."""
        forms: dict[int, list[Form]] = {}
        for form in self.forms():
            forms.setdefault(form.pp, []).append(form)
        best_s = self.tally.best_s
        for pp, some in forms.items():
            for branch, count in branches_of(self.model, self.cluster, self.global_batch, self.fix, pp):
                legal = [one for one in some if refusal(one.kind, pp, one.virtual, count) is None]
                self.considered += len(legal)
                work_s = self.least(branch, count).work_s(self.model, branch.recompute) * count / pp
                near = legal if work_s < best_s else []
                for form in near:
                    cuts = self.bounds(form, branch, count)
                    if cuts and cuts[0][0] < best_s:
                        yield Waiting(cuts[0][0], next(self._order), form, branch, count, cuts)

    def inside(self, branch: Branch, count: int) -> tuple[object, ...]:
        """What a rank computes of a micro-batch, however many data ranks there are."""
        inside = tuple(axis for axis in branch.mesh.axes if not axis.name.startswith("dp_"))
        return inside, self.global_batch // (count * branch.mesh.num_data_ranks)

    def least(self, branch: Branch, count: int) -> Least:
        key = self.inside(branch, count)
        if key not in self._least:
            self._least[key] = Least.of(self.table(branch, count))
        return self._least[key]

    def bounds(self, form: Form, branch: Branch, count: int) -> Cuts:
        """The second bound of each cut, the least first."""
        key = form, self.inside(branch, count), branch.recompute
        if key not in self._bounds:
            shape, found = (form.kind, form.pp, form.virtual, count), []
            for frame, times in self.times(branch, count, form.pp * form.virtual):
                bound_s = rank_bound_s(*shape, times)
                if bound_s < self.tally.best_s:
                    bound_s = max(bound_s, schedule_bound_s(*shape, times))
                found.append((bound_s, frame))
            self._bounds[key] = tuple(sorted(found, key=lambda one: one[0]))
        return self._bounds[key]

    def times(self, branch: Branch, count: int, stages: int) -> list[tuple[Frame, Floats]]:
        """Each cut there is, with the least seconds of its stages."""
        key = self.inside(branch, count), branch.recompute, stages
        if key not in self._times:
            least = self.least(branch, count)
            cuts = cuts_of(self.model, least, branch.recompute, stages, self.frame)
            frames = [frame for frame in map(self.frame, cuts) if frame is not None]
            self._times[key] = [(frame, least.of_stages(frame, branch.recompute)) for frame in frames]
        return self._times[key]

    def frame(self, cut: tuple[int, ...]) -> Frame | None:
        """None, and a refusal, where the model cannot be cut so."""
        if cut not in self._frames:
            try:
                self._frames[cut] = Frame.of(self.spaces.stages(cut), cut)
            except LegalityError as error:
                self._frames[cut] = None
                self.tally.refuse(f"stages of {'+'.join(map(str, cut))} blocks", error.problem)
        return self._frames[cut]

    def table(self, branch: Branch, count: int) -> CostTable:
        if (branch, count) not in self._tables:
            any_form = self.search_of(Form(2, "1f1b", 1))
            self._tables[branch, count] = any_form.table(branch, count)
        return self._tables[branch, count]

    def search_of(self, form: Form) -> PipelineSearch:
        """The search that a pinned form has."""
        if form not in self._searches:
            fix = replace(self.fix, pp=form.pp, vpp=form.virtual, schedule=form.kind)
            job = self.model, self.cluster, self.global_batch, self.optimizer, fix
            self._searches[form] = PipelineSearch(*job, self.deadline_s, given_spaces=self.spaces, prices=self._prices)
        return self._searches[form]

    def with_table(self, one: Waiting) -> Waiting | None:
        """With its third bound; None where that, or its memory, excludes it."""
        if self.progress:
            self.progress(one.label, self.bounded, self.considered)
        tally, form, table = self.tally, one.form, self.table(one.branch, one.micro_batches)
        if table.least_parts_s == float("inf"):
            self.refuse(one, "no layout satisfies the pins")
            return None
        key = one.branch, one.micro_batches
        if key not in self._passing:
            self.bounded += 1
            problem = passing(table)
            self._passing[key] = problem, solve(problem)
            work_s = self.least(*key).work_s(self.model, one.branch.recompute) * one.micro_batches
            self._ratio[self.inside(*key)] = max(1.0, self._passing[key][1].bound / work_s)
        shape, cuts = (form.kind, form.pp, form.virtual, one.micro_batches), []
        for frame, times in self.times(*key, form.pp * form.virtual):
            passing_s = self.passing_s(one, frame)
            if passing_s < float("inf"):
                cuts.append((with_passing_s(*shape, times, passing_s), frame))
        if not cuts:
            self.refuse(one, "does not fit in the memory of every pipeline rank")
            return None
        cuts.sort(key=lambda each: each[0])
        bound_s = max(cuts[0][0], table.least_parts_s / form.pp)
        if bound_s >= tally.best_s:
            return None
        return replace(one, bound_s=bound_s, cuts=tuple(cuts))

    def refuse(self, one: Waiting, reason: str) -> None:
        self.excluded += 1
        self.tally.refuse(one.label, reason)

    def passing_s(self, one: Waiting, frame: Frame) -> float:
        """Least seconds of all stages before the update, within the least memory of the fullest ranks; infinity where
        that is not there."""
        key, limit = (one.branch, one.micro_batches), float(usable_bytes(self.cluster))
        problem, free = self._passing[key]
        rows = self.stage_bytes(*key).rows(frame, self.kept(one.form, one.micro_batches))
        if least_bytes(rows[0]) > limit:
            return float("inf")
        within = [Row(f"rank {i}", row, limit) for i, row in enumerate(rows)]
        if free.choice is not None and all(row.total(free.choice) <= limit for row in within):
            return free.bound
        found = solve(replace(problem, rows=tuple(within)))
        return found.bound if found.choice is not None else float("inf")

    def stage_bytes(self, branch: Branch, count: int) -> StageBytes:
        if (branch, count) not in self._bytes:
            self._bytes[branch, count] = StageBytes.of(self.table(branch, count))
        return self._bytes[branch, count]

    def kept(self, form: Form, count: int) -> tuple[tuple[Kept, ...], ...]:
        """Moments of each rank."""
        if (form, count) not in self._kept:
            schedule = make_schedule(form.kind, form.pp, form.virtual, count)
            self._kept[form, count] = tuple(most_kept(schedule, rank) for rank in range(form.pp))
        return self._kept[form, count]

    def solve(self, one: Waiting) -> None:
        self.solved += 1
        self.tally.solved += 1
        search = self.search_of(one.form)
        entry = Entry(one.bound_s, one.order, self.table(one.branch, one.micro_batches), one.label)
        for bound_s, frame in one.cuts:
            if bound_s < self.tally.best_s:
                found, _ = search.solve(entry, frame.cut)
                if found is not None:
                    self.tally.keep(found)
        self.tally.refused += search.refused
        search.refused.clear()
