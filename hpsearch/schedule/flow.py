"""How long a schedule takes: every action starts when its rank is free and its input has arrived.

The rule of the event timeline (`hpsearch.schedule.simulate`), in arrays. Who waits for whom is read off a schedule
once; then all actions that wait for nothing but earlier ones are computed together, for many sets of times.
Sends run beside the compute and take `hop_s` between stages on different ranks. Nothing is extrapolated: all
micro-batches run. An overlapped pair takes as long as its two actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpsearch.schedule.dry_run import in_order
from hpsearch.schedule.schedule import KIND_ORDER, Ints, Rows, Schedule

Floats = NDArray[np.float64]
ENTRIES = 4_000_000
"""Most end times held at once: many sets of times are walked through in blocks."""
FEW = 40
"""Sets times ranks below which Python is faster than arrays of a few numbers (both give the same bits)."""


@dataclass(frozen=True)
class Waits:
    """For each of some nodes: the node of its input, the row of the hop on the way, the row of its work."""

    source: Ints
    edge: Ints
    work: Ints

    def of(self, nodes: slice) -> Waits:
        return Waits(self.source[nodes], self.edge[nodes], self.work[nodes])


@dataclass(frozen=True)
class Level:
    """Nodes none of which waits for another."""

    nodes: slice
    before: Ints
    waits: tuple[Waits, ...]
    """One; where there are overlapped pairs, one for their backwards too."""


@dataclass(frozen=True)
class Flow:
    """Nodes from 1 on, each behind all that it waits for; 0 is done at 0 s. Rows of work: F, I, W, B of each stage,
    0 s. Rows of hops: between stages i and i + 1, 0 s."""

    stages: int
    before: Ints
    """The node that the same rank did before."""
    waits: Waits
    pairs: Waits
    """Of the backwards in overlapped pairs; nothing for other nodes."""
    last: tuple[int, ...]
    """The last node of each rank; 0 where it does nothing."""
    crossing: tuple[bool, ...]
    """Whether stages i and i + 1 stand on different ranks."""

    @cached_property
    def listed(self) -> list[tuple[int, int, int, int]]:
        """`before` and `waits` by node, for a walk without arrays."""
        lists = (self.before, self.waits.source, self.waits.edge, self.waits.work)
        return list(zip(*(one[1:].tolist() for one in lists), strict=True))

    @cached_property
    def listed_pairs(self) -> dict[int, tuple[int, int, int]]:
        nodes = np.flatnonzero(self.pairs.work != 4 * self.stages).tolist()
        return {n: (int(self.pairs.source[n]), int(self.pairs.edge[n]), int(self.pairs.work[n])) for n in nodes}

    @cached_property
    def by_level(self) -> tuple[tuple[Level, ...], list[int]]:
        """Nodes numbered again, one level behind the other, and `last` so: what waits for nothing but earlier levels
        is computed together."""
        level, others = [0], self.pairs.source.tolist()
        for node, (earlier, source, _, _) in enumerate(self.listed, start=1):
            level.append(1 + max(level[earlier], level[source], level[others[node]]))
        order = np.argsort(level, kind="stable")
        new = np.empty(len(order), dtype=np.int64)
        new[order] = np.arange(len(order))
        before, found, lo = new[self.before[order]], list[Level](), 1
        waits, pairs = (
            Waits(new[one.source[order]], one.edge[order], one.work[order]) for one in (self.waits, self.pairs)
        )
        for size in np.bincount(level).tolist()[1:]:
            nodes = slice(lo, lo + size)
            some = [waits] + [pairs] * bool((pairs.work[nodes] != 4 * self.stages).any())
            found.append(Level(nodes, before[nodes], tuple(one.of(nodes) for one in some)))
            lo += size
        return tuple(found), new[list(self.last)].tolist()


@lru_cache(maxsize=256)
def flow(schedule: Schedule) -> Flow:
    """Raises PlanError as `dry_run` does."""
    return flow_of(schedule.rows)


def flow_of(rows: Rows) -> Flow:
    """`flow` of a schedule that is at hand as rows."""
    placement, order = rows.placement, in_order(rows)
    nodes = np.arange(1, len(order.steps) + 1)
    node_of, last = np.zeros_like(nodes), np.zeros(rows.ranks, dtype=np.int64)
    node_of[order.steps] = nodes
    np.maximum.at(last, order.ranks, nodes)
    first, second = _hops_and_work(rows, node_of)
    behind = [np.concatenate([[0], one]) for one in (order.before, order.inputs, order.others)]
    crossing = tuple(a != b for a, b in pairwise(placement))
    waits, pairs = Waits(behind[1], *first), Waits(behind[2], *second)
    return Flow(len(placement), behind[0], waits, pairs, tuple(last.tolist()), crossing)


def _hops_and_work(rows: Rows, node_of: Ints) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Rows of hops and of work by node, given the node of each step; then those of the second action of a pair."""
    stages = len(rows.placement)
    _, step, stage, kind, _ = rows.table.T
    edge = np.where(kind == KIND_ORDER["W"], stages - 1, stage)
    edge = np.where(kind == KIND_ORDER["F"], (stage - 1) % stages, edge)
    second = np.zeros(len(step), dtype=bool)
    second[1:] = step[1:] == step[:-1]
    found = []
    for part in (~second, second):
        edges, works = (np.full(len(node_of) + 1, nothing) for nothing in (stages - 1, 4 * stages))
        edges[node_of[step[part]]], works[node_of[step[part]]] = edge[part], (kind * stages + stage)[part]
        found.append((edges, works))
    return found[0], found[1]


def schedule_s(
    schedule: Schedule | Flow,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    hop_s: float | Sequence[float] = 0.0,
) -> float:
    """Seconds until every rank is done. Times of each stage; `hop_s` of each pair of neighbours, or of all alike.
    A schedule that is run often may be given as who waits for whom."""
    found = _of(schedule)
    done = _walk(found, *_tables(found, forward, backward_input, backward_weight, hop_s))
    return max((done[node] for node in found.last), default=0.0)


def _of(schedule: Schedule | Flow) -> Flow:
    return schedule if isinstance(schedule, Flow) else flow(schedule)


def schedules_s(
    schedule: Schedule | Flow, forward: Floats, backward_input: Floats, backward_weight: Floats, hop_s: ArrayLike = 0.0
) -> Floats:
    """`schedule_s` of many sets of times: rows [sets, stages]; `hop_s` one number, [sets] or [sets, stages - 1]."""
    return np.asarray(rank_ends_s(schedule, forward, backward_input, backward_weight, hop_s).max(axis=1))


def rank_ends_s(
    schedule: Schedule | Flow, forward: Floats, backward_input: Floats, backward_weight: Floats, hop_s: ArrayLike = 0.0
) -> Floats:
    """When each rank is done, [sets, ranks]; arguments as of `schedules_s`."""
    found = _of(schedule)
    sets = len(forward)
    hops = np.asarray(hop_s, dtype=np.float64)
    hops = np.broadcast_to(hops[:, None] if hops.ndim == 1 else hops, (sets, found.stages - 1))
    ends = np.empty((sets, len(found.last)))
    if sets * len(found.last) < FEW:
        for i in range(sets):
            rows = (forward[i].tolist(), backward_input[i].tolist(), backward_weight[i].tolist(), hops[i].tolist())
            done_one = _walk(found, *_tables(found, *rows))
            ends[i] = [done_one[node] for node in found.last]
        return ends
    block = max(ENTRIES // len(found.before), 1)
    for lo in range(0, sets, block):
        part = slice(lo, lo + block)
        done = _ends(
            found, _rows(forward[part], backward_input[part], backward_weight[part]), _edges(found, hops[part])
        )
        ends[part] = done[found.by_level[1]].T
    return ends


def _rows(forward: Floats, backward_input: Floats, backward_weight: Floats) -> Floats:
    """Work in rows: F, I, W, B of each stage, zero."""
    zero = np.zeros((1, len(forward)))
    return np.vstack([forward.T, backward_input.T, backward_weight.T, (backward_input + backward_weight).T, zero])


def _edges(found: Flow, hops: Floats) -> Floats:
    """Hops in rows; 0 where neighbours stand on one rank, and for what needs none."""
    crossing = np.array(found.crossing, dtype=bool)
    return np.vstack([np.where(crossing[:, None], hops.T, 0.0), np.zeros((1, len(hops)))])


def _ends(found: Flow, work: Floats, hops: Floats) -> Floats:
    """When each node is done, as numbered by level: [1 + nodes, sets]."""
    done = np.zeros((len(found.before), work.shape[1]))
    for level in found.by_level[0]:
        ready = done[level.before]
        for wait in level.waits:
            np.maximum(ready, done[wait.source] + hops[wait.edge], out=ready)
        for wait in level.waits:
            ready += work[wait.work]
        done[level.nodes] = ready
    return done


def _tables(
    found: Flow,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    hop_s: float | Sequence[float],
) -> tuple[list[float], list[float]]:
    """`_rows` and `_edges` of one set of times."""
    whole = [a + b for a, b in zip(backward_input, backward_weight, strict=True)]
    hops = [hop_s] * (found.stages - 1) if isinstance(hop_s, int | float) else hop_s
    edges = [hop if crosses else 0.0 for hop, crosses in zip(hops, found.crossing, strict=True)]
    return [*forward, *backward_input, *backward_weight, *whole, 0.0], [*edges, 0.0]


def _walk(found: Flow, work: list[float], hops: list[float]) -> list[float]:
    """`_ends` of one set of times: faster so, for few ranks."""
    done, pairs = [0.0], found.listed_pairs
    for before, source, edge, row in found.listed:
        now, ready = done[before], done[source] + hops[edge]
        if ready > now:
            now = ready
        now += work[row]
        if len(done) in pairs:
            source, edge, other = pairs[len(done)]
            now = max(done[before], ready, done[source] + hops[edge]) + work[row] + work[other]
        done.append(now)
    return done


@dataclass(frozen=True)
class Chain:
    """How often each stage's forward, input and weight part, and the hop behind it, lie one behind the other."""

    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    hops: tuple[int, ...]

    def seconds(
        self, forward: Floats, backward_input: Floats, backward_weight: Floats, hop_s: ArrayLike = 0.0
    ) -> Floats:
        """Its length under many sets of times, as `schedules_s` takes them: a lower bound of what that gives, up to
        rounding, for any times; where the chain was found it is what that gives."""
        hops = np.asarray(hop_s, dtype=np.float64)
        hops = np.broadcast_to(hops[:, None] if hops.ndim == 1 else hops, (len(forward), len(self.hops)))
        whole = forward @ self.forward + backward_input @ self.backward_input + backward_weight @ self.backward_weight
        return np.asarray(whole + hops @ self.hops)


def longest_chain(
    schedule: Schedule | Flow,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    hop_s: float | Sequence[float] = 0.0,
) -> Chain:
    """The actions whose sum is `schedule_s`, by count. Where a rank and an input are ready at once, the rank's."""
    found = _of(schedule)
    work, hops = _tables(found, forward, backward_input, backward_weight, hop_s)
    done = _walk(found, work, hops)
    counts, crossed = [0] * len(work), [0] * found.stages
    at = max(found.last, key=lambda node: done[node])
    while at:
        before, *wait = found.listed[at - 1]
        waits = [tuple(wait), *filter(None, [found.listed_pairs.get(at)])]
        latest, at = done[before], before
        for source, edge, row in waits:
            counts[row] += 1
            if done[source] + hops[edge] > latest:
                latest, at, over = done[source] + hops[edge], source, edge
        if at != before and over < found.stages - 1:
            crossed[over] += found.crossing[over]
    n = found.stages
    f, i, w, b = (counts[k * n : (k + 1) * n] for k in range(4))
    added = [tuple(x + y for x, y in zip(part, b, strict=True)) for part in (i, w)]
    return Chain(tuple(f), added[0], added[1], tuple(crossed[:-1]))
