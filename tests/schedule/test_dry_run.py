"""What a dry run finds, against all orders of tiny pipelines and against hand-made mistakes; what is legal."""

from __future__ import annotations

import re
from itertools import permutations, product

import pytest

from hpsearch.errors import LegalityError, PlanError
from hpsearch.schedule import KINDS, Action, Schedule, dry_run, make_schedule, peak_kept, refusal


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_legal_schedule_runs_through(kind: str, ranks: int) -> None:
    """All numbers of stages a rank and of micro-batches up to four rounds: refused by name, or it runs."""
    ran = 0
    for virtual, m in product((1, 2, 3, 5), range(1, 4 * ranks + 2)):
        if refusal(kind, ranks, virtual, m) is None:
            schedule = make_schedule(kind, ranks, virtual, m)
            assert len(dry_run(schedule).order) == sum(map(len, schedule.ranks))
            assert len(schedule.placement) == ranks * virtual
            assert schedule.micro_batches == m
            ran += 1
    rule = KINDS[kind]
    if rule.whole_rounds:
        assert ran == 3 * len(range(ranks, 4 * ranks + 2, ranks))
    else:
        assert ran == 4 * ranks + 1 - max(rule.least_micro_batches * ranks - 1, 0)


LIVE = {
    "gpipe": lambda p, v, m, r: m,
    "1f1b": lambda p, v, m, r: min(m, p - r),
    "interleaved": lambda p, v, m, r: min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1),
    "zb-h1": lambda p, v, m, r: p,
    "zbv": lambda p, v, m, r: 2 * p,
    "dualpipev": lambda p, v, m, r: 2 * p + 1,
}
"""Narayanan et al. 2021 (1f1b, interleaved); Qi et al. 2024: ZB-H1 keeps what rank 0 of 1F1B keeps, on every rank; ZB-V
p micro-batches of both stages; DeepSeek's table: p + 1 micro-batches, of stages half as large. In stages."""


@pytest.mark.parametrize("kind", LIVE)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_activations_alive(kind: str, ranks: int) -> None:
    virtual, m = KINDS[kind].least_virtual, 4 * ranks
    closed = tuple(LIVE[kind](ranks, virtual, m, rank) for rank in range(ranks))
    found = dry_run(make_schedule(kind, ranks, virtual, m)).peak_live
    if kind == "dualpipev":
        assert all(a <= b for a, b in zip(found, closed, strict=True))
        assert max(found) == closed[0]
    else:
        assert found == closed


def test_what_is_kept_counts_each_stage_by_its_size() -> None:
    schedule = Schedule.parse("0F0 0F1 0B0 1F0 0B1 1F1 1B0 1B1")
    assert peak_kept(schedule, [10.0, 1.0]) == (20.0,)
    assert peak_kept(schedule, [1.0, 10.0]) == (20.0,)
    assert peak_kept(schedule, [3.0, 1.0]) == (6.0,)


def orders(stage: int, m: int, split: bool) -> list[tuple[Action, ...]]:
    """All orders of one stage's actions."""
    kinds = "FIW" if split else "FB"
    return list(permutations([Action(stage, kind, i) for i in range(m) for kind in kinds]))


def runs_by_search(ranks: tuple[tuple[Action, ...], ...]) -> bool:
    """Whether the waits, as a graph of all actions, have no ring: nodes without predecessors are taken away."""
    stages = len(ranks)
    after: dict[Action, set[Action]] = {}
    for steps in ranks:
        for i, one in enumerate(steps):
            after[one] = set(steps[:i])
    for one in after:
        for other in after:
            if one.microbatch != other.microbatch:
                continue
            same, back = one.stage == other.stage, {"I", "B"}
            if (
                (one.kind == "F" and other.kind == "F" and other.stage == one.stage - 1)
                or (one.kind in back and other.kind in back and other.stage == one.stage + 1)
                or (one.kind in back and same and other.kind == "F" and one.stage == stages - 1)
                or (one.kind == "W" and same and other.kind == "I")
            ):
                after[one].add(other)
    while free := [one for one, before in after.items() if not before]:
        for one in free:
            del after[one]
        for before in after.values():
            before.difference_update(free)
    return not after


@pytest.mark.parametrize("split", [False, True])
def test_deadlocks_are_those_of_an_independent_search(split: bool) -> None:
    """Two ranks: all orders of two micro-batches, or of one with a split backward."""
    m = 1 if split else 2
    good = 0
    for ranks in product(orders(0, m, split), orders(1, m, split)):
        runs = runs_by_search(ranks)
        good += runs
        if runs:
            dry_run(Schedule(ranks))
        else:
            with pytest.raises(PlanError, match="nobody goes on"):
                dry_run(Schedule(ranks))
    assert 0 < good < len(orders(0, m, split)) ** 2


MISTAKES = {
    "0F0 0B0\n1B0 1F0": "nobody goes on: rank 1 (stage 1) waits at 1B0 for 1F0 of rank 1.",
    "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1": "nobody goes on: rank 0 (stage 0) waits at 0B0 for 1B0 of rank 1; "
    "rank 1 (stage 1) waits at 1F1 for 0F1 of rank 0.",
    "0F0 0W0 0I0": "rank 0 (stage 0) waits at 0W0 for 0I0 of rank 0.",
    "0F0 0F1 (1F1;0B0)OVERLAP_F_B 0B1\n1F0 1B0 1B1": "expected one rank to hold stage 1, but ranks 0 and 1 do",
    "0F0 0B0 0F1": "rank 0, stage 0: expected one forward and one backward (B, or I and W) of micro-batch 1, but found "
    "1 x 0F1.",
    "0F0 0F0 0B0": "but found 2 x 0F0, 1 x 0B0.",
    "0F0 0I0 0B0": "but found 1 x 0F0, 1 x 0B0, 1 x 0I0.",
    "0F0 0B0\n2F0 2B0": "expected stages 0 to 2, but no rank does anything for stage 1",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_named(text: str) -> None:
    with pytest.raises(PlanError, match=re.escape(MISTAKES[text])):
        dry_run(Schedule.parse(text))


def test_a_pair_starts_when_both_inputs_are_there() -> None:
    """As torch's runtime does: the forward of a pair does not go on while its backward waits."""
    dry_run(Schedule.parse("0F0 0F1 0B0 0B1\n1F0 (1F1;1B0)OVERLAP_F_B 1B1"))
    with pytest.raises(PlanError, match=re.escape("rank 1 (stage 1) waits at (1F0;1B0)OVERLAP_F_B for 1F0 of rank 1")):
        dry_run(Schedule.parse("0F0 0B0\n(1F0;1B0)OVERLAP_F_B"))


REFUSALS = {
    ("1f1b", 8, 1, 4): "schedule 1f1b, micro_batches = 4: expected at least 8 for 8 ranks, but found 4. "
    "Legal: 8 and more; gpipe takes any number.",
    (
        "interleaved",
        4,
        2,
        6,
    ): "schedule interleaved, micro_batches = 6: expected a multiple of the 4 ranks, but found "
    "6. Legal: 4, 8, 12, …; nearest 4 or 8.",
    ("interleaved-zb", 4, 2, 3): "schedule interleaved-zb, micro_batches = 3: expected a multiple of the 4 ranks, but "
    "found 3. Legal: 4, 8, 12, …; nearest 4.",
    (
        "interleaved",
        4,
        1,
        8,
    ): "schedule interleaved, virtual = 1: expected at least 2 stages on each rank, but found 1. Legal: 2, 3, 4, ….",
    ("interleaved", 4, 2, 0): "micro_batches = 0: expected at least 4 for 4 ranks, but found 0. Legal: 4, 8, …",
    ("zb-h1", 4, 2, 8): "schedule zb-h1, virtual = 2: expected 1 stage on each rank, but found 2. Legal: 1.",
    ("zbv", 4, 1, 8): "schedule zbv, virtual = 1: expected 2 stages on each rank, but found 1. Legal: 2.",
    ("dualpipev", 4, 2, 7): "schedule dualpipev, micro_batches = 7: expected at least 8 for 4 ranks, but found 7.",
    ("gpipe", 4, 1, 0): "schedule gpipe, micro_batches = 0: expected at least 1 for 4 ranks, but found 0.",
    ("gpipe", 0, 1, 1): "schedule gpipe, stages = 0: expected at least 1 rank, but found 0. Legal: 1, 2, 3, ….",
    ("zb-h2", 4, 1, 8): "schedule 'zb-h2': expected one of gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, "
    "dualpipev.",
}


@pytest.mark.parametrize("asked", REFUSALS)
def test_refusals_name_field_value_and_what_is_legal(asked: tuple[str, int, int, int]) -> None:
    with pytest.raises(LegalityError, match=re.escape(REFUSALS[asked])):
        make_schedule(*asked)


def test_rules_in_one_line_each() -> None:
    assert {name: kind.rule for name, kind in KINDS.items()} == {
        "gpipe": "1 stage on each rank; any number of micro-batches",
        "1f1b": "1 stage on each rank; at least as many micro-batches as ranks",
        "interleaved": "at least 2 stages on each rank; micro-batches a multiple of the ranks",
        "zb-h1": "1 stage on each rank; at least as many micro-batches as ranks",
        "interleaved-zb": "at least 2 stages on each rank; micro-batches a multiple of the ranks",
        "zbv": "2 stages on each rank, placed in a V; any number of micro-batches",
        "dualpipev": "2 stages on each rank, placed in a V; at least 2 micro-batches a rank",
    }
