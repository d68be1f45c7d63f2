"""Cases about pipelines: what schedules alone decide of them."""

from __future__ import annotations

import re

import pytest

from hpsearch.errors import LegalityError
from hpsearch.schedule import dry_run, make_schedule, placement, schedule_s


def test_pip_01_fewer_micro_batches_than_ranks_are_refused_with_both_numbers_or_filled_and_drained() -> None:
    told = "schedule 1f1b, micro_batches = 4: expected at least 8 for 8 ranks, but found 4. Legal: 8 and more; gpipe"
    with pytest.raises(LegalityError, match=re.escape(told)):
        make_schedule("1f1b", 8, 1, 4)
    schedule = make_schedule("gpipe", 8, 1, 4)
    assert dry_run(schedule).peak_live == (4,) * 8
    whole, busy = schedule_s(schedule, [1.0] * 8, [1.0] * 8, [1.0] * 8), 4 * 3.0
    assert 1 - busy / whole == pytest.approx((8 - 1) / (4 + 8 - 1))


def test_pip_10_interleaving_takes_whole_rounds_and_the_kind_says_how_many_stages_a_rank_holds() -> None:
    told = "micro_batches = 6: expected a multiple of the 4 ranks, but found 6. Legal: 4, 8, 12, …; nearest 4 or 8."
    with pytest.raises(LegalityError, match=re.escape(told)):
        make_schedule("interleaved", 4, 2, 6)
    with pytest.raises(LegalityError, match=re.escape("schedule 1f1b, virtual = 2: expected 1 stage on each rank")):
        make_schedule("1f1b", 4, 2, 8)
    with pytest.raises(LegalityError, match=re.escape("virtual = 1: expected at least 2 stages on each rank")):
        make_schedule("interleaved", 4, 1, 8)
    for kind in ("interleaved", "zbv"):
        assert make_schedule(kind, 4, 2, 8).placement == placement(kind, 4, 2)


def test_pip_11_a_step_is_fill_and_steady_state_and_drain() -> None:
    """Stages of 1, 1, 1 and 4 ms, four micro-batches, forward only as in the report: 7 + 3 · 4 = 19, not 16."""
    forward, nothing = [1.0, 1.0, 1.0, 4.0], [0.0] * 4
    assert schedule_s(make_schedule("gpipe", 4, 1, 4), forward, nothing, nothing) == 19
    assert schedule_s(make_schedule("1f1b", 4, 1, 4), forward, forward, nothing) == 3 + 4 * 8 + 3
