"""What a rank keeps alive at once under a schedule: how many forwards of each of its stages wait for their backward,
and how many input parts for their weight part.

Of all moments only those count that another does not surpass; after a few rounds of micro-batches there are no new
ones, so long schedules are read off short ones (gpipe, which keeps all it has, in closed form).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hpsearch.schedule.kinds import make_schedule
from hpsearch.schedule.schedule import Ints, Schedule

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
