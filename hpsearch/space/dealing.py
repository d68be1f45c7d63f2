"""The bound of `bound.py` over all cuts and recomputed layers, of 1F1B layouts with any numbers of stages at once.

Here recompute is bounded by what a stage has. Of its layers those with least seconds for a byte freed come first, the
others next; and as layers are computed again whole, there are at least so many as free enough if all free most, the
quickest first. A stage that starts one layer later has to free as much less as that layer could have freed, so it never
computes more again.
Layouts stand side by side, those of most stages first, so that those which have a stage s are the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpsearch.space.bound import PRECISION, WIDER, Bounds, without_memory_s
from hpsearch.space.tables import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
SCALARS = (
    "first_s", "last_s", "first_dense", "last_dense", "both_dense", "loss_bytes", "layer_bytes",
    "exchange_bytes", "hop_bytes", "total_s",
)  # fmt: skip
PREFIXES = ("base_s", "saved_bytes", "freed_bytes", "dense", "expert")


@dataclass(frozen=True)
class Lines:
    """1F1B layouts, one entry each, none with fewer stages before one with more."""

    tables: tuple[Table, ...]
    table: Ints
    """Which table."""
    stages: Ints
    micro_batches: Floats
    hop_s: Floats
    room_bytes: Floats
    per_dense: Floats
    per_expert: Floats


@dataclass(frozen=True)
class _Again:
    """What computing layers again costs, two kinds of layers apart: the best and all others."""

    cheap: Floats
    """[layers + 1] bytes freed by those, of the layers before l, that take least for a byte."""
    quick: Floats
    """[layers + 1] number of those that take least."""
    scalars: tuple[float, float, float, float, float]
    """Most bytes of one layer; seconds a byte of the cheap, of the others; seconds of the quick, of the others."""

    @staticmethod
    def of(table: Table) -> _Again:
        freed, again = np.diff(table.freed_bytes), np.diff(table.again_s)
        rho = np.where(freed > 0, again / np.maximum(freed, 1e-9), np.inf)
        least, others = _two(rho)
        quickest, slower = _two(np.where(freed > 0, again, np.inf))
        cheap = np.where(rho <= least * (1 + 1e-9), freed, 0.0)
        quick = np.where((again <= quickest * (1 + 1e-9)) & (freed > 0), 1.0, 0.0)
        scalars = max(float(freed.max()), 1.0), least, others, quickest, slower
        before = [np.concatenate([[0.0], np.cumsum(one)]) for one in (cheap, quick)]
        return _Again(before[0], before[1], scalars)


def _two(values: Floats) -> tuple[float, float]:
    """The least, and the least of those above it; 0 for none."""
    least = float(values.min())
    above = values[values > least * (1 + 1e-9)]
    second = float(above.min()) if len(above) else np.inf
    return (least if least < np.inf else 0.0), (second if second < np.inf else 0.0 if least == np.inf else least)


class _Stack:
    """Columns of layouts, and the values of their tables before layer l as one lookup."""

    def __init__(self, lines: Lines, packed: Floats, scalars: Floats, some: Ints | slice) -> None:
        self.lines, self.packed, self.scalars = lines, packed, scalars
        self.k, self.p, self.m = lines.table[some], lines.stages[some], lines.micro_batches[some]
        self.hop_s, self.room = lines.hop_s[some], lines.room_bytes[some]
        self.per_dense, self.per_expert = lines.per_dense[some], lines.per_expert[some]
        (self.first_s, self.last_s, self.first_dense, self.last_dense, self.both_dense, self.loss, self.layer, exchange,
         hop_bytes, self.whole_s, self.share, self.most_freed, self.cheap_rho, self.rho, self.quick_s,
         self.again_s) = scalars[:, self.k]  # fmt: skip
        self.fixed = exchange + np.where(self.p > 1, 4 * hop_bytes, 0.0)
        self.layers = packed.shape[1] - 1
        self.steps = max(int(self.layers).bit_length(), 1)

    @staticmethod
    def of(lines: Lines) -> _Stack:
        again = [_Again.of(t) for t in lines.tables]
        packed = np.stack([
            [*(getattr(t, name) for name in PREFIXES), one.cheap, one.quick]
            for t, one in zip(lines.tables, again, strict=True)
        ]).transpose(0, 2, 1)  # fmt: skip
        scalars = [[getattr(t, name) for t in lines.tables] for name in SCALARS]
        scalars.append([_forward_share(t) for t in lines.tables])
        scalars += [list(column) for column in zip(*(one.scalars for one in again), strict=True)]
        return _Stack(lines, np.ascontiguousarray(packed), np.array(scalars, dtype=np.float64), slice(None))

    def some(self, which: Ints) -> _Stack:
        return _Stack(self.lines_of(which), self.packed, self.scalars, slice(None))

    def lines_of(self, which: Ints) -> Lines:
        return Lines(
            self.lines.tables, self.k[which], self.p[which], self.m[which], self.hop_s[which], self.room[which],
            self.per_dense[which], self.per_expert[which],
        )  # fmt: skip

    def stage_s(self, n: int, alive: Floats, i: Ints, j: Ints, first: Bools | bool, last: bool) -> Floats:
        """Least seconds of a micro-batch on a stage with layers i to j, of the first n layouts; inf: do not fit."""
        held = self.packed[self.k[:n], j] - self.packed[self.k[:n], i]
        seconds, saved, freed, dense, expert, cheap, quick = held.T
        if last:
            seconds = seconds + self.last_s[:n] + np.where(first, self.first_s[:n], 0.0)
            dense = dense + np.where(first, self.both_dense[:n], self.last_dense[:n])
            moment = np.maximum(self.layer[:n], self.loss[:n])
        else:
            seconds, dense = (seconds + self.first_s[:n], dense + self.first_dense[:n]) if first else (seconds, dense)
            moment = self.layer[:n]
        states = dense * self.per_dense[:n] + expert * self.per_expert[:n]
        excess = np.maximum(states + alive * saved + moment + self.fixed[:n] - self.room[:n], 0.0) / alive
        again = self.cheap_rho[:n] * np.minimum(excess, cheap) + self.rho[:n] * np.maximum(excess - cheap, 0.0)
        count = np.ceil(excess / self.most_freed[:n] - 1e-6)
        whole = self.quick_s[:n] * np.minimum(count, quick) + self.again_s[:n] * np.maximum(count - quick, 0.0)
        return np.where(excess <= freed * (1 + 1e-9), seconds + np.maximum(again, whole), np.inf)

    def budget(self, n: int, limit: Floats, stage: Ints | int, at: Ints) -> Floats:
        """Seconds that a stage which starts at layer `at` may take for a micro-batch, by (1) to (3)."""
        p, m, hop_s, whole_s = self.p[:n], self.m[:n], self.hop_s[:n], self.whole_s[:n]
        before_s = self.packed[self.k[:n], at, 0] + np.where(np.asarray(stage) > 0, self.first_s[:n], 0.0)
        behind = p - 1 - stage
        first = (limit - before_s - 2 * stage * hop_s) / m
        times = m - 1 - np.minimum(behind, m - 1) * self.share[:n]
        second = (limit - whole_s - 2 * (p - 1) * hop_s) / np.maximum(times, 1e-9)
        fewer = m - behind - 2
        third = (limit - 2 * (stage + 2 * behind) * hop_s - 2 * whole_s + before_s) / np.maximum(fewer, 1e-9)
        less = np.minimum(np.where(times > 0, second, np.inf), np.where(fewer > 0, third, np.inf))
        return np.asarray(np.minimum(first, less))


def _forward_share(table: Table) -> float:
    """Of a stage's seconds for a micro-batch, nothing computed again, the forward is at most this."""
    ends = ((table.first_forward_s, table.first_s), (table.last_forward_s, table.last_s))
    largest = float((np.diff(table.forward_s) / np.diff(table.base_s)).max())
    return max(largest, *(part / whole for part, whole in ends if whole), 0.0) * (1 + 1e-12)


def least_s(lines: Lines, cutoff_s: Floats) -> Bounds:
    """The bound of each layout over all cuts into stages of at least one layer each; inf where it is above the cutoff
    as well, without saying by how much. Cuts have zeros behind their last stage."""
    stack = _Stack.of(lines)
    low = np.minimum(without_memory_s(stack.whole_s, stack.m, stack.p.astype(np.float64)), cutoff_s)
    cuts, reached = _deal(stack, cutoff_s)
    high, left = cutoff_s.copy(), np.flatnonzero(reached)
    while len(left := left[high[left] - low[left] > PRECISION * low[left]]):
        middle = np.minimum((low[left] + high[left]) / 2, low[left] * WIDER)
        more, now = _deal(stack.some(left), middle)
        cuts[left[now], : more.shape[1]] = more[now]
        high[left[now]], low[left[~now]] = middle[now], middle[~now]
    return Bounds(np.where(reached, low, np.inf), cuts)


def _deal(stack: _Stack, limit: Floats) -> tuple[Ints, Bools]:
    """Layers of each stage if each takes as many as `limit` allows, and whether all are dealt out.

    A stage may take none: those before it may have taken a small layer that was its own, and left it one that only
    later stages have room for. The cuts then give it one of theirs.
    """
    count, longest, layers, p = len(limit), int(stack.p.max(initial=1)), stack.layers, stack.p
    at, fine = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.bool_)
    ends = np.full((count, longest), layers, dtype=np.int64)
    for stage in range(longest - 1):
        n = int(np.searchsorted(-p, -(stage + 1), side="left"))
        here, alive = at[:n], np.minimum(stack.m[:n], p[:n] - stage)
        budget = stack.budget(n, limit[:n], stage, here)
        most = layers - (p[:n] - 1 - stage) - here
        at[:n] = here + _most(stack, n, stage, alive, here, most, budget)
        fine[:n] &= at[:n] > stage
        ends[:n, stage] = at[:n]
    all_layers = np.full(count, layers, dtype=np.int64)
    seconds = stack.stage_s(count, np.ones(count), at, all_layers, p == 1, last=True)
    fine &= np.isfinite(seconds) & (seconds <= stack.budget(count, limit, p - 1, at))
    for stage in range(longest - 2, -1, -1):
        n = int(np.searchsorted(-p, -(stage + 1), side="left"))
        ends[:n, stage] = np.minimum(ends[:n, stage], ends[:n, stage + 1] - 1)
    return np.diff(ends, axis=1, prepend=0), fine


def _most(stack: _Stack, n: int, stage: int, alive: Floats, at: Ints, most: Ints, budget: Floats) -> Ints:
    """Most layers from `at` on that take no longer than `budget`, by halving; 0: not even one."""
    low, high = np.zeros_like(at), np.maximum(most, 0)
    while (low < high).any():
        middle = (low + high + 1) // 2
        seconds = stack.stage_s(n, alive, at, at + middle, stage == 0, last=False)
        good = np.isfinite(seconds) & (seconds <= budget)
        low, high = np.where(good, middle, low), np.where(good, high, np.maximum(middle - 1, low))
    return low
