"""The pipeline's end time: worked vectors, the event timeline, and long runs from short ones."""

from __future__ import annotations

import random

import pytest

from hpsearch.errors import LegalityError
from hpsearch.estimate.pipeline import as_run, pipeline_path, pipeline_s, simulated_s
from hpsearch.schedule import dry_run, make_schedule
from tests.schedule.timed import timeline


def test_worked_vectors() -> None:
    """1F1B: (m+p-1)(F+B) = 33. Interleaved over 4 chunks: bubble (p-1)(F+B)/v = 5.25."""
    assert pipeline_s([1] * 4, [2] * 4, 4, 8, 0.0) == 33
    assert pipeline_s([0.25] * 32, [0.5] * 32, 8, 32, 0.0) == pytest.approx(32 * 3 + 5.25)


def test_hop_latency_limits_the_rate() -> None:
    """A hop of c costs c(2m(p-1)/p + 2(p-2)) a step in 1F1B, not 2(p-1)c."""
    longer = pipeline_s([1] * 8, [2] * 8, 8, 128, 0.1) - pipeline_s([1] * 8, [2] * 8, 8, 128, 0.0)
    assert longer == pytest.approx(0.1 * (2 * 128 * 7 / 8 + 2 * 6))


def timeline_s(forward: list[float], backward: list[float], stages: int, m: int) -> float:
    """The same schedule, event by event."""
    schedule = as_run(stages, len(forward) // stages, m)
    return timeline(schedule, (forward, backward, [0.0] * len(forward)), [0.0] * (len(forward) - 1)).end_s


@pytest.mark.parametrize("seed", range(20))
def test_equal_to_the_event_timeline(seed: int) -> None:
    draw = random.Random(seed)
    stages, chunks = draw.choice([2, 3, 4]), draw.choice([1, 2, 3])
    m = stages * draw.randint(1, 4)
    forward = [draw.random() for _ in range(stages * chunks)]
    backward = [2 * draw.random() for _ in range(stages * chunks)]
    assert simulated_s(forward, backward, stages, m, 0.0) == pytest.approx(timeline_s(forward, backward, stages, m))


@pytest.mark.parametrize("seed", range(20))
def test_long_runs_from_short_ones(seed: int) -> None:
    draw = random.Random(seed)
    stages, chunks = draw.choice([2, 4, 8]), draw.choice([1, 2, 4])
    m = stages * draw.randint(4, 8)
    forward = [draw.random() for _ in range(stages * chunks)]
    backward = [2 * x for x in forward]
    exact = simulated_s(forward, backward, stages, m, 0.01)
    assert pipeline_s(forward, backward, stages, m, 0.01) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("seed", range(10))
def test_the_longest_chain_is_the_gradient(seed: int) -> None:
    """Its counts times small changes of the times are what the end moves by."""
    draw = random.Random(seed)
    stages, chunks = draw.choice([2, 4]), draw.choice([1, 2])
    m = 3 * stages
    forward = [1 + draw.random() for _ in range(stages * chunks)]
    backward = [2 + draw.random() for _ in range(stages * chunks)]
    path = pipeline_path(forward, backward, stages, m, 0.05)
    assert path.seconds(forward, backward, 0.05) == pytest.approx(simulated_s(forward, backward, stages, m, 0.05))
    for i in range(stages * chunks):
        more = [x + (1e-7 if j == i else 0.0) for j, x in enumerate(backward)]
        moved = simulated_s(forward, more, stages, m, 0.05) - simulated_s(forward, backward, stages, m, 0.05)
        assert moved / 1e-7 == pytest.approx(path.backward[i], abs=0.01)
    hop = simulated_s(forward, backward, stages, m, 0.05 + 1e-7) - simulated_s(forward, backward, stages, m, 0.05)
    assert hop / 1e-7 == pytest.approx(path.hops, abs=0.01)


def test_frameworks_run_the_schedules_of_the_papers() -> None:
    """But for as many micro-batches as ranks, interleaved, where all forwards come first."""
    assert as_run(4, 1, 9) == make_schedule("1f1b", 4, 1, 9)
    assert as_run(4, 3, 8) == make_schedule("interleaved", 4, 3, 8)
    assert as_run(4, 3, 4) != make_schedule("interleaved", 4, 3, 4)
    assert dry_run(as_run(4, 3, 4)).peak_live == (12,) * 4


def test_fewer_micro_batches_than_ranks_and_a_last_round_that_is_not_whole() -> None:
    assert dry_run(as_run(8, 1, 3)).peak_live == (3, 3, 3, 3, 3, 3, 2, 1)
    assert as_run(2, 2, 5).micro_batches == 5
    assert len(dry_run(as_run(2, 2, 5)).order) == 2 * 4 * 5


def test_a_last_round_too_small_to_go_on_is_refused_by_name() -> None:
    told = r"layout, micro_batches = 10: expected whole rounds of pp = 8 where vpp = 2, but the last has 2, and nobody "
    with pytest.raises(LegalityError, match=told + r"goes on: rank .* Legal: 8, 16, …"):
        pipeline_s([1.0] * 16, [2.0] * 16, 8, 10, 0.0)
