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
alone: in closed form where nothing runs as a pair, else read off two short texts, as it grows evenly with
micro-batches. The bound of many sets of times is one product of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpsearch.schedule.closed import closed
from hpsearch.schedule.kinds import make_rows, refusal
from hpsearch.schedule.schedule import KIND_ORDER, Ints, Rows

Floats = NDArray[np.float64]
COLUMN = [0, 1, 2, 1]
"""By kind, F I W B: which of three it counts in first; B counts in the third too."""
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


@lru_cache(maxsize=256)
def chains(kind: str, stages: int, virtual: int, micro_batches: int) -> Floats:
    """How often forward, input part, weight part of each stage, and each hop lie on each chain: [chains, columns].
    Raises LegalityError as `make_schedule` does."""
    refused = refusal(kind, stages, virtual, micro_batches)
    if refused is not None:
        raise refused
    found = closed(kind, stages, virtual, micro_batches)
    if found is None and kind == "dualpipev":  # with one micro-batch more each rank has one round of pairs more
        one, two = _of_short(stages, 2 * stages), _of_short(stages, 2 * stages + 1)
        found = one + (micro_batches - 2 * stages) * (two - one)
    elif found is None:
        found = chains_of(make_rows(kind, stages, virtual, micro_batches))
    return found.astype(np.float64)


@lru_cache(maxsize=256)
def _of_short(stages: int, micro_batches: int) -> Ints:
    return chains_of(make_rows("dualpipev", stages, 2, micro_batches))


def chains_of(rows: Rows) -> Ints:
    """The chains of `chains`, read off one schedule."""
    ways = _Ways(rows)
    return np.array([row for rank in range(rows.ranks) for row in ways.through(rank)])


class _Ways:
    """Chains of one schedule, as the columns they count in. A key is F, B (whole, or its input part) or W as 0, 1, 2,
    stage and micro-batch."""

    def __init__(self, rows: Rows) -> None:
        self.placement = rows.placement
        self.stages = len(self.placement)
        _, step, stage, kind, micro = rows.table.T
        whole = (kind == KIND_ORDER["B"]).astype(np.int64)
        after = np.cumsum(1 + whole)
        self.columns = np.repeat(np.array(COLUMN)[kind] * self.stages + stage, 1 + whole)
        self.columns[after[whole > 0] - 1] += self.stages
        """Columns that all steps count in, one behind the other; a whole backward counts in two."""
        self.ends = np.zeros(int(step.max()) + 2, dtype=np.int64)
        np.maximum.at(self.ends, step + 1, after)
        """Where the columns of each step end, one place on."""
        self.at = np.full((3, self.stages, rows.micro_batches), -1)
        self.at[np.array(COLUMN)[kind], stage, micro] = step
        self.table = [rows.of_rank(one) for one in range(rows.ranks)]
        self.hops = self._hops()

    def _hops(self) -> Ints:
        """[2 stages + 1] column of the hop to each action of a micro-batch, in the order of `way`; or the one behind
        all columns, where there is none."""
        n, stands = self.stages, np.array(self.placement)
        between = np.where(stands[1:] != stands[:-1], 3 * n + np.arange(n - 1), 4 * n - 1)
        return np.concatenate([[4 * n - 1], between, [4 * n - 1], between[::-1], [4 * n - 1]])

    def way(self, micro: int) -> Ints:
        """Steps of a micro-batch, each waiting for the one before: forwards, backwards, the weight part of stage 0 if
        it stands alone."""
        steps = np.concatenate([self.at[0, :, micro], self.at[1, ::-1, micro], self.at[2, :1, micro]])
        return steps if steps[-1] >= 0 else steps[:-1]

    def place(self, row: Ints) -> int:
        """Of an action in the way of its micro-batch."""
        kind, stage = COLUMN[int(row[3])], int(row[2])
        return stage if kind == 0 else 2 * self.stages - 1 - stage

    def done(self, first: int, last: int) -> Ints:
        """What is done in steps `first` to `last`, both of one rank: how often each column counts, and one more."""
        return np.bincount(self.columns[self.ends[first] : self.ends[last + 1]], minlength=4 * self.stages)

    def along(self, micro: int, first: int, last: int) -> Ints:
        """What a micro-batch does in the places `first` to `last` - 1 of its way, with what each is paired with."""
        steps = self.way(micro)[first:last]
        starts, sizes = self.ends[steps], self.ends[steps + 1] - self.ends[steps]
        each = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.bincount(self.columns[np.repeat(starts, sizes) + each], minlength=4 * self.stages)

    def over(self, first: int, last: int) -> Ints:
        """Hops on the way from place `first` to place `last`."""
        return np.bincount(self.hops[first + 1 : last + 1], minlength=4 * self.stages)

    def before(self, row: Ints) -> Ints:
        """All of its micro-batch that comes first."""
        place = self.place(row)
        return self.along(int(row[4]), 0, place) + self.over(0, place)

    def behind(self, row: Ints) -> Ints:
        """The rest of its micro-batch, up to the weight part of stage 0."""
        place, end = self.place(row), len(self.way(int(row[4])))
        return self.along(int(row[4]), place + 1, end) + self.over(place, end - 1)

    def through(self, rank: int) -> list[Ints]:
        """The six chains through a rank; of nothing where the end comes before the beginning."""
        table = self.table[rank]
        forwards, backwards = (table[np.isin(table[:, 3], kinds)] for kinds in ([0], [1, 3]))
        lasts = [(int(one[1]), self.behind(one)) for one in (forwards[-1], backwards[-1])]
        lasts.append((int(table[-1, 1]), np.zeros(4 * self.stages, dtype=np.int64)))
        rows = []
        for first in (forwards[0], backwards[0]):
            begin, start = self.before(first), int(first[1])
            for end, behind in lasts:
                row = self.done(start, end) + begin + behind
                rows.append((row if start <= end else 0 * row)[:-1])
        return rows
