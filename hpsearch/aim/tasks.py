"""A step of several modules as tasks on groups of devices: when each starts and ends, and what no order beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    name: str
    group: int
    """Devices that do it; one task at a time."""
    seconds: float
    after: tuple[tuple[int, float], ...] = ()
    """(task, seconds on the way from there)."""


@dataclass(frozen=True)
class Ran:
    name: str
    group: int
    start_s: float
    end_s: float


def ran(tasks: Sequence[Task]) -> tuple[Ran, ...]:
    """Every task, in order of start: the one that can start first, of several the one with the longest way to the end.
    Tasks stand behind those they wait for."""
    tails = _tails(tasks)
    free: dict[int, float] = {}
    done: dict[int, Ran] = {}
    while len(done) < len(tasks):
        ready = [i for i, one in enumerate(tasks) if i not in done and all(j in done for j, _ in one.after)]
        starts = {
            i: max([free.get(tasks[i].group, 0.0), *(done[j].end_s + way for j, way in tasks[i].after)]) for i in ready
        }
        i = min(ready, key=lambda one: (starts[one], -tails[one], one))
        done[i] = Ran(tasks[i].name, tasks[i].group, starts[i], starts[i] + tasks[i].seconds)
        free[tasks[i].group] = done[i].end_s
    return tuple(sorted(done.values(), key=lambda one: (one.start_s, one.end_s, one.name)))


def least_s(tasks: Sequence[Task]) -> float:
    """No order of the tasks ends sooner: the longest way through them, and what each group has to do between the
    earliest it can begin and the least that follows."""
    tails = _tails(tasks)
    heads: list[float] = []
    for one in tasks:
        heads.append(max((heads[j] + tasks[j].seconds + way for j, way in one.after), default=0.0))
    found = max((head + tail for head, tail in zip(heads, tails, strict=True)), default=0.0)
    for group in sorted({one.group for one in tasks}):
        mine = [i for i, one in enumerate(tasks) if one.group == group]
        work = sum(tasks[i].seconds for i in mine)
        ends = min(tails[i] - tasks[i].seconds for i in mine)
        found = max(found, min(heads[i] for i in mine) + work + ends)
    return found


def _tails(tasks: Sequence[Task]) -> list[float]:
    """From the start of each task to the end, at least."""
    found = [one.seconds for one in tasks]
    for i in range(len(tasks) - 1, -1, -1):
        for j, way in tasks[i].after:
            found[j] = max(found[j], tasks[j].seconds + way + found[i])
    return found
