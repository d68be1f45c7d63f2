"""The bound of `bound.py` over all cuts and recomputed layers, of layouts of one chunk a rank with any schedules and
numbers of stages at once.

Here recompute is bounded by what a stage has. Of its layers those with least seconds for a byte freed come first, the
others next; and as layers are computed again whole, there are at least so many as free enough if all free most, the
quickest first. A stage that starts one layer later has to free as much less as that layer could have freed, so it never
computes more again.
Layouts stand side by side, those of most stages first, so that those which have a stage s are the first ones. A chain
of a schedule through stage s leaves it, of a limit L, at most

    (L - a·(base, forward, weight seconds before s) - c_0 - c_1·s) / (n_0 + n_1·min(p - 1 - s, n_2))

with numbers that are the layout's own (`_Chains`), so that all schedules are one expression.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpsearch.space.bound import PRECISION, WHOLE, WIDER, Bounds, without_memory_s
from hpsearch.space.tables import PREFIXES as TABLES
from hpsearch.space.tables import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
DEALT = (*WHOLE, "zb-h1")
"""Schedules of one chunk a rank."""
SPLIT = DEALT.index("zb-h1")
SCALARS = (
    "first_s", "last_s", "first_forward_s", "last_forward_s", "first_weight_s", "last_weight_s", "first_dense",
    "last_dense", "both_dense", "loss_bytes", "layer_bytes", "exchange_bytes", "hop_bytes", "total_s",
)  # fmt: skip
PREFIXES = ("base_s", "forward_s", "weight_s", "saved_bytes", "freed_bytes", "dense", "expert", "owed_bytes")
TIMES = 3
"""Of these, seconds."""


@dataclass(frozen=True)
class Lines:
    """Layouts of one chunk a rank, one entry each, none with fewer stages before one with more."""

    tables: tuple[Table, ...]
    table: Ints
    """Which table."""
    kind: Ints
    """Place of the schedule in DEALT."""
    stages: Ints
    micro_batches: Floats
    hop_s: Floats
    room_bytes: Floats
    per_dense: Floats
    per_expert: Floats

    def of(self, some: Ints) -> Lines:
        """Some of them."""
        return Lines(
            self.tables, self.table[some], self.kind[some], self.stages[some], self.micro_batches[some],
            self.hop_s[some], self.room_bytes[some], self.per_dense[some], self.per_expert[some],
        )  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """Tables side by side."""

    prefixes: Floats
    """[tables, layers + 1, PREFIXES and what `Again` has]."""
    scalars: Floats
    """[SCALARS, shares and what `Again` has; tables]."""

    @cached_property
    def apart_s(self) -> float:
        return 2 * float(self.prefixes[:, -1, 0].max())

    @cached_property
    def base_s(self) -> Floats:
        """All tables' seconds before each layer in one ascending row, tables `apart_s` from each other."""
        return np.asarray((self.prefixes[:, :, 0] + self.apart_s * np.arange(len(self.prefixes))[:, None]).ravel())

    @staticmethod
    def of(tables: tuple[Table, ...]) -> Packed:
        prefixes = np.stack([one.prefixes for one in tables])[:, :, [TABLES.index(name) for name in PREFIXES]]
        again = np.stack([one.again.prefixes for one in tables])
        scalars = [[*(getattr(one, name) for name in SCALARS), *one.shares, *one.again.scalars] for one in tables]
        return Packed(np.concatenate([prefixes, again], axis=2), np.array(scalars, dtype=np.float64).T)


class _Stack:
    """Columns of layouts, and the values of their tables before layer l as one lookup."""

    def __init__(self, lines: Lines, packed: Packed) -> None:
        self.lines, self.packed = lines, packed
        self.k, self.p, self.m = lines.table, lines.stages, lines.micro_batches
        self.per_dense, self.per_expert = lines.per_dense, lines.per_expert
        (self.first_s, self.last_s, self.first_forward_s, self.last_forward_s, self.first_weight_s, self.last_weight_s,
         self.first_dense, self.last_dense, self.both_dense, self.loss, self.layer, exchange, hop_bytes, self.whole_s,
         self.share, self.input_share, self.weight_share, self.least_weight_s, self.most_freed, self.cheap_rho,
         self.rho, self.quick_s, self.again_s) = packed.scalars[:, self.k]  # fmt: skip
        self.room = lines.room_bytes - exchange - np.where(self.p > 1, 4 * hop_bytes, 0.0)
        self.layers = packed.prefixes.shape[1] - 1
        self.is_split, self.is_usual = lines.kind == SPLIT, lines.kind == 0
        self.chains = _Chains.of(self)

    def some(self, which: Ints) -> _Stack:
        return _Stack(self.lines.of(which), self.packed)

    def alive(self, n: int, stage: Ints | int, *, is_forward: bool = False) -> tuple[Floats, Floats]:
        """Of the first n layouts: forwards that keep what a backward reads, and input parts that keep what a weight
        part does; in a backward, or after a forward."""
        m, behind = self.m[:n], self.p[:n] - stage
        split, late = self.is_split[:n], 0 if is_forward else 1
        kept = np.where(split, behind - late, np.where(self.is_usual[:n], np.minimum(m, behind), m))
        return kept, np.where(split, self.p[:n] - behind + late, 0.0)

    def stage_s(
        self, n: slice | Ints, alive: tuple[Floats, Floats], i: Ints, j: Ints, first: Bools | bool,
        moment: Floats | None = None,
    ) -> Floats:  # fmt: skip
        """Least seconds of a micro-batch on a stage with layers i to j, of the layouts n; inf: do not fit. `moment`: of
        the last stage, bytes beside states and activations."""
        held = self.packed.prefixes[self.k[n], j] - self.packed.prefixes[self.k[n], i]
        seconds, _, _, saved, freed, dense, expert, owed, cheap, quick = held.T
        if moment is not None:
            seconds = seconds + self.last_s[n] + np.where(first, self.first_s[n], 0.0)
            dense = dense + np.where(first, self.both_dense[n], self.last_dense[n])
        else:
            seconds, dense = (seconds + self.first_s[n], dense + self.first_dense[n]) if first else (seconds, dense)
            moment = self.layer[n]
        kept, left = alive
        states = dense * self.per_dense[n] + expert * self.per_expert[n]
        excess = np.maximum(states + kept * saved + left * owed + moment - self.room[n], 0.0) / np.maximum(kept, 1e-9)
        again = self.cheap_rho[n] * np.minimum(excess, cheap) + self.rho[n] * np.maximum(excess - cheap, 0.0)
        count = np.ceil(excess / self.most_freed[n] - 1e-6)
        whole = self.quick_s[n] * np.minimum(count, quick) + self.again_s[n] * np.maximum(count - quick, 0.0)
        return np.where(excess <= freed * (1 + 1e-9), seconds + np.maximum(again, whole), np.inf)

    def last_stage_s(self, at: Ints) -> Floats:
        """`stage_s` of every layout's last stage, which starts at layer `at`. 1F1B has the loss and a backward at once,
        as the estimate counts them; others one behind the other."""
        ends, first = np.full(len(at), self.layers, dtype=np.int64), self.p == 1
        moment = np.where(self.is_usual, np.maximum(self.layer, self.loss), self.layer)
        every = slice(0, len(at))
        found = self.stage_s(every, self.alive(len(at), self.p - 1), at, ends, first, moment)
        if self.is_usual.all():
            return found
        after = self.alive(len(at), self.p - 1, is_forward=True)
        loss = np.where(self.is_usual, moment, self.loss * after[0])
        return np.maximum(found, self.stage_s(every, after, at, ends, first, loss))

    def plain(self, n: int, at: Ints, most: Ints, seconds: Floats) -> Ints:
        """Of the first n layouts, how many layers from `at` on, at most `most`, take so many seconds if nothing is
        computed again."""
        base, k = self.packed.prefixes[:, :, 0], self.k[:n]
        limit = (seconds + base[k, at]) * (1 + 1e-12)
        found = np.searchsorted(self.packed.base_s, limit + self.packed.apart_s * k, side="right")
        found = np.clip(found - 1 - k * (self.layers + 1) - at, 0, most)
        while (over := (found > 0) & (base[k, at + found] > limit)).any():  # tables side by side are rounded
            found = found - over
        while (under := (found < most) & (base[k, np.minimum(at + found + 1, self.layers)] <= limit)).any():
            found = found + under
        return np.asarray(found)

    def budget(self, n: int, limit: Floats, stage: Ints | int, at: Ints) -> Floats:
        """Seconds that a stage which starts at layer `at` may take for a micro-batch."""
        before = self.packed.prefixes[self.k[:n], at, :TIMES].T
        return self.chains.left_s(n, limit, stage, before, self.p[:n] - 1 - stage)


@dataclass(frozen=True)
class _Chains:
    """Chains (1) to (7) of `bound.py`, three of each layout, as the numbers that the expression above has."""

    before: Floats
    """[3 chains, 3 seconds, layouts] a."""
    ends: Floats
    """[3, layouts] of the embedding, a times its seconds."""
    fixed_s: Floats
    """[3, layouts] c_0."""
    hop_s: Floats
    """[3, layouts] c_1."""
    times: Floats
    """[3, layouts] n_0."""
    fewer: Floats
    """[3, layouts] n_1."""
    most: Floats
    """[3, layouts] n_2."""

    @staticmethod
    def of(stack: _Stack) -> _Chains:
        p, m, hop_s, none = stack.p.astype(np.float64), stack.m, stack.lines.hop_s, np.zeros(len(stack.p))
        whole, one, way = stack.whole_s, none + 1, 2 * (p - 1) * stack.lines.hop_s
        endless = none + np.inf
        last = stack.packed.prefixes[stack.k, -1]
        forward_s = last[:, 1] + stack.first_forward_s + stack.last_forward_s
        input_s = whole - forward_s - (last[:, 2] + stack.first_weight_s + stack.last_weight_s)
        usual = (  # (1), (2), (3)
            ((one, none, none), none, 2 * hop_s, m, none, endless),
            ((none, none, none), whole + way, none, m - 1, -stack.share, m - 1),
            ((-one, none, none), 2 * whole + 2 * way, -2 * hop_s, m - 2, -one, endless),
        )
        filled = (  # (1), (4)
            usual[0],
            ((none, none, none), whole + way, none, m - 1, none, endless),
            ((none, none, none), none, none, -one, none, endless),
        )
        weight = stack.weight_share
        split = (  # (5), (6), (7)
            ((none, one, none), none, hop_s, m, none, endless),
            ((one, none, -one), stack.least_weight_s, 2 * hop_s, m - p * weight, weight, endless),
            ((-one, one, one), forward_s + input_s + way, -hop_s, m - stack.share - stack.input_share, -stack.share,
             endless),
        )  # fmt: skip
        rows = [[row for row, *_ in chains] for chains in (usual, filled, split)]
        before = [_chosen(stack, [[row[i] for row in one] for one in rows]) for i in range(TIMES)]
        ends = before[0] * stack.first_s + before[1] * stack.first_forward_s + before[2] * stack.first_weight_s
        others = [[list(rest) for _, *rest in chains] for chains in (usual, filled, split)]
        rest = [_chosen(stack, [[row[i] for row in one] for one in others]) for i in range(5)]
        return _Chains(np.stack(before, axis=1), ends, *rest)

    def left_s(self, n: int, limit: Floats, stage: Ints | int, before: Floats, behind: Ints) -> Floats:
        """Of the first n layouts."""
        spent = (self.before[:, :, :n] * before).sum(axis=1) + np.where(np.asarray(stage) > 0, self.ends[:, :n], 0.0)
        left = limit - spent - self.fixed_s[:, :n] - self.hop_s[:, :n] * stage
        times = self.times[:, :n] + self.fewer[:, :n] * np.minimum(behind, self.most[:, :n])
        return np.asarray(np.where(times > 0, left / np.maximum(times, 1e-9), np.inf).min(axis=0))

    def most_s(self, limit: Floats, start: Ints, end: Ints, before: Floats, stages: Ints) -> Floats:
        """What any stage from `start` to `end` - 1 may take at most, `before` what is before the first: by those chains
        that leave a later one no more, with as few times as any has."""
        spent = (self.before[:2] * before).sum(axis=1) + np.where(start > 0, self.ends[:2], 0.0)
        left = limit - spent - self.fixed_s[:2] - self.hop_s[:2] * start
        fewer = np.where(self.fewer[:2] < 0, stages - 1 - start, stages - end)
        times = self.times[:2] + self.fewer[:2] * np.minimum(fewer, self.most[:2])
        return np.asarray(np.where(times > 0, left / np.maximum(times, 1e-9), np.inf).min(axis=0))


def _chosen(stack: _Stack, columns: list[list[Floats]]) -> Floats:
    """[3 chains, layouts]: of three schedules' chains those of each layout."""
    kind = stack.lines.kind
    return np.asarray(np.array(columns)[kind, :, np.arange(len(kind))].T)


def least_s(lines: Lines, cutoff_s: Floats, precision: float = PRECISION) -> Bounds:
    """The bound of each layout over all cuts into stages of at least one layer each, at most a share of `precision` too
    low; inf where it is above the cutoff as well, without saying by how much. Cuts have zeros behind their last stage.
    """
    stack = _Stack(lines, Packed.of(lines.tables))
    p = stack.p.astype(np.float64)
    low = np.where(stack.is_split, stack.whole_s * stack.m / p, without_memory_s(stack.whole_s, stack.m, p))
    low = np.minimum(low, cutoff_s)
    cuts, reached = np.zeros((len(p), int(stack.p.max(initial=1))), dtype=np.int64), np.zeros(len(p), dtype=np.bool_)
    some = np.flatnonzero(_may_reach(stack, cutoff_s))
    if len(some):
        dealt, reached[some] = _deal(stack.some(some), cutoff_s[some])
        cuts[some, : dealt.shape[1]] = dealt
    high, left = cutoff_s.copy(), np.flatnonzero(reached)
    while len(left := left[high[left] - low[left] > precision * low[left]]):
        middle = np.minimum((low[left] + high[left]) / 2, low[left] * WIDER)
        more, now = _deal(stack.some(left), middle)
        cuts[left[now], : more.shape[1]] = more[now]
        high[left[now]], low[left[~now]] = middle[now], middle[~now]
    return Bounds(np.where(reached, low, np.inf), cuts)


def _may_reach(stack: _Stack, limit: Floats) -> Bools:
    """Whether `_deal` may deal out all layers, told from a few blocks of stages: each stage of a block may have as many
    layers as the time of the first and the room of the last allow. Only where layers are alike; else, and of few
    stages, all may."""
    p, count = stack.p, len(limit)
    may, each = np.ones(count, dtype=np.bool_), -(-(p - 1) // BLOCKS)
    if int(p.max(initial=1)) < 2 * BLOCKS or not all(table.is_uniform for table in stack.lines.tables):
        return may
    at = one = np.zeros(count, dtype=np.int64)
    for block in range(BLOCKS):
        start = np.minimum(block * each, p - 1)
        end = np.minimum(start + each, p - 1)
        before = stack.packed.prefixes[stack.k, at, :TIMES].T
        budget = stack.chains.most_s(limit * (1 + 1e-9), start, end, before, p)
        most = np.maximum(stack.layers - (p - end) - at, 0)
        alive = stack.alive(count, end - 1)[0], stack.alive(count, start)[1]
        one = _most_within(stack, alive, at, stack.plain(count, at, most, budget), budget, one, is_first=False)
        at = at + np.minimum((end - start) * one, most)
        may &= at >= end
    seconds = stack.last_stage_s(at)
    return np.asarray(may & (seconds <= stack.budget(count, limit, p - 1, at) * (1 + 1e-9)))


BLOCKS = 16
"""Of stages, looked at before single ones."""


def _deal(stack: _Stack, limit: Floats) -> tuple[Ints, Bools]:
    """Layers of each stage if each takes as many as `limit` allows, and whether all are dealt out.

    A stage may take none: those before it may have taken a small layer that was its own, and left it one that only
    later stages have room for. The cuts then give it one of theirs.
    """
    count, longest, layers, p = len(limit), int(stack.p.max(initial=1)), stack.layers, stack.p
    (at, took), fine = np.zeros((2, count), dtype=np.int64), np.ones(count, dtype=np.bool_)
    ends = np.full((count, longest), layers, dtype=np.int64)
    for stage in range(longest - 1):
        n = int(np.searchsorted(-p, -(stage + 1), side="left"))
        here = at[:n]
        budget = stack.budget(n, limit[:n], stage, here)
        most = layers - (p[:n] - 1 - stage) - here
        took[:n] = _most(stack, n, stage, here, most, budget, took[:n])
        at[:n] = here + took[:n]
        fine[:n] &= at[:n] > stage
        ends[:n, stage] = at[:n]
    seconds = stack.last_stage_s(at)
    fine &= np.isfinite(seconds) & (seconds <= stack.budget(count, limit, p - 1, at))
    for stage in range(longest - 2, -1, -1):
        n = int(np.searchsorted(-p, -(stage + 1), side="left"))
        ends[:n, stage] = np.minimum(ends[:n, stage], ends[:n, stage + 1] - 1)
    return np.diff(ends, axis=1, prepend=0), fine


def _most(stack: _Stack, n: int, stage: int, at: Ints, most: Ints, budget: Floats, before: Ints) -> Ints:
    """Most layers from `at` on that take no longer than `budget`; 0: not even one. First as many as take that long
    without recompute: mostly that is all."""
    high = stack.plain(n, at, np.maximum(most, 0), budget - (stack.first_s[:n] if stage == 0 else 0.0))
    return _most_within(stack, stack.alive(n, stage), at, high, budget, before, is_first=stage == 0)


def _most_within(
    stack: _Stack, alive: tuple[Floats, Floats], at: Ints, high: Ints, budget: Floats, before: Ints, *, is_first: bool
) -> Ints:  # fmt: skip
    """Most layers up to `high` that take no longer than `budget` on a stage with so many alive; 0: not even one. Tried
    after all are as many as the stage before has, `before`, and one more; then halves."""
    kept, owed = alive
    low, middle, left, turn = np.zeros_like(at), high.copy(), np.flatnonzero(high > 0), 0
    while len(left):
        here = at[left]
        seconds = stack.stage_s(left, (kept[left], owed[left]), here, here + middle[left], is_first)
        good = np.isfinite(seconds) & (seconds <= budget[left])
        low[left[good]], high[left[~good]] = middle[left[good]], middle[left[~good]] - 1
        left, turn = left[low[left] < high[left]], turn + 1
        middle[left] = (low[left] + high[left] + 1) // 2
        if turn < 3:
            middle[left] = np.clip(before[left] + turn - 1, low[left] + 1, high[left])
    return low
