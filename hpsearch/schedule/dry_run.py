"""A schedule run without work: is everything done once, does anybody wait forever, and how much is kept alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpsearch.errors import PlanError
from hpsearch.schedule.schedule import Action, Schedule, Step


@dataclass(frozen=True)
class Order:
    """Steps, each behind all that it waits for, numbered from 1; 0 stands for what waits for nobody."""

    ranks: list[int]
    steps: list[Step]
    inputs: list[int]
    """The step that gives the input of a step, of its forward if it is a pair."""
    of_pairs: dict[int, int]
    """By overlapped pair: the step that gives the input of its backward."""


@dataclass(frozen=True)
class DryRun:
    order: tuple[tuple[int, Step], ...]
    """Rank and step, each behind all that it waits for."""
    peak_live: tuple[int, ...]
    """The most forwards of each rank whose backward (the weight part, if split) is still to come."""


def dry_run(schedule: Schedule) -> DryRun:
    """Raises PlanError where an action is missing or done twice, or where ranks wait for each other, by name."""
    order = in_order(schedule)
    peaks = peak_kept(schedule, [1.0] * len(schedule.placement))
    return DryRun(tuple(zip(order.ranks, order.steps, strict=True)), tuple(map(int, peaks)))


def in_order(schedule: Schedule) -> Order:
    """Raises PlanError as `dry_run` does."""
    _once(schedule)
    stages, m = len(schedule.placement), schedule.micro_batches
    nobody = 2 * stages * m
    given = [0] * nobody + [-1]
    """By forwards of each stage and micro-batch, then backwards: the step that did it; 0 until then."""
    at = [0] * len(schedule.ranks)
    order = Order([], [], [], {})
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(schedule.ranks):
            first = at[rank]
            for step in steps[first:]:
                found = [given[_needed(part, stages, m, nobody)] for part in step.parts]
                if 0 in found:
                    break
                at[rank] += 1
                order.steps.append(step)
                order.ranks.append(rank)
                order.inputs.append(max(found[0], 0))
                if len(found) > 1:
                    order.of_pairs[len(order.steps)] = max(found[1], 0)
                for part in step.parts:
                    if part.kind != "W":
                        given[_given(part, stages, m)] = len(order.steps)
            moved = moved or at[rank] > first
    if len(order.steps) < sum(map(len, schedule.ranks)):
        raise _deadlock(schedule, at, given)
    return order


def _given(action: Action, stages: int, m: int) -> int:
    return ((0 if action.kind == "F" else stages) + action.stage) * m + action.microbatch


def _needed(action: Action, stages: int, m: int, nobody: int) -> int:
    """What must have been done before: the forward of the stage before; the backward of the stage behind, or its own
    forward on the last; the input part for the weight part."""
    stage = action.stage
    if action.kind == "F":
        return (stage - 1) * m + action.microbatch if stage else nobody
    if action.kind == "W":
        return (stages + stage) * m + action.microbatch
    if stage + 1 < stages:
        return (stages + stage + 1) * m + action.microbatch
    return stage * m + action.microbatch


def peak_kept(schedule: Schedule, kept: Sequence[float]) -> tuple[float, ...]:
    """The most that each rank keeps at once, if a forward of stage s keeps `kept[s]` until its backward (the weight
    part, if split) is done. In the unit of `kept`: activations, bytes."""
    peaks = []
    for steps in schedule.ranks:
        now = peak = 0.0
        for step in steps:
            for action in step.parts:
                if action.kind == "F":
                    now += kept[action.stage]
                    peak = max(peak, now)
                elif action.kind in "BW":
                    now -= kept[action.stage]
        peaks.append(peak)
    return tuple(peaks)


def _once(schedule: Schedule) -> None:
    """Every stage does every micro-batch: one forward, and one whole backward or one of each of its parts."""
    stages, m = len(schedule.placement), schedule.micro_batches
    found = [[0] * (stages * m) for _ in "FBIW"]
    for _, action in schedule.actions():
        found["FBIW".index(action.kind)][action.stage * m + action.microbatch] += 1
    for i, have in enumerate(zip(*found, strict=True)):
        if have not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            stage, micro = divmod(i, m)
            seen = ", ".join(f"{n} x {stage}{kind}{micro}" for kind, n in zip("FBIW", have, strict=True) if n)
            problem = f"expected one forward and one backward (B, or I and W) of micro-batch {micro}, but found "
            where = f"schedule, rank {schedule.placement[stage]}, stage {stage}"
            raise PlanError(where, problem + (seen or "nothing"), "Each action stands in it once.")


def _deadlock(schedule: Schedule, at: list[int], given: list[int]) -> PlanError:
    """The ring of ranks that wait for each other, from the first that stands still."""
    stages, m = len(schedule.placement), schedule.micro_batches
    waits: dict[int, tuple[Step, int]] = {}
    for rank, steps in enumerate(schedule.ranks):
        if at[rank] < len(steps):
            keys = [_needed(part, stages, m, 2 * stages * m) for part in steps[at[rank]].parts]
            waits[rank] = steps[at[rank]], next(key for key in keys if given[key] == 0)
    rank, seen = min(waits), Counter[int]()
    while not seen[rank]:
        seen[rank] += 1
        rank = schedule.placement[waits[rank][1] // m % stages]
    told = [f"{_waiting(schedule, one, *waits[one])}" for one in _ring(schedule, waits, rank)]
    return PlanError("schedule", "nobody goes on: " + "; ".join(told), "Put what is waited for earlier in its rank.")


def _ring(schedule: Schedule, waits: dict[int, tuple[Step, int]], first: int) -> Iterator[int]:
    """Ranks from `first` on, each waiting for the next, until it is `first` again."""
    rank = first
    while True:
        yield rank
        rank = schedule.placement[waits[rank][1] // schedule.micro_batches % len(schedule.placement)]
        if rank == first:
            return


def _waiting(schedule: Schedule, rank: int, step: Step, key: int) -> str:
    stages, m = len(schedule.placement), schedule.micro_batches
    givers = ((r, a) for r, a in schedule.actions() if a.kind != "W" and _given(a, stages, m) == key)
    other, action = next(givers)
    return f"rank {rank} (stage {step.parts[0].stage}) waits at {step} for {action} of rank {other}"
