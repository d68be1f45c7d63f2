"""`Prices`: every inside priced once, every surroundings once, and the bounds that follow.

floor_s           products at the fastest rate, spread over all devices       (of the whole space)
wholes_below      blocks as they are, spread evenly over all devices          (of a slot of insides)
first_bounds      through the pipeline, cut as if layers were as one likes    (of insides and all their outsides)
rough_bound       what the first or last rank needs, or the average one       (of layouts of any pipelines)
second_bound      over all cuts and recomputed layers that fit in memory      (of layouts of one pipeline)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpsearch.cluster.efficiency import Efficiency, efficiency_of
from hpsearch.estimate.memory import MASTER_BYTES, RESERVE
from hpsearch.estimate.optimizer import moment_bytes, traffic_bytes
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import kind_of
from hpsearch.estimate.stages import filled_sizes
from hpsearch.space.around import Around, around, least_rate, links_s
from hpsearch.space.bound import PRECISION, WHOLE, Pipes, Stacked, even_s, without_memory_s
from hpsearch.space.bound import SCALARS as BOUND_SCALARS
from hpsearch.space.candidates import distinct
from hpsearch.space.dealing import DEALT, Lines, least_s
from hpsearch.space.exact import longest
from hpsearch.space.fits import fits_somehow
from hpsearch.space.memo import Memo, Wholes
from hpsearch.space.rough import Looks, rough_s
from hpsearch.space.space import SCHEDULES, Inside, Row, Slot, Space, apart, bits_of, names_of
from hpsearch.space.tables import Inner, Table, inner, sharded, table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


MOST_CHAINS = 8
"""Kept of one schedule."""


@dataclass
class Prices:
    space: Space
    insides: list[Inside] = field(default_factory=list)
    inners: list[Inner] = field(default_factory=list)
    sharded: dict[int, Inner] = field(default_factory=dict)
    """Of insides under full sharding, where that is told apart."""
    numbers: dict[Inside, int] = field(default_factory=dict)
    tables: dict[tuple[int, int, int, float], Table] = field(default_factory=dict)
    """(inside, data ranks, shard ranks, recomputed share of the tangent), all but the first 0 without full sharding."""
    arounds: dict[tuple[int, ...], Around] = field(default_factory=dict)
    chains: dict[tuple[str, int, int], dict[int, Floats]] = field(default_factory=dict)
    """(schedule, stages, virtual) → micro-batches → longest chains of layouts that were simulated: no layout of that
    schedule takes less than they say."""
    links: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    """(tp, cp, ep, etp, dp, shard ranks) → of the whole model's storage, fully sharded."""

    @cached_property
    def rates(self) -> Efficiency:
        return efficiency_of(self.space.cluster.device.name, self.space.cluster.efficiency)

    @cached_property
    def memo(self) -> Memo:
        return Memo(self.space.shape, self.space.cluster, self.rates, self.space.base)

    def price(self, inside: Inside) -> int:
        """The number of an inside, priced."""
        if inside not in self.numbers:
            self.numbers[inside] = len(self.insides)
            self.insides.append(inside)
            self.inners.append(self.memo.inner(inside))
        return self.numbers[inside]

    def inner(self, number: int, row: Row) -> Inner:
        """An inside with what its storage makes it keep: code that is not fused keeps other tensors, by the same
        seconds, where storage is fully sharded."""
        if row[4] != 3 or self.space.base.fused:
            return self.inners[number]
        if number not in self.sharded:
            alone = self.inners[number].layout
            layout = replace(alone, zero=3, fsdp=True)
            self.sharded[number] = replace(inner(self.space.shape, layout, self.space.cluster), layout=alone)
        return self.sharded[number]

    @property
    def floor_s(self) -> float:
        """No layout takes less, whatever its blocks cost."""
        counts = {**self.space.shape.counts, "head": 1, "embedding": 1}
        once = sum(floor * counts[name] for name, floor in self.memo.floors.items())
        return float(once * self.space.global_batch / self.space.devices + self._once_s)

    def spread_s(self, number: int) -> float:
        """All micro-batches spread evenly over all devices."""
        slot = Slot.of(self.insides[number])
        return float(self.wholes(slot).both_s.sum(axis=-1).min()) * self._rounds(slot) + self._once_s

    def wholes(self, slot: Slot) -> Wholes:
        """Of a slot."""
        found = self.memo.wholes(slot)
        assert found is not None
        return found

    def wholes_below(self, slot: Slot, best_s: float) -> Wholes | None:
        """Of a slot; None where no inside is better than `best_s`, even spread evenly over all devices."""
        return self.memo.wholes(slot, (best_s - self._once_s) / self._rounds(slot))

    def least_spread_s(self, slot: Slot, wholes: Wholes, which: int) -> float:
        """`spread_s` of the fastest inside with the experts `which`."""
        return float(wholes.both_s[which].sum(axis=-1).min()) * self._rounds(slot) + self._once_s

    def _rounds(self, slot: Slot) -> float:
        """Micro-batches one after the other, if all devices share all."""
        return self.space.global_batch * slot.tp * slot.cp / (slot.micro_batch * self.space.devices)

    def first_bound(self, number: int, rows: Ints) -> Floats:
        """`first_bounds` of one inside."""
        slot = Slot.of(self.insides[number])
        return np.asarray(self.first_bounds(slot, self.wholes(slot), 0, rows)[0])

    def first_bounds(self, slot: Slot, wholes: Wholes, which: int, rows: Ints, best_s: float = float("inf")) -> Floats:
        """[insides, rows] of the insides with the experts `which`: base times of the whole model through the pipeline,
        or of as many layers as some stage has, gathers of fully sharded storage beside them, the optimizer's traffic,
        and what a step costs once; inf where states and activations do not fit, whatever the cut. Above `best_s` it
        may leave out gathers, or be inf."""
        pp, m = rows.T[[0, 3]].astype(np.float64)
        once = self.least_once_s(slot, wholes, which, rows)
        through = np.where(_goes_back(rows), without_memory_s(1.0, m, pp), m / pp)
        both, layer = wholes.both_s[which].reshape(-1, 1, 2), wholes.layer_s[which].reshape(-1, 1)
        most = m * np.ceil(self.space.shape.layers / pp)
        found = np.full((len(layer), len(rows)), np.inf)
        near = np.maximum(both.sum(axis=-1).min() * through, layer.min() * most) + once < best_s
        rows, once, through, most = rows[near], once[near], through[near], most[near]
        bound = np.maximum(both.sum(axis=-1) * through, layer * most) + once
        bound = np.where(self._fits(slot, wholes, which, rows, best_s), bound, np.inf)
        some = np.flatnonzero((rows[:, 4] == 3) & (bound < best_s).any(axis=0))
        if len(some):
            links, overlap = self._links_s(slot, which, rows[some]), self._overlap
            each = np.maximum(both, links) + (1 - overlap) * np.minimum(both, links)
            bound[:, some] = np.maximum(bound[:, some], each.sum(axis=-1) * through[some] + once[some])
        found[:, near] = bound
        return found

    @property
    def _overlap(self) -> float:
        return self.space.cluster.device.overlap_efficiency if self.space.base.prefetch else 0.0

    def _links_s(self, slot: Slot, which: int, rows: Ints) -> Floats:
        """[rows, 2] of the whole model, forward and backward."""
        (ep, etp), inside, places = slot.experts[which], slot.inside(0), []
        for dp, shard_ranks in rows[:, [2, 5]].tolist():
            key = slot.tp, slot.cp, ep, etp, dp, shard_ranks
            if key not in self.links:
                layout = self.space.layout(replace(inside, ep=ep, etp=etp), (1, 1, dp, 1, 3, shard_ranks, 0))
                self.links[key] = links_s(self.space, layout, self.rates, self.memo.works(slot, which))[2]
            places.append(self.links[key])
        return np.array(places)

    def least_once_s(self, slot: Slot, wholes: Wholes, which: int, rows: Ints) -> Floats:
        """[rows]: the optimizer's traffic on the average stage, and what a step costs once."""
        base, device = self.space.base, self.space.cluster.device
        pp, dp, zero, shard_ranks = rows.T[[0, 2, 4, 5]].astype(np.float64)
        if base.lora or base.trained_parts != "step":
            return np.full(len(rows), self._once_s)
        shards = np.where(zero > 0, np.where(shard_ranks > 0, shard_ranks, dp * slot.cp), 1.0)
        stream = device.memory_bytes_per_s * device.memory_efficiency
        rate = np.where((pp > 1) & (zero < 3) & self._is_mixed, least_rate(self.space, self.rates), self.rates.moved)
        params = float(np.dot(wholes.counts, wholes.dense[:, which] + wholes.expert[:, which]))
        return np.asarray(rate * traffic_bytes(base) * (params / pp) / shards / stream + self._once_s)

    def _fits(self, slot: Slot, wholes: Wholes, which: int, rows: Ints, best_s: float) -> NDArray[np.bool_]:
        """[insides or 1, rows]."""
        base, (ep, etp) = self.space.base, slot.experts[which]
        if base.lora:
            return np.ones((1, len(rows)), dtype=np.bool_)
        dp, zero, shard_ranks = rows.T[[2, 4, 5]].astype(np.float64)
        ranks = dp * slot.cp
        per_dense = _state_bytes(base, zero, ranks, shard_ranks)
        per_expert = _state_bytes(base, zero, ranks * slot.tp / (ep * etp), shard_ranks)
        held = wholes.dense[:, which, None] * per_dense + wholes.expert[:, which, None] * per_expert
        kept = wholes.kept[:, which].reshape(len(held), -1, 1)
        counts = np.array(wholes.counts, dtype=np.float64)
        way = wholes.way_s[which].reshape(-1, 1)
        return fits_somehow(rows, counts, held[:, None], kept, self._room_bytes, way, best_s)

    @property
    def _room_bytes(self) -> float:
        return self.space.cluster.device.memory_bytes / (1 + RESERVE)

    @cached_property
    def _is_mixed(self) -> bool:
        """Whether stages of equal parameters may differ in update, reduction and gather."""
        return self.space.base.optimizer == "muon" or any(kind_of(name) == "moe" for name in self.space.shape.counts)

    @property
    def _once_s(self) -> float:
        """Of a step, whatever its layout."""
        return self.rates.step_s if self.space.base.trained_parts == "step" else 0.0

    def table(self, number: int, row: Row, again: float = 0.0) -> Table:
        """Of an inside; of its outside too where storage is fully sharded."""
        _, _, dp, _, zero, shard_ranks, _ = row
        inside = self.insides[number]
        key = (number, dp * inside.cp, shard_ranks, again) if zero == 3 else (number, 0, 0, 0.0)
        if key not in self.tables:
            priced = self.inner(number, row)
            if zero == 3:
                is_told = priced is not self.inners[number]
                alone = table(self.space.shape, priced, self.rates) if is_told else self._plain(number)
                overlap = self.space.cluster.device.overlap_efficiency if self.space.base.prefetch else 0.0
                self.tables[key] = sharded(alone, self.space.shape, self.around(number, row).links, again, overlap)
            else:
                self.tables[key] = table(self.space.shape, priced, self.rates)
        return self.tables[key]

    def around(self, number: int, row: Row) -> Around:
        """What a layout's surroundings cost, whatever the rows of its micro-batches."""
        inside = self.insides[number]
        pp, _, dp, _, zero, shard_ranks, _ = row
        key = (inside.tp, inside.cp, inside.ep, inside.etp, pp, dp, zero, shard_ranks)
        if key not in self.arounds:
            plain = (pp, 1, dp, 1, zero, shard_ranks, 0)
            self.arounds[key] = around(
                self.space, self.space.layout(inside, plain), self._plain(number), self.rates, self.inners[number].works
            )
        return self.arounds[key]

    def _plain(self, number: int) -> Table:
        return self.table(number, (1, 1, 1, 1, 0, 0, 0))

    def first_look(self, numbers: Ints, rows: Ints) -> Floats:
        """`rough_bound` without gathers of fully sharded storage, unless code that is not fused keeps other tensors
        under it."""
        told, found = (rows[:, 4] == 3) & (not self.space.base.fused), np.zeros(len(rows))
        for plain in (True, False):
            some = np.flatnonzero(told != plain)
            if len(some):
                found[some] = self.rough_bound(numbers[some], rows[some], plain=plain)
        return found

    def with_gathers(self, members: list[tuple[int, Row]], best_s: float) -> list[tuple[int, Row]]:
        """Those whose `rough_bound`, gathers of fully sharded storage among it, is below `best_s`."""
        sharded = [i for i, (_, row) in enumerate(members) if row[4] == 3]
        if not sharded:
            return members
        numbers, rows = np.array([members[i][0] for i in sharded]), np.array([members[i][1] for i in sharded])
        out = np.flatnonzero(self.rough_bound(numbers, rows) >= best_s).tolist()
        away = {sharded[i] for i in out}
        return [one for i, one in enumerate(members) if i not in away]

    def rough_bound(self, numbers: Ints, rows: Ints, *, plain: bool = False) -> Floats:
        """Of layouts of any pipelines, what one rank needs; of 1F1B what is paid once. `plain`: without gathers."""
        looks = self._looks(numbers, rows, plain)
        counts = sorted({stages * virtual for _, stages, virtual in looks.pipelines if virtual > 1})
        sizes = {count: list(self.space.cut) or filled_sizes(self.space.shape, count) for count in counts}
        return np.asarray(rough_s(looks, sizes) + self._around(numbers, rows)[:, -1])

    def _looks(self, numbers: Ints, rows: Ints, plain: bool) -> Looks:
        around = self._around(numbers, rows)
        if plain:
            each_once, table = np.unique(numbers, return_inverse=True)
            tables = [self._plain(number) for number in each_once.tolist()]
        else:
            each = [self.table(number, tuple(row)) for number, row in zip(numbers.tolist(), rows.tolist(), strict=True)]
            places = dict[int, int]()
            table = np.array([places.setdefault(id(one), len(places)) for one in each], dtype=np.int64)
            tables = list({id(one): one for one in each}.values())
        stacked, names = Stacked.of(tuple(tables)), {1 << i: name for i, name in enumerate(SCHEDULES)}
        first, pipeline = distinct(rows[:, [6, 0, 1]])
        pipes = rows[first][:, [6, 0, 1]].tolist()
        hops = around[:, 0] + stacked.scalars[table, BOUND_SCALARS.index("hop_bytes")] * around[:, 1]
        return Looks(
            stacked, table, tuple((names[kind], pp, vpp) for kind, pp, vpp in pipes), pipeline,
            rows[:, 3].astype(np.float64), hops, *around[:, 2:5].T,
        )  # fmt: skip

    def _around(self, numbers: Ints, rows: Ints) -> Floats:
        """[layouts, 6] of each layout's surroundings: hop, its seconds a byte, room, state bytes, seconds of a step."""
        splits = np.array([(one.tp, one.cp, one.ep, one.etp) for one in self.insides], dtype=np.int64)[numbers]
        first, places = distinct(np.hstack([splits, rows[:, [0, 2, 4, 5]]]))
        each = [
            self.around(number, tuple(row))
            for number, row in zip(numbers[first].tolist(), rows[first].tolist(), strict=True)
        ]
        columns = ("hop_s", "hop_s_per_byte", "room_bytes", "per_dense", "per_expert", "once_s")
        return np.array([[getattr(one, name) for name in columns] for one in each])[places]

    def second_bound(self, members: list[tuple[int, Row]], cutoff_s: Floats) -> tuple[Floats, list[tuple[int, ...]]]:
        """Pipeline seconds at least, and the cut; of layouts of one pipeline and schedule, of several chunks a rank."""
        pp, vpp = members[0][1][:2]
        sizes = list(self.space.cut) or filled_sizes(self.space.shape, pp * vpp)
        pipe_s = np.zeros(len(members))
        for again, chosen in self._passes(members):
            some = np.array([i for i in chosen if np.isfinite(pipe_s[i])], dtype=np.int64)
            if not len(some):
                continue
            pipes = self._pipes([members[i] for i in some.tolist()], again)
            pipe_s[some] = np.maximum(pipe_s[some], even_s(pipes, sizes, cutoff_s[some]))
        return pipe_s, [tuple(sizes)] * len(members)

    def learn(self, number: int, row: Row, layout: ParallelLayout) -> None:
        """Keeps the longest chain of a layout of several chunks a rank."""
        key, m = (layout.schedule_kind, layout.pp, layout.vpp), layout.micro_batches
        if layout.vpp == 1 or layout.stage_groups:
            return
        space, known = self.space, self.chains.setdefault(key, {})
        found = longest(space.shape, layout, space.cluster, self.inner(number, row), self.rates)[None]
        known[m] = np.concatenate([known[m], found])[-MOST_CHAINS:] if m in known else found

    def dealt_bound(
        self, members: list[tuple[int, Row]], cutoff_s: Floats, precision: float = PRECISION
    ) -> tuple[Floats, list[tuple[int, ...]]]:
        """`second_bound` of layouts of one chunk a rank, with any numbers of stages."""
        pipe_s = np.zeros(len(members))
        cuts: list[tuple[int, ...]] = [()] * len(members)
        for again, chosen in self._passes(members):
            some = np.array([i for i in chosen if np.isfinite(pipe_s[i])], dtype=np.int64)
            if not len(some):
                continue
            some = some[np.argsort([-members[i][1][0] for i in some.tolist()], kind="stable")]
            pipes = self._pipes([members[i] for i in some.tolist()], again)
            stages = np.array([members[i][1][0] for i in some.tolist()])
            kinds = np.array([DEALT.index(names_of(members[i][1][6])[0]) for i in some.tolist()])
            found = least_s(Lines(
                pipes.tables, pipes.table, kinds, stages, pipes.micro_batches, pipes.hop_s, pipes.room_bytes,
                pipes.per_dense, pipes.per_expert,
            ), cutoff_s[some], precision)  # fmt: skip
            for i, cut, count in zip(some.tolist(), found.cuts.tolist(), stages.tolist(), strict=True):
                cuts[i] = tuple(cut[:count])
            pipe_s[some] = np.maximum(pipe_s[some], found.pipe_s)
        return pipe_s, cuts

    def _passes(self, members: list[tuple[int, Row]]) -> list[tuple[float | None, list[int]]]:
        """Recomputed shares of the tangents that bound layouts, and which: without gathers first, which is quick and
        prunes most; unless code that is not fused keeps less under full sharding."""
        sharded = [i for i, (_, row) in enumerate(members) if row[4] == 3]
        every = list(range(len(members)))
        first = every if self.space.base.fused else [i for i in every if members[i][1][4] != 3]
        return [(None, first), (0.0, sharded), (1.0, sharded)]

    def _pipes(self, members: list[tuple[int, Row]], again: float | None) -> Pipes:
        tables = [self._plain(number) if again is None else self.table(number, row, again) for number, row in members]
        around = [self.around(number, row) for number, row in members]
        places = dict[int, int]()
        which = np.array([places.setdefault(id(one), len(places)) for one in tables], dtype=np.int64)
        distinct = {id(one): one for one in tables}
        hops = [one.hop_s + held.hop_bytes * one.hop_s_per_byte for one, held in zip(around, tables, strict=True)]
        pp, vpp, schedule = (members[0][1][i] for i in (0, 1, 6))
        return Pipes(
            tuple(distinct.values()), which, pp, np.array([float(row[3]) for _, row in members]), np.array(hops),
            np.array([one.room_bytes for one in around]), np.array([one.per_dense for one in around]),
            np.array([one.per_expert for one in around]), vpp, names_of(schedule)[0],
            self.chains.get((names_of(schedule)[0], pp, vpp), {}),
        )  # fmt: skip


def _goes_back(rows: Ints) -> NDArray[np.bool_]:
    """Whether all schedules of a row have one chunk a rank and end with a backward that goes all the way back."""
    return np.asarray((rows[:, 1] == 1) & (rows[:, 6] & ~bits_of(WHOLE) == 0))


def is_dealt(row: Row) -> bool:
    """Whether an outside has one chunk a rank, and any cut."""
    return row[1] == 1 and row[6] & bits_of(DEALT) > 0


def dealt(rows: Ints) -> Ints:
    """Of some rows those that may be 1F1B with any cut, as such; all apart where there are none."""
    bit = bits_of(("1f1b",))
    some: Ints = rows[(rows[:, 1] == 1) & (rows[:, 6] & bit > 0)]
    if not len(some):
        return apart(rows)
    some[:, 6] = bit
    return some


def others(rows: Ints) -> Ints:
    """Of some rows those of several chunks a rank, schedule by schedule."""
    return apart(rows[rows[:, 1] > 1])


def _state_bytes(layout: ParallelLayout, zero: Floats, ranks: Floats, shard_ranks: Floats) -> Floats:
    """Of one parameter, as `estimate.memory.states` counts them."""
    shards = np.maximum(np.where(shard_ranks > 0, np.minimum(shard_ranks, ranks), ranks), 1.0)
    gradient = np.where(zero == 3, MASTER_BYTES, layout.grad_bytes) / np.where(zero >= 2, shards, 1.0)
    optimizer = (MASTER_BYTES + moment_bytes(layout)) / np.where(zero >= 1, shards, 1.0)
    return np.where(zero == 3, 0.0, 2.0) + gradient + optimizer
