"""A schedule run without work: is everything done once, does anybody wait forever, and how much is kept alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hpsearch.errors import PlanError
from hpsearch.schedule.schedule import KIND_ORDER, Ints, Rows, Schedule, Step


@dataclass(frozen=True)
class Order:
    """Steps numbered from 1, each behind all that it waits for; 0 stands for what waits for nobody."""

    ranks: Ints
    steps: Ints
    """Which step of the schedule, counted through all ranks."""
    before: Ints
    """The step that the same rank did before."""
    inputs: Ints
    """The step that gives the input of a step, of its forward if it is a pair."""
    others: Ints
    """The step that gives the input of the backward of a pair."""


@dataclass(frozen=True)
class DryRun:
    order: tuple[tuple[int, Step], ...]
    """Rank and step, each behind all that it waits for."""
    peak_live: tuple[int, ...]
    """The most forwards of each rank whose backward (the weight part, if split) is still to come."""


def dry_run(schedule: Schedule) -> DryRun:
    """Raises PlanError where an action is missing or done twice, or where ranks wait for each other, by name."""
    order = in_order(schedule.rows)
    peaks = peak_kept(schedule, [1.0] * len(schedule.placement))
    steps = [step for steps in schedule.ranks for step in steps]
    done = tuple((rank, steps[i]) for rank, i in zip(order.ranks.tolist(), order.steps.tolist(), strict=True))
    return DryRun(done, tuple(map(int, peaks)))


def in_order(rows: Rows) -> Order:
    """Raises PlanError as `dry_run` does."""
    _once(rows)
    waits, ends = _waits(rows), np.cumsum([0, *rows.steps])
    given = bytearray(2 * len(rows.placement) * rows.micro_batches + 2)
    """By forwards of each stage and micro-batch, then backwards: whether a step did it; then what nobody has to do."""
    given[-2] = 1
    at, order = ends[:-1].tolist(), list[int]()
    lists, last = [column.tolist() for column in waits.T], ends[1:].tolist()
    is_paired = bool((waits[:, 2] != len(given) - 2).any())
    moved = True
    while moved:
        moved = False
        for rank, begin in enumerate(at):
            i = _goes_on(lists, given, begin, last[rank], is_paired)
            if i > begin:
                order += range(begin, i)
                at[rank], moved = i, True
    if len(order) < len(waits):
        raise _deadlock(rows, at, given, lists)
    steps = np.array(order, dtype=np.int64)
    number = np.zeros(len(steps) + 1, dtype=np.int64)
    number[steps] = np.arange(1, len(steps) + 1)  # the last stands for nobody
    givers = np.full(len(given), len(steps))
    for column in (1, 3):
        givers[waits[:, column]] = np.arange(len(steps))
    givers[-2:] = len(steps)
    ranks = np.searchsorted(ends, steps, side="right") - 1
    before = np.where(np.isin(steps, ends), 0, number[steps - 1])
    return Order(ranks, steps, before, *(number[givers[waits[steps, column]]] for column in (0, 2)))


def _goes_on(lists: list[list[int]], given: bytearray, begin: int, end: int, is_paired: bool) -> int:
    """How far a rank comes, from step `begin`, with what is given; and gives."""
    needs, gives, others, too = lists
    i = begin
    if is_paired:
        while i < end and given[needs[i]] and given[others[i]]:
            given[gives[i]] = given[too[i]] = 1
            i += 1
    else:
        while i < end and given[needs[i]]:
            given[gives[i]] = 1
            i += 1
    return i


def _waits(rows: Rows) -> Ints:
    """[steps, 4]: what a step needs and what it gives, and what the backward of a pair does.

    A forward needs that of the stage before; a backward that of the stage behind, or the forward of the last stage; a
    weight part its input part.
    """
    stages, m = len(rows.placement), rows.micro_batches
    nobody, nothing = 2 * stages * m, 2 * stages * m + 1
    _, step, stage, kind, micro = rows.table.T
    forward, weight = kind == KIND_ORDER["F"], kind == KIND_ORDER["W"]
    backward = np.where(stage + 1 < stages, stages + stage + 1, stage)
    needs = np.where(forward, stage - 1, np.where(weight, stages + stage, backward)) * m + micro
    needs[forward & (stage == 0)] = nobody
    gives = np.where(weight, nothing, np.where(forward, stage, stages + stage) * m + micro)
    found = np.tile(np.array([nobody, nothing, nobody, nothing]), (int(step.max(initial=-1)) + 1, 1))
    second = np.zeros(len(step), dtype=bool)
    second[1:] = step[1:] == step[:-1]
    for part, at in ((~second, 0), (second, 2)):
        found[step[part], at], found[step[part], at + 1] = needs[part], gives[part]
    return found


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


def _once(rows: Rows) -> None:
    """Every stage does every micro-batch: one forward, and one whole backward or one of each of its parts."""
    stages, m = len(rows.placement), rows.micro_batches
    _, _, stage, kind, micro = rows.table.T
    found = np.bincount((stage * m + micro) * 4 + kind, minlength=4 * stages * m).reshape(-1, 4)
    whole, split = ((found == wanted).all(axis=1) for wanted in ([1, 0, 0, 1], [1, 1, 1, 0]))
    for wrong in np.flatnonzero(~(whole | split)).tolist():
        at, one = divmod(wrong, m)
        have = dict(zip(KIND_ORDER, found[wrong].tolist(), strict=True))
        seen = ", ".join(f"{have[kind]} x {at}{kind}{one}" for kind in "FBIW" if have[kind]) or "nothing"
        problem = f"expected one forward and one backward (B, or I and W) of micro-batch {one}, but found {seen}"
        raise PlanError(f"schedule, rank {rows.placement[at]}, stage {at}", problem, "Each action stands in it once.")


def _deadlock(rows: Rows, at: list[int], given: bytearray, lists: list[list[int]]) -> PlanError:
    """The ring of ranks that wait for each other; `at`: the step that each is at, counted through all."""
    schedule, ends = Schedule.of(rows), [0, *accumulate(rows.steps)]
    stages, m = len(schedule.placement), schedule.micro_batches
    stuck = {rank: i for rank, i in enumerate(at) if i < ends[rank + 1]}
    keys = {rank: next(key for key in (lists[0][i], lists[2][i]) if not given[key]) for rank, i in stuck.items()}
    rank, ring = min(keys), list[int]()
    while rank not in ring:
        ring.append(rank)
        rank = schedule.placement[keys[rank] // m % stages]
    told = []
    for one in ring[ring.index(rank) :]:
        key, kinds = (keys[one], "F") if keys[one] < stages * m else (keys[one] - stages * m, "BI")
        givers = ((r, a) for r, a in schedule.actions() if a.stage * m + a.microbatch == key and a.kind in kinds)
        other, action = next(givers)
        step = schedule.ranks[one][at[one] - ends[one]]
        told.append(f"rank {one} (stage {step.parts[0].stage}) waits at {step} for {action} of rank {other}")
    return PlanError("schedule", "nobody goes on: " + "; ".join(told), "Put what is waited for earlier in its rank.")
