"""A schedule run without work: is everything done once, does anybody wait forever, and how much is kept alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import numpy as np

from hpsearch.errors import PlanError
from hpsearch.schedule.schedule import KIND_ORDER, Schedule, Step


@dataclass(frozen=True)
class Order:
    """Steps numbered from 1, each behind all that it waits for; 0 stands for what waits for nobody, at level 0."""

    ranks: list[int]
    steps: list[int]
    """Which step of the schedule, counted through all ranks."""
    before: list[int]
    """The step that the same rank did before."""
    inputs: list[int]
    """The step that gives the input of a step, of its forward if it is a pair."""
    others: list[int]
    """The step that gives the input of the backward of a pair."""
    levels: list[int]
    """One more than the highest level of what a step waits for."""


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
    steps = [step for steps in schedule.ranks for step in steps]
    done = tuple((rank, steps[i]) for rank, i in zip(order.ranks, order.steps, strict=True))
    return DryRun(done, tuple(map(int, peaks)))


def in_order(schedule: Schedule) -> Order:
    """Raises PlanError as `dry_run` does."""
    _once(schedule)
    stages, m = len(schedule.placement), schedule.micro_batches
    given: list[int | None] = [None] * (2 * stages * m) + [0, 0]
    """By forwards of each stage and micro-batch, then backwards: the step that did it; None until then."""
    waits = _waits(schedule)
    at, last = [0] * len(schedule.ranks), [0] * len(schedule.ranks)
    offsets = [0, *accumulate(map(len, schedule.ranks))]
    order, level = Order([], [], [], [], [], []), [0]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(waits):
            i, before = at[rank], last[rank]
            while i < len(mine):
                need, gives, other_need, also_gives = mine[i]
                source, other = given[need], given[other_need]
                if source is None or other is None:
                    break
                order.before.append(before)
                order.inputs.append(source)
                order.others.append(other)
                level.append(1 + max(level[before], level[source], level[other]))
                before = given[gives] = given[also_gives] = len(order.before)
                i += 1
            if i > at[rank]:
                order.ranks.extend([rank] * (i - at[rank]))
                order.steps.extend(range(offsets[rank] + at[rank], offsets[rank] + i))
                at[rank], last[rank], moved = i, before, True
    if len(order.steps) < offsets[-1]:
        raise _deadlock(schedule, at, given, waits)
    return replace(order, levels=level[1:])


def _waits(schedule: Schedule) -> list[list[tuple[int, int, int, int]]]:
    """By rank and step: what it needs and what it gives, and what the backward of a pair does.

    A forward needs that of the stage before; a backward that of the stage behind, or the forward of the last stage; a
    weight part its input part.
    """
    stages, m = len(schedule.placement), schedule.micro_batches
    nobody, nothing = 2 * stages * m, 2 * stages * m + 1
    _, step, stage, kind, micro = schedule.table.T
    forward, weight = kind == KIND_ORDER["F"], kind == KIND_ORDER["W"]
    backward = np.where(stage + 1 < stages, stages + stage + 1, stage)
    needs = np.where(forward, stage - 1, np.where(weight, stages + stage, backward)) * m + micro
    needs[forward & (stage == 0)] = nobody
    gives = np.where(weight, nothing, np.where(forward, stage, stages + stage) * m + micro)
    rows = np.tile(np.array([nobody, nothing, nobody, nothing]), (int(step.max(initial=-1)) + 1, 1))
    second = np.zeros(len(step), dtype=bool)
    second[1:] = step[1:] == step[:-1]
    for part, at in ((~second, 0), (second, 2)):
        rows[step[part], at], rows[step[part], at + 1] = needs[part], gives[part]
    flat = iter(map(tuple, rows.tolist()))
    return [list(islice(flat, len(steps))) for steps in schedule.ranks]


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
    _, _, stage, kind, micro = schedule.table.T
    found = np.bincount((stage * m + micro) * 4 + kind, minlength=4 * stages * m).reshape(-1, 4)
    whole, split = ((found == wanted).all(axis=1) for wanted in ([1, 0, 0, 1], [1, 1, 1, 0]))
    for wrong in np.flatnonzero(~(whole | split)).tolist():
        at, one = divmod(wrong, m)
        have = dict(zip(KIND_ORDER, found[wrong].tolist(), strict=True))
        seen = ", ".join(f"{have[kind]} x {at}{kind}{one}" for kind in "FBIW" if have[kind]) or "nothing"
        problem = f"expected one forward and one backward (B, or I and W) of micro-batch {one}, but found {seen}"
        raise PlanError(
            f"schedule, rank {schedule.placement[at]}, stage {at}", problem, "Each action stands in it once."
        )


def _deadlock(
    schedule: Schedule, at: list[int], given: list[int | None], waits: list[list[tuple[int, int, int, int]]]
) -> PlanError:
    """The ring of ranks that wait for each other."""
    stages, m = len(schedule.placement), schedule.micro_batches
    stuck = {rank: waits[rank][at[rank]] for rank, steps in enumerate(schedule.ranks) if at[rank] < len(steps)}
    keys = {rank: next(key for key in (one[0], one[2]) if given[key] is None) for rank, one in stuck.items()}
    rank, ring = min(keys), list[int]()
    while rank not in ring:
        ring.append(rank)
        rank = schedule.placement[keys[rank] // m % stages]
    told = []
    for one in ring[ring.index(rank) :]:
        key, kinds = (keys[one], "F") if keys[one] < stages * m else (keys[one] - stages * m, "BI")
        givers = ((r, a) for r, a in schedule.actions() if a.stage * m + a.microbatch == key and a.kind in kinds)
        other, action = next(givers)
        step = schedule.ranks[one][at[one]]
        told.append(f"rank {one} (stage {step.parts[0].stage}) waits at {step} for {action} of rank {other}")
    return PlanError("schedule", "nobody goes on: " + "; ".join(told), "Put what is waited for earlier in its rank.")
