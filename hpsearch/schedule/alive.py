"""What a rank keeps alive at once under a schedule: how many forwards of each of its stages wait for their backward,
and how many input parts for their weight part.

Of all moments only those count that another does not surpass; after a few rounds of micro-batches there are no new
ones, so long schedules are read off short ones (gpipe, which keeps all it has, in closed form).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hpsearch.schedule.kinds import make_schedule
from hpsearch.schedule.schedule import Ints, Schedule

Floats = NDArray[np.float64]
ROUNDS = 4
"""Micro-batches a rank after which nothing new is kept alive."""


@lru_cache(maxsize=4096)
def alive(kind: str, stages: int, virtual: int, micro_batches: int) -> tuple[Ints, ...]:
    """Of each rank: moments [moments, 4·virtual]. Columns, each by the rank's stages in model order: forwards that wait
    for a backward that has not begun; input parts that wait for their weight part; input parts at work; whole backwards
    at work. Without the latter two it is the moment after a forward.
    """
    if kind == "gpipe":
        now = [[micro_batches, 0, 0, 0], [micro_batches - 1, 0, 0, 1]]
        return (np.array(now, dtype=np.int64),) * stages
    rounds = micro_batches // stages
    if rounds > ROUNDS:
        micro_batches = ROUNDS * stages + micro_batches % stages
    return moments(make_schedule(kind, stages, virtual, micro_batches))


def moments(schedule: Schedule) -> tuple[Ints, ...]:
    """`alive` of one schedule, all of it read."""
    return tuple(_of_rank(schedule, rank) for rank in range(len(schedule.ranks)))


def _of_rank(schedule: Schedule, rank: int) -> Ints:
    mine = [stage for stage, other in enumerate(schedule.placement) if other == rank]
    places, count = {stage: i for i, stage in enumerate(mine)}, len(mine)
    waiting, owed = [0] * count, [0] * count
    seen = dict[tuple[int, ...], None]()
    for step in schedule.ranks[rank]:
        for action in step.parts:
            at, now = places[action.stage], [0] * (2 * count)
            if action.kind == "F":
                waiting[at] += 1
            elif action.kind == "W":
                owed[at] -= 1
                continue
            else:
                waiting[at] -= 1
                now[at + count * (action.kind == "B")] = 1
            seen[(*waiting, *owed, *now)] = None
            owed[at] += action.kind == "I"
    return _outer(np.array(list(seen), dtype=np.int64))


def _outer(rows: Ints) -> Ints:
    """Rows that no other is at least equal to in all columns."""
    below = (rows[:, None, :] <= rows[None, :, :]).all(axis=2) & ~np.eye(len(rows), dtype=bool)
    return np.asarray(rows[~below.any(axis=1)])


def surely_alive(kind: str, stages: int, virtual: int, rank: int, micro_batches: Floats) -> tuple[Floats, Floats]:
    """[2·virtual, numbers of micro-batches] each: of a rank's fullest moment after a forward, and in a backward, how
    many backwards and then weight parts of each of its stages are to come, at least. Closed forms, for bounds of many
    schedules; what is at work in a backward counts as what it was, if it is whole, or else will be."""
    p, r, m = stages, rank, np.asarray(micro_batches, dtype=np.float64)
    none = np.zeros_like(m)
    if kind == "gpipe":
        both = np.stack([m, none])
        return both, both
    if kind == "zbv":
        first, second = np.minimum(2 * p - r - 1, m), np.minimum(r + 1, m)
        return np.stack([first, second, none, none]), np.stack([first, second - 1, none, none + 1])
    if kind == "dualpipev":
        both = np.stack([none + 2 * p - r, none + r + 1, none, none])
        return both, both
    before, owed = [none + p] * (virtual - 1), [none] * (virtual - 1)
    return (
        np.stack([*before, none + p - r, *owed, none + r]),
        np.stack([*before, none + p - r - 1, *owed, none + r + 1]),
    )
