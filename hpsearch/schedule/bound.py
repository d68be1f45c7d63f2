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

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpsearch.schedule.kinds import make_schedule
from hpsearch.schedule.schedule import Action, Schedule, Step

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Key = tuple[str, int, int]
COLUMNS = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}
SHORT = 3
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
        return _of_short(kind, stages, virtual, micro_batches).astype(np.float64)
    short = SHORT * stages + micro_batches % stages
    one, two = (_of_short(kind, stages, virtual, m) for m in (short, short + stages))
    return np.asarray(one + (rounds - SHORT) * (two - one), dtype=np.float64)


@lru_cache(maxsize=1024)
def _of_short(kind: str, stages: int, virtual: int, micro_batches: int) -> Ints:
    return chains_of(make_schedule(kind, stages, virtual, micro_batches))


def chains_of(schedule: Schedule) -> Ints:
    """The chains of `chains`, read off one schedule."""
    ways = _Ways(schedule)
    return np.array([row for rank in range(len(schedule.ranks)) for row in ways.through(rank)])


class _Ways:
    """Chains of one schedule, as the columns they count in. A key is F, B (whole, or its input part) or W, stage and
    micro-batch."""

    def __init__(self, schedule: Schedule) -> None:
        self.placement = schedule.placement
        self.stages = len(self.placement)
        self.at: dict[Key, tuple[int, int]] = {}
        """Rank and place in its order."""
        self.columns: list[list[int]] = []
        self.offsets: list[list[int]] = []
        """By rank: the columns that its steps count in, one step behind the other; where those of each step begin."""
        for rank, steps in enumerate(schedule.ranks):
            columns, offsets = [], [0]
            for i, step in enumerate(steps):
                for action in step.parts:
                    self.at[_key(action)] = rank, i
                    columns += [kind * self.stages + action.stage for kind in COLUMNS[action.kind]]
                offsets.append(len(columns))
            self.columns.append(columns)
            self.offsets.append(offsets)
        self.ends = [self._ends(steps) for steps in schedule.ranks]

    def _ends(self, steps: tuple[Step, ...]) -> tuple[Key, Key, Key, Key]:
        """Of a rank: its first forward, its first and last backward, its last forward."""
        keys = [_key(action) for step in steps for action in step.parts]
        forwards, backwards = ([key for key in keys if key[0] == kind] for kind in "FB")
        return forwards[0], backwards[0], backwards[-1], forwards[-1]

    def done(self, rank: int, start: int, end: int) -> list[int]:
        """What a rank does in its steps `start` to `end` - 1."""
        return self.columns[rank][self.offsets[rank][start] : self.offsets[rank][end]]

    def step(self, key: Key) -> list[int]:
        """What is done at once with this: itself, and what it is paired with."""
        rank, i = self.at[key]
        return self.done(rank, i, i + 1)

    def onward(self, key: Key) -> Iterator[tuple[list[int], Key]]:
        """What waits for this, what waits for that, and so on, each with the hop on the way to it."""
        kind, stage, micro = key
        while kind != "W":
            before = stage
            if kind == "F" and stage + 1 < self.stages:
                stage += 1
            elif kind == "F":
                kind = "B"
            elif stage:
                stage -= 1
            elif ("W", stage, micro) in self.at:
                kind = "W"
            else:
                return
            crosses = self.placement[before] != self.placement[stage]
            yield [3 * self.stages + min(before, stage)] * crosses, (kind, stage, micro)

    def before(self, key: Key) -> list[int]:
        """All of its micro-batch that comes first."""
        first: Key = ("F", 0, key[2])
        columns = [] if key == first else self.step(first)
        for hop, other in self.onward(first) if key != first else ():
            columns += hop
            if other == key:
                break
            columns += self.step(other)
        return columns

    def behind(self, key: Key) -> list[int]:
        """The rest of its micro-batch, up to the weight part of stage 0."""
        return [column for hop, other in self.onward(key) for column in hop + self.step(other)]

    def through(self, rank: int) -> list[Ints]:
        """The six chains through a rank; of nothing where the end comes before the beginning."""
        forward, backward, last_backward, last_forward = self.ends[rank]
        rows, steps = [], len(self.offsets[rank]) - 1
        for first in (forward, backward):
            begin, start = self.before(first), self.at[first][1]
            for last in (last_forward, last_backward, None):
                end = steps if last is None else self.at[last][1] + 1
                behind = [] if last is None else self.behind(last)
                columns = begin + self.done(rank, start, end) + behind if start < end else []
                rows.append(np.bincount(np.array(columns, dtype=np.int64), minlength=4 * self.stages - 1))
        return rows


def _key(action: Action) -> Key:
    return ("B" if action.kind == "I" else action.kind, action.stage, action.microbatch)
