"""`Prices`: every inside priced once, every surroundings once, and the bounds that follow.

spread_s          all micro-batches spread evenly over all devices            (of an inside)
first_bound       through the pipeline, as if memory were endless             (of all its outsides)
sharded_bound     with the gathers of fully sharded storage                   (of one layout)
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
from hpsearch.estimate.stages import sizes_of
from hpsearch.space.around import Around, around, least_rate
from hpsearch.space.bound import Pipes, even_s, least_s, without_memory_s
from hpsearch.space.memo import Memo
from hpsearch.space.space import Inside, Row, Space
from hpsearch.space.tables import Inner, Table, inner, sharded, table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass
class Prices:
    space: Space
    insides: list[Inside] = field(default_factory=list)
    inners: list[Inner] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    """Of each: one micro-batch through the whole model at least, neither links nor recompute by layers."""
    sharded: dict[int, Inner] = field(default_factory=dict)
    """Of insides under full sharding, where that is told apart."""
    numbers: dict[Inside, int] = field(default_factory=dict)
    tables: dict[tuple[int, int, int, float], Table] = field(default_factory=dict)
    """(inside, data ranks, shard ranks, recomputed share of the tangent), all but the first 0 without full sharding."""
    arounds: dict[tuple[int, ...], Around] = field(default_factory=dict)

    @cached_property
    def rates(self) -> Efficiency:
        return efficiency_of(self.space.cluster.device.name, self.space.cluster.efficiency)

    @cached_property
    def memo(self) -> Memo:
        return Memo(self.space.shape, self.space.cluster, self.rates)

    def price(self, inside: Inside) -> int:
        """The number of an inside, priced."""
        made, whole = self.memo.inner(inside.layout(self.space.base))
        self.numbers[inside] = len(self.insides)
        self.insides.append(inside)
        self.inners.append(made)
        self.whole_s.append(whole)
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

    def spread_s(self, number: int) -> float:
        """All micro-batches spread evenly over all devices."""
        inside, space = self.insides[number], self.space
        rounds = space.global_batch * inside.tp * inside.cp / (inside.micro_batch * space.devices)
        return self.whole_s[number] * rounds + self._once_s

    def first_bound(self, number: int, rows: Ints) -> Floats:
        """Base times of the whole model through the pipeline, the optimizer's traffic, and what a step costs once; inf
        where the states of the average stage do not fit."""
        priced, space, whole = self.inners[number], self.space, self.whole_s[number]
        pp, vpp, dp, m, zero, shard_ranks = rows.T.astype(np.float64)
        pipe = np.where(vpp > 1, m * whole / pp, without_memory_s(whole, m, pp))
        works = [(priced.works[name], count) for name, count in space.shape.counts.items()]
        dense, expert = sum(w.params * n for w, n in works) / pp, sum(w.expert_params * n for w, n in works) / pp
        layout, device = priced.layout, space.cluster.device
        ranks = dp * layout.cp
        shards = np.where(zero > 0, np.where(shard_ranks > 0, shard_ranks, ranks), 1.0)
        stream = device.memory_bytes_per_s * device.memory_efficiency
        rate = np.where((pp > 1) & (zero < 3) & self._is_mixed, least_rate(space, self.rates), self.rates.moved)
        update = rate * traffic_bytes(layout) * (dense + expert) / shards / stream
        has_update = not space.base.lora and space.base.trained_parts == "step"
        bound = np.asarray(pipe + (update if has_update else 0.0) + self._once_s)
        if space.base.lora:
            return bound
        held = dense * _state_bytes(layout, zero, ranks, shard_ranks)
        held = held + expert * _state_bytes(layout, zero, ranks * layout.tp / (layout.ep * layout.etp), shard_ranks)
        return np.where(held * (1 + RESERVE) <= device.memory_bytes, bound, np.inf)

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
        _, _, dp, _, zero, shard_ranks = row
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

    def sharded_bound(self, number: int, row: Row) -> float:
        """Of fully sharded storage: its gathers beside the compute of the whole model. 0 for any other."""
        pp, vpp, _, m, zero, _ = row
        if zero != 3:
            return 0.0
        found, plain = self.around(number, row), self._plain(number)
        overlap = self.space.cluster.device.overlap_efficiency if self.space.base.prefetch else 0.0
        whole = sum(
            max(compute, link) + (1 - overlap) * min(compute, link)
            for compute, link in zip(plain.compute_s, found.links.whole_s, strict=True)
        )
        pipe = m * whole / pp if vpp > 1 else float(without_memory_s(whole, np.array(float(m)), pp))
        return pipe + found.once_s

    def second_bound(self, members: list[tuple[int, Row]], cutoff_s: Floats) -> tuple[Floats, Ints]:
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
                sizes = list(self.space.cut) or sizes_of(self.space.shape, pp * vpp)
                more, cuts[some] = even_s(pipes, sizes, cutoff_s[some]), np.array(sizes)
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


def _state_bytes(layout: ParallelLayout, zero: Floats, ranks: Floats, shard_ranks: Floats) -> Floats:
    """Of one parameter, as `estimate.memory.states` counts them."""
    shards = np.maximum(np.where(shard_ranks > 0, np.minimum(shard_ranks, ranks), ranks), 1.0)
    gradient = np.where(zero == 3, MASTER_BYTES, layout.grad_bytes) / np.where(zero >= 2, shards, 1.0)
    optimizer = (MASTER_BYTES + moment_bytes(layout)) / np.where(zero >= 1, shards, 1.0)
    return np.where(zero == 3, 0.0, 2.0) + gradient + optimizer
