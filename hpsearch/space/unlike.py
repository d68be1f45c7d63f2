"""Bounds of layouts on groups of unlike nodes: every way to put the stages on groups, each stage with the seconds and
the room of its own devices.

With t_s the seconds of a micro-batch on stage s where it stands, at least those of its layers there and of the
recompute that its room asks for, and b the seconds of layers on the cluster's device, which are never more,

(1) to (3) of `bound.py` hold for 1F1B with b in place of t on every other stage, (1) for all forwards first; any
schedule has m·t_s. As there the first stages have as many
layers as a limit L allows: a stage that starts a layer later has m times that layer's own seconds less to do, and b of
them, which are fewer, comes before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate.stages import filled_sizes
from hpsearch.estimate.stands import Stand, arrangements
from hpsearch.estimate.uneven import ranks_of, shares
from hpsearch.space.bound import PRECISION
from hpsearch.space.prices import Prices
from hpsearch.space.space import Row, names_of
from hpsearch.space.tables import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


MOST_STAGES = 16
"""Of a pipeline whose cuts are bounded stage by stage."""


@dataclass(frozen=True)
class Placed:
    """A layout's stages on groups."""

    bound_s: float
    """Of the step, over all cuts and recomputed layers."""
    stands: tuple[Stand, ...]
    cut: tuple[int, ...]
    """That reaches the bound."""


@dataclass(frozen=True)
class _Stage:
    """One stage of every pipeline, an entry each: columns of tables where it stands."""

    packed: Floats
    """[pipelines, layers + 1, 5]: seconds, saved, freed, dense, expert before a layer."""
    rho: Floats
    more_s: Floats
    """Of embedding and head, if they stand here."""
    dense: Floats
    moment: Floats
    """Bytes beside states and activations."""
    alive: Floats
    per: Floats
    """[pipelines, 2]: state bytes of a dense and an expert parameter."""
    room: Floats
    share: Floats
    """Of the seconds of a micro-batch, the forward is at most this."""
    inputs: Floats
    """And the input part of the backward."""

    def seconds(self, start: Ints, end: Ints) -> Floats:
        """Of a micro-batch, at least; inf where it does not fit."""
        at = np.arange(len(start))
        seconds, saved, freed, dense, expert = (self.packed[at, end] - self.packed[at, start]).T
        states = (dense + self.dense) * self.per[:, 0] + expert * self.per[:, 1]
        excess = np.maximum(states + self.alive * saved + self.moment - self.room, 0.0) / self.alive
        return np.where(excess <= freed * (1 + 1e-9), seconds + self.more_s + self.rho * excess, np.inf)


@dataclass
class Unlike:
    """Bounds on a cluster with groups; keeps prices on each of them."""

    prices: Prices
    worlds: dict[Stand, Prices] = field(default_factory=dict)
    """The space as if all devices were of these groups."""

    def placed(self, number: int, row: Row, cut: tuple[int, ...], cutoff_s: float) -> list[Placed]:
        """Those that may take less than `cutoff_s`, the least bound first. `cut`: to begin with where there are so many
        stages that cuts are not bounded one by one."""
        space, inside = self.prices.space, self.prices.insides[number]
        pp, vpp, dp, m = row[:4]
        (schedule,) = names_of(row[6])
        ways = arrangements(space.cluster, pp, inside.tp * inside.cp * dp)
        around = self.prices.around(number, row)
        base = self.prices.table(number, row)
        hop_s = around.hop_s + base.hop_bytes * around.hop_s_per_byte
        limit = np.full(len(ways), cutoff_s - around.once_s)
        if vpp > 1:
            pipe_s, cuts = self._even(number, row, ways)
        elif pp > MOST_STAGES:
            pipe_s, cuts = self._spread(number, row, ways), np.tile(np.array(cut, dtype=np.int64), (len(ways), 1))
        else:
            stages = [self._stage(number, row, [way[s] for way in ways], s, schedule) for s in range(pp)]
            pipe_s, cuts = _least(_Line(stages, base, float(m), hop_s, schedule), limit)
            if ranks := ranks_of(space.cluster, space.layout(inside, row)):
                pipe_s, cuts = self._shared(number, row, stages[0], ranks), np.array([[base.layers]])
        found = [
            Placed(seconds + around.once_s, way, tuple(cut))
            for seconds, way, cut in zip(pipe_s.tolist(), ways, cuts.tolist(), strict=True) if seconds < limit[0]
        ]  # fmt: skip
        return sorted(found, key=lambda one: (one.bound_s, one.stands))

    def _shared(self, number: int, row: Row, stage: _Stage, ranks: tuple[int, ...]) -> Floats:
        """Of data ranks that may have unequal shares of the batch: with the best of them, by the least seconds."""
        inside, layers = self.prices.insides[number], np.array([stage.packed.shape[1] - 1])
        again = stage.seconds(0 * layers, layers) - stage.packed[:, -1, 0] - stage.more_s
        tables = [self._table(number, row, (group.name,)) for group in self.prices.space.cluster.groups]
        freed = np.divide(again, stage.rho, out=np.zeros_like(again), where=stage.rho > 0)
        if not np.isfinite(again[0]):
            return again
        seconds = [one.total_s + one.again_s_per_byte * float(freed[0]) for one in tables]
        counts = shares(seconds, ranks, -(-self.prices.space.global_batch // inside.micro_batch))
        return np.array([max(a * b for a, b in zip(seconds, counts, strict=True))]) * (1 - 1e-9)

    def _world(self, stand: Stand) -> Prices:
        if stand not in self.worlds:
            space = self.prices.space
            self.worlds[stand] = Prices(replace(space, cluster=space.cluster.among(stand)))
        return self.worlds[stand]

    def _table(self, number: int, row: Row, stand: Stand) -> Table:
        world = self._world(stand)
        return world.table(world.price(self.prices.insides[number]), row)

    def _spread(self, number: int, row: Row, ways: Sequence[tuple[Stand, ...]]) -> Floats:
        """All layers spread over the stages without any loss: those of a stage take at least `slower` times as long
        there as on the cluster's device, so with limit L it has layers of L / (m·slower) seconds of that."""
        base = self.prices.table(number, row)
        rate: dict[Stand, float] = {}
        for stand in dict.fromkeys(stand for way in ways for stand in way):
            own = self._table(number, row, stand)
            parts = [float((np.diff(own.base_s) / np.diff(base.base_s)).min())]
            parts += [a / b for a, b in ((own.first_s, base.first_s), (own.last_s, base.last_s)) if b]
            rate[stand] = 1 / min(parts)
        return np.array([row[3] * base.total_s / sum(rate[stand] for stand in way) for way in ways]) * (1 - 1e-9)

    def _even(self, number: int, row: Row, ways: Sequence[tuple[Stand, ...]]) -> tuple[Floats, Ints]:
        """Of chunks that are cut alike: what the rank with most to do takes."""
        pp, vpp, _, m = row[:4]
        layout = self.prices.space.layout(self.prices.insides[number], row)
        sizes = list(self.prices.space.cut) or filled_sizes(self.prices.space.shape, pp * vpp)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        base = self.prices.table(number, row)
        before = base.forward_s if layout.is_split else base.base_s
        first = base.first_forward_s if layout.is_split else base.first_s
        found = []
        for way in ways:
            tables = [self._table(number, row, stand) for stand in way]
            chunks = np.diff(np.array([one.base_s[ends] for one in tables]), axis=1)
            ranks = [m * float(chunks[r, list(layout.chunks_of(r))].sum()) for r in range(pp)]
            found.append(max(all_s + float(before[ends[r]]) + (first if r else 0.0) for r, all_s in enumerate(ranks)))
        return np.array(found), np.tile(np.array(sizes, dtype=np.int64), (len(ways), 1))

    def _stage(self, number: int, row: Row, stands: list[Stand], stage: int, schedule: str) -> _Stage:
        """A stage that stands on each of `stands`."""
        pp, _, _, m = row[:4]
        tables = {stand: self._table(number, row, stand) for stand in dict.fromkeys(stands)}
        first, last = stage == 0, stage == pp - 1
        packed = {
            stand: np.stack([t.base_s, t.saved_bytes, t.freed_bytes, t.dense, t.expert], axis=1)
            for stand, t in tables.items()
        }
        worlds = {stand: self._world(stand) for stand in tables}
        around = {stand: one.around(one.numbers[self.prices.insides[number]], row) for stand, one in worlds.items()}

        def column(name: str) -> Floats:
            return np.array([getattr(tables[stand], name) for stand in stands], dtype=np.float64)

        none = dense = np.zeros(len(stands))
        if first or last:
            dense = column("both_dense" if first and last else "first_dense" if first else "last_dense")
        moment = np.maximum(column("layer_bytes"), column("loss_bytes")) if last else column("layer_bytes")
        moment = moment + column("exchange_bytes") + (4 * column("hop_bytes") if pp > 1 else 0.0)
        most = {"1f1b": min(m, pp - stage), "gpipe": m}.get(schedule, 1)  # split backwards keep one at least
        alive = np.full(len(stands), float(most))
        return _Stage(
            np.array([packed[stand] for stand in stands]), column("again_s_per_byte"),
            (column("first_s") if first else none) + (column("last_s") if last else none), dense, moment, alive,
            np.array([(around[s].per_dense, around[s].per_expert) for s in stands]),
            np.array([around[s].room_bytes for s in stands]), np.array([tables[s].shares[0] for s in stands]),
            np.array([tables[s].shares[1] for s in stands]),
        )  # fmt: skip


@dataclass(frozen=True)
class _Line:
    """Pipelines of one layout, which differ in where their stages stand."""

    stages: list[_Stage]
    base: Table
    """On the cluster's device."""
    micro_batches: float
    hop_s: float
    schedule: str

    def budget(self, s: int, at: Ints, limit: Floats) -> Floats:
        """Seconds that stage s, which starts at layer `at`, may take for a micro-batch."""
        m, hop_s, base, p = self.micro_batches, self.hop_s, self.base, len(self.stages)
        behind = p - 1 - s
        if self.schedule not in ("1f1b", "gpipe"):
            return self._split(s, at, limit)
        before = base.base_s[at] + (base.first_s if s else 0.0)
        found = (limit - before - 2 * s * hop_s) / m
        if self.schedule == "1f1b":
            times = m - 1 - min(behind, m - 1) * self.stages[s].share
            second = (limit - base.total_s - 2 * (p - 1) * hop_s) / np.maximum(times, 1e-9)
            found = np.minimum(found, np.where(times > 0, second, np.inf))
            if (fewer := m - behind - 2) > 0:
                third = limit - 2 * (s + 2 * behind) * hop_s - 2 * base.total_s + before
                found = np.minimum(found, third / fewer)
        return np.asarray(found * (1 + 1e-9))

    def _split(self, s: int, at: Ints, limit: Floats) -> Floats:
        """Where backwards are split, weight parts may come last: the first micro-batch's way to s, and all work of s.
        As ZB-H1 has no more forwards before its first backward than 1F1B: the way down and back to s, and what s has
        not done by then."""
        m, base, p = self.micro_batches, self.base, len(self.stages)
        forward = base.forward_s[at] + (base.first_forward_s if s else 0.0)
        found = (limit - forward - s * self.hop_s) / m
        if self.schedule == "zb-h1":
            inputs = base.base_s - base.forward_s - base.weight_s
            last = base.last_s - base.last_forward_s - base.last_weight_s
            down = base.forward_s[-1] + base.first_forward_s + base.last_forward_s
            back = inputs[-1] + last - inputs[at]
            own = np.maximum(self.stages[s].inputs, base.shares[1])
            times = m - min(m, p - s) * self.stages[s].share - own
            left = limit - down - back - (2 * (p - 1) - s) * self.hop_s
            found = np.minimum(found, np.where(times > 0, left / np.maximum(times, 1e-9), np.inf))
        return np.asarray(found * (1 + 1e-9))


def _least(line: _Line, cutoff_s: Floats) -> tuple[Floats, Ints]:
    """The bound of each pipeline, and the cut within the last limit that had one; inf above the cutoff."""
    low = np.full_like(cutoff_s, line.micro_batches * line.base.total_s / len(line.stages))
    cuts, reached = _deal(line, cutoff_s)
    high = np.where(reached, cutoff_s, low)
    while ((high - low) > PRECISION * low).any():
        middle = np.minimum((low + high) / 2, 1.2 * low)
        more, now = _deal(line, middle)
        cuts = np.where(now[:, None], more, cuts)
        low, high = np.where(now, low, np.where(reached, middle, low)), np.where(now, middle, high)
    return np.where(reached, low, np.inf), cuts


def _deal(line: _Line, limit: Floats) -> tuple[Ints, Bools]:
    """Layers of each stage if each has as many as `limit` allows, and whether all are dealt out."""
    count, layers, p = len(limit), line.base.layers, len(line.stages)
    at, ends = np.zeros(count, dtype=np.int64), np.zeros((count, p), dtype=np.int64)
    fine = np.ones(count, dtype=np.bool_)
    for s, stage in enumerate(line.stages):
        budget = line.budget(s, at, limit)
        if s == p - 1:
            seconds = stage.seconds(at, np.full_like(at, layers))
            fine &= np.isfinite(seconds) & (seconds <= budget)
            ends[:, s] = layers
            continue
        low, high = at.copy(), np.full_like(at, layers - (p - 1 - s))
        for _ in range(int(layers).bit_length()):
            middle = np.maximum((low + high + 1) // 2, low)
            seconds = stage.seconds(at, middle)
            good = np.isfinite(seconds) & (seconds <= budget)
            low, high = np.where(good, middle, low), np.where(good, high, np.maximum(middle - 1, low))
        at = ends[:, s] = np.maximum(low, at)
    for s in range(p - 2, -1, -1):
        ends[:, s] = np.minimum(ends[:, s], ends[:, s + 1] - 1)
    for s in range(p - 1):
        ends[:, s] = np.maximum(ends[:, s], s + 1)
    return np.diff(ends, axis=1, prepend=0), fine
