"""Seconds of schedules: the event timeline, closed forms of the papers, and all orders of the smallest pipelines."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpsearch.errors import PlanError
from hpsearch.schedule import (
    KINDS,
    Action,
    Schedule,
    dry_run,
    longest_chain,
    make_schedule,
    rank_ends_s,
    schedule_s,
    schedules_s,
)
from tests.schedule.timed import sizes, timeline, times

QUICK = settings(max_examples=150, deadline=None, derandomize=True)


@QUICK
@given(st.data(), sizes())
def test_equal_to_the_event_timeline(data: st.DataObject, size: tuple[str, int, int, int]) -> None:
    """Every kind, any times of stages, any hops."""
    schedule = make_schedule(*size)
    stages = len(schedule.placement)
    found = data.draw(st.composite(times)(stages))
    hops = data.draw(st.lists(st.floats(0.0, 2.0), min_size=stages - 1, max_size=stages - 1))
    line = timeline(schedule, found, hops)
    assert schedule_s(schedule, *found, hops) == pytest.approx(line.end_s, rel=1e-12)
    ends = rank_ends_s(schedule, *(np.array([row]) for row in found), np.array([hops]))
    for rank in range(size[1]):
        own = max(span.end_s for span in line.spans if span.event.resource == f"rank {rank}")
        assert ends[0, rank] == pytest.approx(own, rel=1e-12)


@QUICK
@given(st.data(), sizes())
def test_many_sets_of_times_at_once(data: st.DataObject, size: tuple[str, int, int, int]) -> None:
    """To the last bit what each gives alone, few at once or many."""
    schedule = make_schedule(*size)
    stages = len(schedule.placement)
    found = [data.draw(st.composite(times)(stages)) for _ in range(3)]
    hops = data.draw(st.lists(st.floats(0.0, 2.0), min_size=3, max_size=3))
    rows = [np.array([one[i] for one in found]) for i in range(3)]
    alone = [schedule_s(schedule, *one, hop) for one, hop in zip(found, hops, strict=True)]
    assert schedules_s(schedule, *rows, np.array(hops)).tolist() == alone
    assert schedules_s(schedule, *(np.tile(row, (20, 1)) for row in rows), np.tile(hops, 20)).tolist() == 20 * alone


def test_many_sets_are_walked_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule("zbv", 3, 2, 7)
    rows = np.random.default_rng(0).random((3, 50, 6))
    whole = schedules_s(schedule, *rows, 0.1)
    monkeypatch.setattr("hpsearch.schedule.flow.ENTRIES", 1000)
    assert (schedules_s(schedule, *rows, 0.1) == whole).all()


SECONDS = st.floats(0.1, 10.0)


@QUICK
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(0, 20), SECONDS, SECONDS, SECONDS)
def test_one_stage_a_rank(kind: str, p: int, more: int, f: float, i: float, w: float) -> None:
    """(m + p - 1)(F + B): Narayanan et al. 2021, section 2.2."""
    m = p + more
    assert schedule_s(make_schedule(kind, p, 1, m), [f] * p, [i] * p, [w] * p) == pytest.approx(
        (m + p - 1) * (f + i + w)
    )


@QUICK
@given(st.integers(1, 8), st.integers(2, 5), st.integers(1, 4), SECONDS, SECONDS, SECONDS)
def test_interleaved(p: int, v: int, rounds: int, f: float, i: float, w: float) -> None:
    """(m + (p - 1)/v)(F + B) with F and B of all stages of a rank: Narayanan et al. 2021, section 2.2."""
    m, n = p * rounds, p * v
    whole = schedule_s(make_schedule("interleaved", p, v, m), [f] * n, [i] * n, [w] * n)
    assert whole == pytest.approx((m * v + p - 1) * (f + i + w))


@QUICK
@given(st.integers(2, 8), st.integers(0, 20), SECONDS, SECONDS, SECONDS)
def test_zb_h1(p: int, more: int, f: float, i: float, w: float) -> None:
    """m(F + I + W) + (p - 1) max(F, I, F + I - W). Qi et al. 2024, section 2, has (p - 1)(F + I - W), which is this
    where the weight part is no longer than either of the others; their order does not fill more when it is longer."""
    m = 2 * p + more
    found = schedule_s(make_schedule("zb-h1", p, 1, m), [f] * p, [i] * p, [w] * p)
    assert found == pytest.approx(m * (f + i + w) + (p - 1) * max(f, i, f + i - w))


@QUICK
@given(st.integers(1, 8), st.integers(0, 20), SECONDS)
def test_zbv(p: int, more: int, f: float) -> None:
    """F = I = W: every rank works without a hole between its first and last action, and the last stage's rank, rank 0,
    from the first second on (Qi et al. 2024, section 6); the others start later by their rank."""
    m, n = 2 * p + more, 2 * p
    ends = rank_ends_s(make_schedule("zbv", p, 2, m), *[np.full((1, n), f)] * 3)[0]
    assert ends == pytest.approx([6 * m * f + rank * f for rank in range(p)])


@QUICK
@given(st.integers(2, 8), st.integers(0, 12), SECONDS)
def test_dualpipev(p: int, more: int, f: float) -> None:
    """A pair takes as long as its two actions (nothing is gained by overlap here): with F = I = W = f the bubble of
    DeepSeek's table, (PP/2 - 1)(F&B + B - 3W), with PP = 2p stages: (p - 1)(3 + 2 - 3)f."""
    m, n = 2 * p + more, 2 * p
    found = schedule_s(make_schedule("dualpipev", p, 2, m), [f] * n, [f] * n, [f] * n)
    assert found >= 6 * m * f + (p - 1) * f
    assert found == pytest.approx(6 * m * f + 2 * (p - 1) * f)


def test_worked_vectors() -> None:
    """Qi et al.'s ZB-H1 at p = 8, m = 32; 1F1B at p = 4; interleaved at p = 8, v = 4."""
    assert schedule_s(make_schedule("1f1b", 4, 1, 8), [1] * 4, [1] * 4, [1] * 4) == 33
    zb = make_schedule("zb-h1", 8, 1, 32)
    assert schedule_s(zb, [1] * 8, [1] * 8, [1] * 8) == 32 * 3 + 7
    assert schedule_s(zb, [1] * 8, [1.2] * 8, [0.8] * 8) == pytest.approx(32 * 3 + 9.8)
    interleaved = make_schedule("interleaved", 8, 4, 32)
    assert schedule_s(interleaved, [0.25] * 32, [0.25] * 32, [0.25] * 32) == pytest.approx(32 * 3 + 5.25)


def test_one_slow_stage_is_fill_and_steady_state() -> None:
    """Stages of 1, 1, 1 and 4 ms, forward only: the sum, and three more times the slowest. Not 4 x 4."""
    assert schedule_s(make_schedule("gpipe", 4, 1, 4), [1, 1, 1, 4], [0] * 4, [0] * 4) == 7 + 3 * 4


def test_hop_latency_limits_the_rate_of_1f1b() -> None:
    """A hop of c costs c(2m(p-1)/p + 2(p-2)) a step in 1F1B, not 2(p-1)c."""
    schedule = make_schedule("1f1b", 8, 1, 128)
    longer = schedule_s(schedule, [1] * 8, [1] * 8, [1] * 8, 0.1) - schedule_s(schedule, [1] * 8, [1] * 8, [1] * 8)
    assert longer == pytest.approx(0.1 * (2 * 128 * 7 / 8 + 2 * 6))


def test_the_turn_of_a_v_costs_no_hop() -> None:
    schedule = make_schedule("zbv", 1, 2, 3)
    assert schedule_s(schedule, [1, 1], [1, 1], [1, 1], 5.0) == 3 * 6
    schedule = make_schedule("zbv", 2, 2, 1)
    # Four forwards, four input parts, the weight parts of stages 2 and 0, and four hops: two down, two up.
    assert schedule_s(schedule, [1] * 4, [1] * 4, [1] * 4, 0.5) == 4 + 4 + 2 + 4 * 0.5


@QUICK
@given(st.data(), sizes(most_ranks=4))
def test_the_longest_chain_bounds_all_other_times(data: st.DataObject, size: tuple[str, int, int, int]) -> None:
    schedule = make_schedule(*size)
    stages = len(schedule.placement)
    found = data.draw(st.composite(times)(stages, 0.1))
    hop = data.draw(st.floats(0.0, 0.5))
    chain = longest_chain(schedule, *found, hop)
    rows = [np.array([row]) for row in found]
    assert chain.seconds(*rows, hop) == pytest.approx(schedule_s(schedule, *found, hop), rel=1e-9)
    others = np.random.default_rng(0).random((3, 40, stages))
    assert (chain.seconds(*others, 0.1) <= schedules_s(schedule, *others, 0.1) * (1 + 1e-12)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_chain_is_the_gradient(kind: str) -> None:
    """Its counts are what the whole gets longer by when one time does, where nothing is exactly as long."""
    schedule = make_schedule(kind, 3, KINDS[kind].least_virtual, 6)
    stages = len(schedule.placement)
    rng = np.random.default_rng(1)
    found = [(1 + rng.random(stages)).tolist() for _ in range(3)]
    chain = longest_chain(schedule, *found, 0.05)
    before = schedule_s(schedule, *found, 0.05)
    for kind_of, counts in enumerate((chain.forward, chain.backward_input, chain.backward_weight)):
        for stage, count in enumerate(counts):
            more = [[x + 1e-7 * ((i, j) == (kind_of, stage)) for j, x in enumerate(row)] for i, row in enumerate(found)]
            assert (schedule_s(schedule, *more, 0.05) - before) / 1e-7 == pytest.approx(count, abs=0.01)
    assert (schedule_s(schedule, *found, 0.05 + 1e-7) - before) / 1e-7 == pytest.approx(sum(chain.hops), abs=0.01)


def forms(stage: int, kinds: str) -> list[tuple[Action, ...]]:
    """All orders of one stage's two micro-batches."""
    return list(permutations([Action(stage, kind, m) for m in range(2) for kind in kinds]))


def fastest(kinds: str, seconds: tuple[float, float, float], most_live: int) -> float:
    """Of all orders on two ranks that run through and keep no more alive."""
    f, i, w = ([x] * 2 for x in seconds)
    legal = [
        [one for one in forms(stage, kinds) if all(_in_order(one, kinds, m) for m in range(2))] for stage in range(2)
    ]
    best = float("inf")
    for ranks in product(*legal):
        schedule = Schedule(ranks)
        try:
            run = dry_run(schedule)
        except PlanError:
            continue
        if max(run.peak_live) <= most_live:
            best = min(best, schedule_s(schedule, f, i, w))
    return best


def _in_order(order: tuple[Action, ...], kinds: str, m: int) -> bool:
    return [one.kind for one in order if one.microbatch == m] == list(kinds)


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (2.0, 1.0, 1.0), (1.0, 0.5, 2.5)])
def test_no_order_of_two_ranks_and_two_micro_batches_is_faster(seconds: tuple[float, float, float]) -> None:
    f, i, w = ([x] * 2 for x in seconds)
    best = fastest("FB", seconds, most_live=2)
    assert schedule_s(make_schedule("1f1b", 2, 1, 2), f, i, w) == pytest.approx(best)
    assert schedule_s(make_schedule("gpipe", 2, 1, 2), f, i, w) == pytest.approx(best)


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5)])
def test_no_split_order_of_two_ranks_and_two_micro_batches_is_faster(seconds: tuple[float, float, float]) -> None:
    """Where the weight part is no longer than the others."""
    f, i, w = ([x] * 2 for x in seconds)
    found = schedule_s(make_schedule("zb-h1", 2, 1, 2), f, i, w)
    assert found == pytest.approx(fastest("FIW", seconds, most_live=2))
