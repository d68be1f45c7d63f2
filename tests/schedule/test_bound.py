"""The closed bound is never above the simulated seconds, and how far below it is."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpsearch.errors import LegalityError
from hpsearch.schedule import KINDS, lower_bound_s, lower_bounds_s, make_schedule, refusal, schedule_s, schedules_s
from hpsearch.schedule.bound import chains, chains_of
from tests.schedule.timed import sizes

Floats = NDArray[np.float64]
SETS = 50
QUICK = settings(max_examples=200, deadline=None, derandomize=True)


def drawn(rng: np.random.Generator, how: str, stages: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Forward, input part, weight part [sets, stages] and hops [sets, stages - 1], of one kind of unevenness."""
    shape = (SETS, stages)
    if how == "equal":
        work = [np.repeat(rng.uniform(0.3, 3.0, (SETS, 1)), stages, axis=1) for _ in range(3)]
    elif how == "near":
        work = [rng.uniform(0.8, 1.2, shape) for _ in range(3)]
    elif how == "any":
        work = [rng.uniform(0.0, 1.0, shape) for _ in range(3)]
    else:
        work = [np.where(rng.random(shape) < 0.3, 0.0, rng.lognormal(0.0, 2.0, shape)) for _ in range(3)]
    hops = rng.uniform(0.0, 3.0 if how == "wild" else 0.05, (SETS, stages - 1))
    return work[0], work[1], work[2], hops


@QUICK
@given(sizes(most_ranks=8), st.sampled_from(["equal", "near", "any", "wild"]), st.integers(0, 2**32))
def test_never_above_the_simulation(size: tuple[str, int, int, int], how: str, seed: int) -> None:
    """10,000 sets of times over all kinds: equal, 20 % uneven, anything, and mostly idle with a few long ones."""
    found = drawn(np.random.default_rng(seed), how, size[1] * size[2])
    assert (lower_bounds_s(*size, *found) <= schedules_s(make_schedule(*size), *found)).all()


CASES = [
    (kind, ranks, virtual, m)
    for kind, rule in KINDS.items()
    for ranks in (2, 4, 8)
    for virtual in ([rule.least_virtual] if rule.most_virtual else [2, 3])
    for m in (ranks, 2 * ranks, 4 * ranks, 8 * ranks)
    if refusal(kind, ranks, virtual, m) is None
]
BELOW = {
    ("gpipe", "equal"): 0.0, ("gpipe", "near"): 0.16,
    ("1f1b", "equal"): 0.0, ("1f1b", "near"): 0.02,
    ("interleaved", "equal"): 0.0, ("interleaved", "near"): 0.09,
    ("zb-h1", "equal"): 0.0, ("zb-h1", "near"): 0.05,
    ("interleaved-zb", "equal"): 0.0, ("interleaved-zb", "near"): 0.09,
    ("zbv", "equal"): 0.11, ("zbv", "near"): 0.07,
    ("dualpipev", "equal"): 0.07, ("dualpipev", "near"): 0.07,
}  # fmt: skip
"""How much of the simulated seconds the bound may miss at worst: equal stages without hops; 20 % uneven ones with hops
of up to 5 % of a forward."""


@cache
def missed(kind: str, how: str) -> Floats:
    """The share of the simulated seconds that the bound misses, over all cases of a kind."""
    rng, shares = np.random.default_rng(7), []
    for size in (case for case in CASES if case[0] == kind):
        work = drawn(rng, how, size[1] * size[2])
        found = (*work[:3], 0.0 * work[3]) if how == "equal" else work
        shares.append(1 - lower_bounds_s(*size, *found) / schedules_s(make_schedule(*size), *found))
    return np.concatenate(shares)


@pytest.mark.parametrize(("kind", "how"), BELOW)
def test_how_far_below(kind: str, how: str) -> None:
    assert missed(kind, how).max() <= BELOW[kind, how] + 1e-8


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"gpipe"}))
def test_in_the_median_within_two_percent_of_uneven_stages(kind: str) -> None:
    assert np.median(missed(kind, "near")) <= 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_chains_without_a_text_are_those_of_the_text(kind: str, ranks: int) -> None:
    """To the last count what the schedule itself says, long or short."""
    rule = KINDS[kind]
    for virtual in [rule.least_virtual] if rule.most_virtual else [2, 3, 4]:
        for m in [*range(1, 3 * ranks + 2), *range(5 * ranks, 9 * ranks + 3, 1 if ranks < 4 else 3)]:
            if refusal(kind, ranks, virtual, m) is None:
                assert (chains(kind, ranks, virtual, m) == chains_of(make_schedule(kind, ranks, virtual, m).rows)).all()


def test_worked_bounds() -> None:
    """1F1B of equal stages is its closed form; one slow stage is fill, its work, and drain."""
    assert lower_bound_s("1f1b", 4, 1, 8, [1] * 4, [1] * 4, [1] * 4) == pytest.approx(33)
    slow = [1.0, 1.0, 4.0, 1.0]
    assert lower_bound_s("1f1b", 4, 1, 8, slow, slow, [0] * 4) == pytest.approx(8 * 8 + 2 + 2)
    assert schedule_s(make_schedule("1f1b", 4, 1, 8), slow, slow, [0] * 4) == 8 * 8 + 2 + 2


def test_a_schedule_that_is_not_has_no_bound() -> None:
    with pytest.raises(LegalityError, match="micro_batches = 3"):
        lower_bound_s("1f1b", 4, 1, 3, [1] * 4, [1] * 4, [1] * 4)
