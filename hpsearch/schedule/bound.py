"""A lower bound of a schedule's seconds, in closed form: for any times of stages no schedule of the kind ends earlier.

Actions that wait for each other make a chain, and no chain is longer than the whole. The bound is the longest of six
chains through each rank r, each of three pieces:
  until r begins    forwards of one micro-batch down to r; or all its forwards, and its backwards up to r
  on r              all that r does from there to its last forward, its last backward (input part) or its last action
  behind r          the rest of that micro-batch: forwards to the last stage, backwards to stage 0, its weight part
So it has the fill and drain of every rank, the work of the slowest one, the way of one micro-batch through everything
with what is then left on each rank, and hops. What it misses are chains that leave a busy rank for another busy one;
how much that is, is measured in `tests/schedule/test_bound.py`.
How often each action lies on a chain is a whole number that depends on kind, ranks, stages a rank and micro-batches
alone; it grows evenly with whole rounds of micro-batches, so that the chains of a long step are read off two short
ones. The bound of many sets of times is one product of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpsearch.schedule.kinds import make_schedule
from hpsearch.schedule.schedule import Action, Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SHORT = 4
"""Rounds (micro-batches a rank) of which chains are read off the schedule itself."""
ROUNDING = 1e-9
"""What the bound stays below a sum of up to millions of terms, whichever way it is added up."""


def lower_bound_s(
    kind: str,
    stages: int,
    virtual: int,
    micro_batches: int,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    hop_s: float | Sequence[float] = 0.0,
) -> float:
    """Seconds that `schedule_s(make_schedule(kind, stages, virtual, micro_batches), ...)` is not less than.

    Raises LegalityError as `make_schedule` does.
    """
    rows = (np.array([forward]), np.array([backward_input]), np.array([backward_weight]))
    return float(lower_bounds_s(kind, stages, virtual, micro_batches, *rows, np.atleast_2d(hop_s))[0])


def lower_bounds_s(
    kind: str,
    stages: int,
    virtual: int,
    micro_batches: int,
    forward: Floats,
    backward_input: Floats,
    backward_weight: Floats,
    hop_s: ArrayLike = 0.0,
) -> Floats:
    """`lower_bound_s` of many sets: rows [sets, stages · virtual]; `hop_s`: a number, [sets] or [sets, hops]."""
    hops = np.asarray(hop_s, dtype=np.float64)
    hops = np.broadcast_to(hops[:, None] if hops.ndim == 1 else hops, (len(forward), stages * virtual - 1))
    times = np.hstack([forward, backward_input, backward_weight, hops])
    found = chains(kind, stages, virtual, micro_batches)
    return np.asarray((times @ found.T).max(axis=1) * (1 - ROUNDING))


@lru_cache(maxsize=1024)
def chains(kind: str, stages: int, virtual: int, micro_batches: int) -> Floats:
    """How often forward, input part, weight part of each stage, and each hop lie on each chain: [chains, columns]."""
    rounds = micro_batches // stages
    if rounds <= SHORT + 1:
        return chains_of(make_schedule(kind, stages, virtual, micro_batches)).astype(np.float64)
    short = SHORT * stages + micro_batches % stages
    one = chains_of(make_schedule(kind, stages, virtual, short))
    two = chains_of(make_schedule(kind, stages, virtual, short + stages))
    return np.asarray(one + (rounds - SHORT) * (two - one), dtype=np.float64)


def chains_of(schedule: Schedule) -> Ints:
    """The chains of `chains`, read off one schedule."""
    whole = {(a.stage, a.microbatch) for _, a in schedule.actions() if a.kind == "B"}
    way = _Way(schedule.placement, whole)
    return np.array([row for rank in range(len(schedule.ranks)) for row in _through(schedule, rank, way)])


class _Way:
    """Of one micro-batch through all stages, by counts: what is before an action, and what comes behind it."""

    def __init__(self, placement: tuple[int, ...], whole: set[tuple[int, int]]) -> None:
        self.stages = len(placement)
        self.crossing = np.array([a != b for a, b in pairwise(placement)], dtype=np.int64)
        self.whole = whole

    def none(self) -> Ints:
        return np.zeros(4 * self.stages - 1, dtype=np.int64)

    def count(self, row: Ints, action: Action) -> None:
        kinds = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}[action.kind]
        for kind in kinds:
            row[kind * self.stages + action.stage] += 1

    def forwards(self, row: Ints, first: int, last: int) -> None:
        """Stages `first` to `last` - 1, and the hops before and behind them that lead from or to other stages."""
        row[first:last] += 1
        hops = 3 * self.stages
        row[hops + max(first - 1, 0) : hops + last] += self.crossing[max(first - 1, 0) : last]

    def backwards(self, row: Ints, first: int, last: int, micro: int) -> None:
        """Stages `first` - 1 down to `last`, with the hops to the first of them and behind the last."""
        for stage in range(last, first):
            row[self.stages + stage] += 1
            row[2 * self.stages + stage] += (stage, micro) in self.whole
        hops = 3 * self.stages
        row[hops + max(last - 1, 0) : hops + first] += self.crossing[max(last - 1, 0) : first]

    def before(self, action: Action) -> Ints:
        row, stage = self.none(), action.stage
        if action.kind == "F":
            self.forwards(row, 0, stage)
        elif action.kind in "BI":
            self.forwards(row, 0, self.stages)
            self.backwards(row, self.stages, stage + 1, action.microbatch)
        return row

    def behind(self, action: Action) -> Ints:
        row, stage, micro = self.none(), action.stage, action.microbatch
        if action.kind == "F":
            self.forwards(row, stage + 1, self.stages)
            self.backwards(row, self.stages, 0, micro)
        elif action.kind in "BI":
            self.backwards(row, stage, 0, micro)
        if action.kind != "W":
            row[2 * self.stages] += (0, micro) not in self.whole
        return row


def _through(schedule: Schedule, rank: int, way: _Way) -> list[Ints]:
    """The six chains through a rank."""
    steps = schedule.ranks[rank]
    parts = [(i, part) for i, step in enumerate(steps) for part in step.parts]
    firsts = [next((i, part) for i, part in parts if part.kind in kinds) for kinds in ("F", "BI")]
    lasts = [next((i, part) for i, part in reversed(parts) if part.kind in kinds) for kinds in ("F", "BI", "BIW")]
    rows = []
    for start, first in firsts:
        for end, last in lasts:
            row = way.before(first) + way.behind(last)
            for i, part in parts:
                if start <= i <= end:
                    way.count(row, part)
            rows.append(row if start <= end else way.none())
    return rows
