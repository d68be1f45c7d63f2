"""What a rank keeps alive: long schedules as short ones, and closed forms below what is read off the text."""

from __future__ import annotations

import numpy as np
import pytest

from hpsearch.schedule import KINDS, alive, dry_run, make_schedule, refusal
from hpsearch.schedule.alive import moments, surely_alive

CASES = [
    (name, stages, virtual)
    for name, kind in KINDS.items()
    for stages in range(2, 9)
    for virtual in range(1, 5)
    if kind.least_virtual <= virtual <= (kind.most_virtual or 4)
]


def counts(stages: int) -> list[int]:
    return [*range(1, 5 * stages + 2), 6 * stages, 7 * stages + 1]


@pytest.mark.parametrize(("kind", "stages", "virtual"), CASES)
def test_long_schedules_keep_what_short_ones_do(kind: str, stages: int, virtual: int) -> None:
    for m in counts(stages):
        if refusal(kind, stages, virtual, m) is None:
            read = moments(make_schedule(kind, stages, virtual, m).rows)
            for one, other in zip(alive(kind, stages, virtual, m), read, strict=True):
                assert sorted(one.tolist()) == sorted(other.tolist())


@pytest.mark.parametrize(("kind", "stages", "virtual"), [one for one in CASES if one[0] not in ("1f1b", "interleaved")])
def test_closed_forms_are_reached(kind: str, stages: int, virtual: int) -> None:
    """Some moment has at least as many of each; and none has more in all, where there are enough micro-batches."""
    v = virtual
    for m in counts(stages):
        if refusal(kind, stages, v, m) is not None:
            continue
        for rank, rows in enumerate(alive(kind, stages, v, m)):
            is_forward = rows[:, 2 * v :].sum(axis=1) == 0
            held = np.hstack([rows[:, :v] + rows[:, 3 * v :], rows[:, v : 2 * v] + rows[:, 2 * v : 3 * v]])
            found = surely_alive(kind, stages, v, rank, np.array([m]))
            for some, claimed in ((held[is_forward], found[0][:, 0]), (held[~is_forward], found[1][:, 0])):
                assert (some >= claimed).all(axis=1).any(), (m, rank, claimed)
                if m >= 2 * stages and kind != "interleaved-zb":
                    assert some.sum(axis=1).max() == claimed.sum()


@pytest.mark.parametrize(("kind", "stages", "virtual"), CASES)
def test_in_all_as_a_dry_run_counts(kind: str, stages: int, virtual: int) -> None:
    m = 3 * stages
    rows, peaks = alive(kind, stages, virtual, m), dry_run(make_schedule(kind, stages, virtual, m)).peak_live
    assert [int(one.sum(axis=1).max()) for one in rows] == list(peaks)
