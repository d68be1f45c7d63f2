"""A schedule run without work: is everything done once, does anybody wait forever, and how much is kept alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpsearch.errors import PlanError
from hpsearch.schedule.schedule import Action, Schedule, Step

Key = tuple[str, int, int]
"""Kind (F, B for an input part or a whole backward, W), stage, micro-batch: what others wait for."""


def result(action: Action) -> Key:
    return ("B" if action.kind == "I" else action.kind, action.stage, action.microbatch)


def needed(action: Action, stages: int) -> Key | None:
    """What must have been done before: the forward of the stage before; the backward of the stage behind, or its own
    forward on the last; the input part for the weight part."""
    stage, m = action.stage, action.microbatch
    if action.kind == "F":
        return ("F", stage - 1, m) if stage else None
    if action.kind == "W":
        return ("B", stage, m)
    return ("B", stage + 1, m) if stage + 1 < stages else ("F", stage, m)


@dataclass(frozen=True)
class DryRun:
    order: tuple[tuple[int, Step], ...]
    """Rank and step, each behind all that it waits for."""
    peak_live: tuple[int, ...]
    """The most forwards of each rank whose backward (the weight part, if split) is still to come."""


def dry_run(schedule: Schedule) -> DryRun:
    """Raises PlanError where an action is missing or done twice, or where ranks wait for each other, by name."""
    _once(schedule)
    stages = len(schedule.placement)
    done: set[Key] = set()
    at = [0] * len(schedule.ranks)
    order: list[tuple[int, Step]] = []
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(schedule.ranks):
            first = at[rank]
            for step in steps[first:]:
                if not all(needed(part, stages) is None or needed(part, stages) in done for part in step.parts):
                    break
                done.update(map(result, step.parts))
                order.append((rank, step))
                at[rank] += 1
            moved = moved or at[rank] > first
    if len(order) < sum(map(len, schedule.ranks)):
        raise _deadlock(schedule, at, done)
    return DryRun(tuple(order), tuple(int(peak) for peak in peak_kept(schedule, [1.0] * stages)))


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
    found = Counter((action.stage, action.kind, action.microbatch) for _, action in schedule.actions())
    for stage, rank in enumerate(schedule.placement):
        for m in range(schedule.micro_batches):
            have = {kind: found[stage, kind, m] for kind in "FBIW"}
            if have not in ({"F": 1, "B": 1, "I": 0, "W": 0}, {"F": 1, "B": 0, "I": 1, "W": 1}):
                seen = ", ".join(f"{count} x {stage}{kind}{m}" for kind, count in have.items() if count) or "nothing"
                problem = f"expected one forward and one backward (B, or I and W) of micro-batch {m}, but found {seen}"
                raise PlanError(f"schedule, rank {rank}, stage {stage}", problem, "Each action stands in it once.")


def _deadlock(schedule: Schedule, at: list[int], done: set[Key]) -> PlanError:
    """The ring of ranks that wait for each other, from the first that stands still."""
    stages = len(schedule.placement)
    waits: dict[int, tuple[Step, Key]] = {}
    for rank, steps in enumerate(schedule.ranks):
        if at[rank] < len(steps):
            keys = [needed(part, stages) for part in steps[at[rank]].parts]
            waits[rank] = steps[at[rank]], next(key for key in keys if key is not None and key not in done)
    rank, seen = min(waits), []
    while rank not in seen:
        seen.append(rank)
        rank = schedule.placement[waits[rank][1][1]]
    ring = seen[seen.index(rank) :]
    told = []
    for one in ring:
        step, key = waits[one]
        told.append(f"rank {one} (stage {step.parts[0].stage}) waits at {step} for {_name(schedule, key)}")
    return PlanError("schedule", "nobody goes on: " + "; ".join(told), "Put what is waited for earlier in its rank.")


def _name(schedule: Schedule, key: Key) -> str:
    """The action that gives `key`, and where it stands."""
    rank, action = next((rank, action) for rank, action in schedule.actions() if result(action) == key)
    return f"{action} of rank {rank}"
