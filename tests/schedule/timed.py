"""Schedules to draw, and the event timeline of one: a second way to the same seconds."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hpsearch.schedule import KINDS, Action, Event, Schedule, Timeline, dry_run, refusal, simulate

Times = tuple[list[float], list[float], list[float]]
"""Forward, input part, weight part of each stage."""


@st.composite
def sizes(draw: st.DrawFn, most_ranks: int = 5, kinds: Sequence[str] = tuple(KINDS)) -> tuple[str, int, int, int]:
    """Kind, ranks, stages a rank, micro-batches: any legal ones."""
    kind = draw(st.sampled_from(kinds))
    rule, ranks = KINDS[kind], draw(st.integers(1, most_ranks))
    virtual = draw(st.integers(rule.least_virtual, rule.most_virtual or 4))
    rounds = draw(st.integers(max(rule.least_micro_batches, 1), 4))
    m = rounds * ranks + (0 if rule.whole_rounds else draw(st.integers(0, ranks - 1)))
    assert refusal(kind, ranks, virtual, m) is None
    return kind, ranks, virtual, m


def times(draw: st.DrawFn, stages: int, least: float = 0.0) -> Times:
    one = st.floats(least, 10.0, allow_nan=False)
    return tuple(draw(st.lists(one, min_size=stages, max_size=stages)) for _ in range(3))  # type: ignore[return-value]


def timeline(schedule: Schedule, found: Times, hop_s: Sequence[float]) -> Timeline:
    """Events in the order of a dry run: an overlapped pair is one event, a hop one on a link of its own."""
    placement, stages = schedule.placement, len(schedule.placement)
    events: list[Event] = []

    def waits(action: Action) -> tuple[str, ...]:
        stage, m = action.stage, action.microbatch
        if action.kind == "W":
            return (f"B{stage}.{m}",)
        other = stage - 1 if action.kind == "F" else stage + 1
        if other < 0:
            return ()
        if other == stages:
            return (f"F{stage}.{m}",)
        name = ("F" if action.kind == "F" else "B") + f"{other}.{m}"
        if placement[other] == placement[stage]:
            return (name,)
        events.append(Event(f"hop {name}", f"link {name}", hop_s[min(stage, other)], (name,)))
        return (f"hop {name}",)

    for rank, step in dry_run(schedule).order:
        forward, inputs, weights = found
        cost = {"F": forward, "I": inputs, "W": weights, "B": [a + b for a, b in zip(inputs, weights, strict=True)]}
        after = tuple(name for part in step.parts for name in waits(part))
        seconds = sum(cost[part.kind][part.stage] for part in step.parts)
        events.append(Event(f"step {step}", f"rank {rank}", seconds, after))
        for part in step.parts:
            kind = "B" if part.kind == "I" else part.kind
            events.append(Event(f"{kind}{part.stage}.{part.microbatch}", f"end {part}", 0.0, (f"step {step}",)))
    return simulate(events)
