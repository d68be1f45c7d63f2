"""What a rank keeps alive at once under a schedule: how many forwards of each of its stages wait for their backward,
and how many input parts for their weight part.

Of all moments only those count that another does not surpass; after a few rounds of micro-batches there are no new
ones, so long schedules are read off short ones (gpipe, which keeps all it has, in closed form).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hpsearch.schedule.kinds import make_rows
from hpsearch.schedule.schedule import KIND_ORDER, Ints, Rows

Floats = NDArray[np.float64]
ROUNDS = 2
"""Micro-batches a rank after which nothing new is kept alive."""


def alive(kind: str, stages: int, virtual: int, micro_batches: int) -> tuple[Ints, ...]:
    """`alive_on` of each rank."""
    return tuple(alive_on(kind, stages, virtual, micro_batches, rank) for rank in range(stages))


@lru_cache(maxsize=4096)
def alive_on(kind: str, stages: int, virtual: int, micro_batches: int, rank: int) -> Ints:
    """Of a rank: moments [moments, 4·virtual]. Columns, each by the rank's stages in model order: forwards that wait
    for a backward that has not begun; input parts that wait for their weight part; input parts at work; whole backwards
    at work. Without the latter two it is the moment after a forward.
    """
    if kind == "gpipe":
        return np.array([[micro_batches, 0, 0, 0], [micro_batches - 1, 0, 0, 1]], dtype=np.int64)
    if micro_batches // stages > ROUNDS:
        return alive_on(kind, stages, virtual, ROUNDS * stages + micro_batches % stages, rank)
    return _of_rank(make_rows(kind, stages, virtual, micro_batches), rank)


def moments(rows: Rows) -> tuple[Ints, ...]:
    """`alive` of one schedule, all of it read."""
    return tuple(_of_rank(rows, rank) for rank in range(rows.ranks))


def _of_rank(rows: Rows, rank: int) -> Ints:
    mine = np.flatnonzero(np.array(rows.placement) == rank)
    _, _, stage, kind, _ = rows.of_rank(rank).T
    here = (stage[:, None] == mine).astype(np.int64)
    forward, inputs, weights, whole = (here * (kind == KIND_ORDER[one])[:, None] for one in "FIWB")
    waiting, owed = np.cumsum(forward - inputs - whole, axis=0), np.cumsum(inputs - weights, axis=0) - inputs
    return _outer(np.hstack([waiting, owed, inputs, whole])[kind != KIND_ORDER["W"]])


def _outer(rows: Ints) -> Ints:
    """Rows that no other is at least equal to in all columns; of equal ones the first."""
    left, kept = np.argsort(-rows.sum(axis=1), kind="stable"), list[int]()
    while len(left):  # what is below another row is below one that no other is above
        kept.append(int(left[0]))
        left = left[~(rows[left] <= rows[left[0]]).all(axis=1)]
    return np.asarray(rows[sorted(kept)])


def surely_alive(
    kind: str, stages: int, virtual: int, rank: Ints | int, micro_batches: Floats
) -> tuple[Floats, Floats]:
    """[2·virtual, ...] each: of a rank's fullest moment after a forward, and in a backward, how many backwards and then
    weight parts of each of its stages are to come, at least; for every rank and number of micro-batches (arrays that
    broadcast). Closed forms, for bounds of many schedules; what is at work in a backward counts as what it was, if it
    is whole, or else will be."""
    p = stages
    r, m = (np.asarray(one, dtype=np.float64) for one in np.broadcast_arrays(rank, micro_batches))
    none = np.zeros_like(m)
    if kind == "gpipe":
        both = np.stack([m, none])
        return both, both
    if kind == "zbv":
        first, second = np.minimum(2 * p - r - 1, m), np.minimum(r + 1, m)
        return np.stack([first, second, none, none]), np.stack([first, second - 1, none, none + 1])
    if kind == "dualpipev":
        both = np.stack([2 * p - r, r + 1, none, none])
        return both, both
    before, owed = [none + p] * (virtual - 1), [none] * (virtual - 1)
    return np.stack([*before, p - r, *owed, r]), np.stack([*before, p - r - 1, *owed, r + 1])
