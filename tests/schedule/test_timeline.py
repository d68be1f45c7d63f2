"""The timeline against hand-drawn pictures."""

import pytest

from hpsearch.errors import InternalError
from hpsearch.schedule import Event, Schedule, one_stage, simulate


def test_communication_hides_under_compute_that_does_not_wait_for_it() -> None:
    events = [
        Event("gather1", "link", 2.0),
        Event("forward0", "compute", 3.0),
        Event("forward1", "compute", 1.0, after=("gather1",)),
    ]
    line = simulate(events)
    assert line.end_s == 4.0
    assert line.exposed_s("compute") == 0.0


def test_a_wait_exposes_what_compute_cannot_cover() -> None:
    line = simulate(
        [Event("gather", "link", 5.0), Event("f0", "compute", 3.0), Event("f1", "compute", 1.0, ("gather",))]
    )
    assert line.end_s == 6.0
    assert line.exposed_s("compute") == 2.0


def test_one_communicator_is_serial() -> None:
    assert simulate([Event("a", "link", 1.0), Event("b", "link", 1.0)]).end_s == 2.0
    assert simulate([Event("a", "link0", 1.0), Event("b", "link1", 1.0)]).end_s == 1.0


def test_waiting_for_what_is_never_issued_is_a_deadlock() -> None:
    with pytest.raises(InternalError, match="event b: waits for a, which was not issued before"):
        simulate([Event("b", "link", 1.0, after=("a",))])


def test_schedule_text_round_trips() -> None:
    schedule = one_stage(2)
    assert str(schedule) == "0F0 0B0 0F1 0B1"
    assert Schedule.parse(str(schedule)) == schedule
