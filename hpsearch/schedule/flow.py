"""How long a schedule takes: every action starts when its rank is free and its input has arrived.

The rule of the event timeline (`hpsearch.schedule.simulate`), in arrays. Who waits for whom is read off a schedule
once; then all actions that wait for nothing but earlier ones are computed together, for any number of sets of times.
Sends run beside the compute and take `hop_s` between stages on different ranks. Nothing is extrapolated: all
micro-batches run. An overlapped pair takes as long as its two actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpsearch.schedule.dry_run import Key, dry_run, needed, result
from hpsearch.schedule.schedule import Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Wait = tuple[int, int, int]
"""Node of the input, the row of the hop on the way, the row of the work it is for."""
KINDS = "FIWB"
ENTRIES = 4_000_000
"""Most end times held at once: many sets of times are walked through in blocks."""


@dataclass(frozen=True)
class Node:
    rank: int
    before: int
    """Node that the rank did before; 0: none, and done at 0 s."""
    waits: tuple[Wait, ...]
    """One, or two of an overlapped pair."""


@dataclass(frozen=True)
class Level:
    """Nodes `first` to `last` - 1, none of which waits for another; one column a wait."""

    first: int
    last: int
    before: Ints
    waits: tuple[tuple[Ints, Ints, Ints], ...]


@dataclass(frozen=True)
class Flow:
    """Nodes from 1 on, each behind all that it waits for. Rows of work: F, I, W, B of each stage, then zero."""

    stages: int
    nodes: tuple[Node, ...]
    levels: tuple[Level, ...]
    last: tuple[int, ...]
    """The last node of each rank; 0 where it does nothing."""
    crossing: tuple[bool, ...]
    """Whether stages i and i + 1 stand on different ranks."""


@lru_cache(maxsize=64)
def flow(schedule: Schedule) -> Flow:
    """Raises PlanError as `dry_run` does."""
    placement = schedule.placement
    stages = len(placement)
    order = dry_run(schedule).order
    node_of: dict[Key, int] = {}
    level = [0]
    last = [0] * len(schedule.ranks)
    found: list[tuple[int, int, list[tuple[int, int, int]]]] = []
    for node, (rank, step) in enumerate(order, start=1):
        waits = []
        for part in step.parts:
            key = needed(part, stages)
            source = 0 if key is None else node_of[key]
            edge = stages - 1 if key is None or key[1] == part.stage else min(key[1], part.stage)
            waits.append((source, edge, KINDS.index(part.kind) * stages + part.stage))
        level.append(1 + max(level[last[rank]], *(level[source] for source, _, _ in waits)))
        found.append((rank, last[rank], waits))
        last[rank] = node
        node_of.update((result(part), node) for part in step.parts)
    ranked = sorted(range(1, len(found) + 1), key=lambda node: (level[node], found[node - 1][0]))
    new = [0] * (len(found) + 1)
    for place, node in enumerate(ranked, start=1):
        new[node] = place
    nodes = []
    for node in ranked:
        rank, before, waits = found[node - 1]
        nodes.append(Node(rank, new[before], tuple((new[source], edge, work) for source, edge, work in waits)))
    sizes = np.bincount(level)[1:] if found else np.zeros(0, dtype=np.int64)
    crossing = tuple(a != b for a, b in pairwise(placement))
    return Flow(stages, tuple(nodes), _levels(nodes, stages, sizes), tuple(new[node] for node in last), crossing)


def _levels(nodes: list[Node], stages: int, sizes: Ints) -> tuple[Level, ...]:
    nothing = (0, stages - 1, 4 * stages)
    levels, first = [], 0
    for size in map(int, sizes):
        some = nodes[first : first + size]
        depth = max(len(node.waits) for node in some)
        padded = [(*node.waits, *[nothing] * (depth - len(node.waits))) for node in some]
        columns = tuple(
            (
                np.array([waits[i][0] for waits in padded]),
                np.array([waits[i][1] for waits in padded]),
                np.array([waits[i][2] for waits in padded]),
            )
            for i in range(depth)
        )
        levels.append(Level(first + 1, first + 1 + size, np.array([node.before for node in some]), columns))
        first += size
    return tuple(levels)


def schedule_s(
    schedule: Schedule,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    hop_s: float | Sequence[float] = 0.0,
) -> float:
    """Seconds until every rank is done. Times of each stage; `hop_s` of each pair of neighbours, or of all alike."""
    found = flow(schedule)
    done = _walk(found, *_tables(found, forward, backward_input, backward_weight, hop_s))
    return max((done[node] for node in found.last), default=0.0)


def schedules_s(
    schedule: Schedule, forward: Floats, backward_input: Floats, backward_weight: Floats, hop_s: ArrayLike = 0.0
) -> Floats:
    """`schedule_s` of many sets of times: rows [sets, stages]; `hop_s` one number, [sets] or [sets, stages - 1]."""
    return np.asarray(rank_ends_s(schedule, forward, backward_input, backward_weight, hop_s).max(axis=1))


def rank_ends_s(
    schedule: Schedule, forward: Floats, backward_input: Floats, backward_weight: Floats, hop_s: ArrayLike = 0.0
) -> Floats:
    """When each rank is done, [sets, ranks]; arguments as of `schedules_s`."""
    found = flow(schedule)
    sets = len(forward)
    hops = np.asarray(hop_s, dtype=np.float64)
    hops = np.broadcast_to(hops[:, None] if hops.ndim == 1 else hops, (sets, found.stages - 1))
    ends = np.empty((sets, len(found.last)))
    block = max(ENTRIES // (len(found.nodes) + 1), 1)
    for lo in range(0, sets, block):
        part = slice(lo, lo + block)
        done = _ends(
            found, _rows(forward[part], backward_input[part], backward_weight[part]), _edges(found, hops[part])
        )
        ends[part] = done[list(found.last)].T
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
    """When each node is done, [1 + nodes, sets]."""
    done = np.zeros((len(found.nodes) + 1, work.shape[1]))
    for level in found.levels:
        ready = done[level.before]
        for source, edge, _ in level.waits:
            np.maximum(ready, done[source] + hops[edge], out=ready)
        for _, _, row in level.waits:
            ready += work[row]
        done[level.first : level.last] = ready
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
    done = [0.0]
    for node in found.nodes:
        now = done[node.before]
        for source, edge, _ in node.waits:
            now = max(now, done[source] + hops[edge])
        for _, _, row in node.waits:
            now += work[row]
        done.append(now)
    return done


@dataclass(frozen=True)
class Chain:
    """How often each stage's forward, input and weight part, and the hop behind it, lie one behind the other."""

    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    hops: tuple[int, ...]


def longest_chain(
    schedule: Schedule,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    hop_s: float | Sequence[float] = 0.0,
) -> Chain:
    """The actions whose sum is `schedule_s`, by count. Where a rank and an input are ready at once, the rank's."""
    found = flow(schedule)
    work, hops = _tables(found, forward, backward_input, backward_weight, hop_s)
    done = _walk(found, work, hops)
    counts, crossed = [0] * len(work), [0] * found.stages
    at = max(found.last, key=lambda node: done[node])
    while at:
        node = found.nodes[at - 1]
        latest = done[node.before]
        at = node.before
        for source, edge, row in node.waits:
            counts[row] += 1
            if done[source] + hops[edge] > latest:
                latest, at, over = done[source] + hops[edge], source, edge
        if at != node.before and over < found.stages - 1:
            crossed[over] += found.crossing[over]
    n = found.stages
    f, i, w, b = (counts[k * n : (k + 1) * n] for k in range(4))
    added = [tuple(x + y for x, y in zip(part, b, strict=True)) for part in (i, w)]
    return Chain(tuple(f), added[0], added[1], tuple(crossed[:-1]))
