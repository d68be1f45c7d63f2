"""Several models in one step on one cluster: which devices each has, alone or shared, and how it is laid out there.

    1. every split of the devices is bounded: tasks of the modules take their floors            (arithmetic)
    2. the most promising split has its modules searched, on the devices it gives them           (as one model each)
    3. of ways that fit together, the one whose tasks end first is the split's step               (timeline)

until no bound is below the best step. Modules on the same devices take turns: seconds add up, and so do bytes that
stay. Modules on different devices run at the same time as far as what they wait for allows; where activations pass, the
batch may be cut into parts, so that one module works on a part while the next has the part before. A module that gets
gradients back runs its forward twice: in between only its results are kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from hpsearch.aim.module import Job, Module
from hpsearch.aim.placed import NEVER, ROOMS, Placed, Places, Seconds
from hpsearch.aim.tasks import Ran, Task, least_s, ran
from hpsearch.cluster import Cluster
from hpsearch.errors import InfeasibleError, LegalityError

Split = tuple[tuple[int, tuple[str, ...]], ...]
"""Of each group: devices, and the modules on them."""


@dataclass(frozen=True)
class Together:
    """The answer: a split, with each module's layout on it."""

    split: Split
    chunks: int
    """Parts of the batch."""
    placed: tuple[Placed, ...]
    step_s: float
    tasks: tuple[Ran, ...]
    bound_s: float
    """No split that was considered takes less."""
    considered: int
    """Splits, with numbers of parts."""
    solved: int
    searched: int
    """Modules on devices."""
    sizes: tuple[int, ...]
    """Devices that a group may have."""
    fixed: tuple[tuple[str, Split, float], ...]
    """Splits by a rule, each module on devices of its own, and their steps at the best number of parts."""

    @property
    def gap(self) -> float:
        return 1 - self.bound_s / self.step_s


def together(job: Job, clusters: dict[int, Cluster], devices: int, *, gap: float = 0.01) -> Together:
    """The best split of `devices` over the modules of `job`. `clusters`: of every size that a group may have.

    `gap`: of the answer; modules are searched ten times as closely. InfeasibleError: no split has room for all.
    """
    places = Places(job, clusters, gap / 10)
    sizes = tuple(sorted(clusters))
    heap = [
        (_bound(places, split, chunks), False, split, chunks)
        for split in splits([one.name for one in job.modules], sizes, devices) for chunks in job.chunks
        if chunks == 1 or len(split) > 1
    ]  # fmt: skip
    heapq.heapify(heap)
    considered, solved, left = len(heap), 0, NEVER
    best: tuple[float, Split, int, tuple[Placed, ...]] | None = None
    while heap and (best is None or heap[0][0] < best[0] * (1 - gap)):
        bound, is_searched, split, chunks = heapq.heappop(heap)
        if not is_searched:
            _search(places, split, chunks)
            if (proven := _bound(places, split, chunks)) < NEVER:
                heapq.heappush(heap, (max(bound, proven), True, split, chunks))
            continue
        solved, left = solved + 1, min(left, bound)
        found = solve(places, split, chunks)
        if found is not None and (best is None or found[0] < best[0]):
            best = found[0], split, chunks, found[1]
    if best is None:
        raise _none_fits(job, sizes, devices)
    step_s, split, chunks, placed = best
    done = ran(_tasks(job, split, chunks, {one.module: one.seconds for one in placed}, _way(places, split)))
    least = min([step_s, left, *(heap[0][:1] if heap else ())])
    searched, fixed = places.searched, tuple(_fixed(places, sizes, devices))
    return Together(split, chunks, placed, step_s, done, least, considered, solved, searched, sizes, fixed)


def _fixed(places: Places, sizes: tuple[int, ...], devices: int) -> Iterator[tuple[str, Split, float]]:
    """Equal groups, and groups by parameters and by work; those in which all fit."""
    modules = places.job.modules
    rules = {
        "equal": [1.0 for _ in modules], "by parameters": [float(one.shape.total_params) for one in modules],
        "by work": [one.work for one in modules],
    }  # fmt: skip
    for rule, weights in rules.items():
        counts = shared(weights, sizes, devices)
        if counts is None:
            continue
        split = tuple((count, (one.name,)) for count, one in zip(counts, modules, strict=True))
        found = [made[0] for chunks in places.job.chunks if (made := solve(places, split, chunks)) is not None]
        if found:
            yield rule, split, min(found)


def shared(weights: list[float], sizes: tuple[int, ...], devices: int) -> list[int] | None:
    """Devices in the ratio of the weights, in whole units of the smallest size, at least one each; None: too few."""
    unit, left = sizes[0], devices // sizes[0]
    if left < len(weights):
        return None
    found = [1] * len(weights)
    for _ in range(left - len(weights)):
        wanted = [weight / (count * sum(weights)) for weight, count in zip(weights, found, strict=True)]
        found[wanted.index(max(wanted))] += 1
    return [unit * count for count in found] if all(unit * count in sizes for count in found) else None


def splits(names: list[str], sizes: tuple[int, ...], devices: int) -> Iterator[Split]:
    """Every way to put modules in groups and to give each group a size, all at most `devices`; groups in the order of
    their first modules."""
    for groups in _partitions(names):
        for counts in _counts(len(groups), sizes, devices):
            yield tuple(zip(counts, groups, strict=True))


def _counts(groups: int, sizes: tuple[int, ...], devices: int) -> Iterator[tuple[int, ...]]:
    """Sizes of so many groups, of no more devices together."""
    if not groups:
        yield ()
        return
    for size in sizes:
        if size + (groups - 1) * sizes[0] <= devices:
            yield from ((size, *rest) for rest in _counts(groups - 1, sizes, devices - size))


def _partitions(names: list[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    if not names:
        yield ()
        return
    *before, last = names
    for groups in _partitions(before):
        for i in range(len(groups)):
            yield (*groups[:i], (*groups[i], last), *groups[i + 1 :])
        yield (*groups, (last,))


def _search(places: Places, split: Split, chunks: int) -> None:
    for count, names in split:
        for name in names:
            places.place(places.job.of(name), count, chunks)


def _bound(places: Places, split: Split, chunks: int) -> float:
    job = places.job
    seconds = {name: places.bound(job.of(name), count, chunks) for count, names in split for name in names}
    if any(NEVER in (one.forward_s, one.both_s) for one in seconds.values()):
        return NEVER
    return least_s(_tasks(job, split, chunks, seconds, _way(places, split)))


def solve(places: Places, split: Split, chunks: int) -> tuple[float, tuple[Placed, ...]] | None:
    """(seconds of the step, every module placed) with the quickest ways that fit together on each group."""
    chosen: list[list[tuple[Placed, ...]]] = []
    for count, names in split:
        ways = _fitting(places, [places.job.of(name) for name in names], count, chunks)
        if not ways:
            return None
        chosen.append(ways)
    found: tuple[float, tuple[Placed, ...]] | None = None
    for one in product(*chosen):
        placed = tuple(way for group in one for way in group)
        seconds = {way.module: way.seconds for way in placed}
        ends = ran(_tasks(places.job, split, chunks, seconds, _way(places, split)))
        step_s = max(task.end_s for task in ends)
        if found is None or step_s < found[0]:
            found = step_s, placed
    return found


def _fitting(places: Places, modules: list[Module], count: int, chunks: int) -> list[tuple[Placed, ...]]:
    """Ways of modules on the same devices that fit together: while one runs, the others stay. Where some do not fit
    with all the memory, those of less memory too."""
    room = places.clusters[count].device.memory_bytes
    ways = [list(places.place(one, count, chunks)) for one in modules]
    if not all(fits(some, room) for some in product(*ways)):
        for one, mine in zip(modules, ways, strict=True):
            tried = [way for part in range(ROOMS - 1, 0, -1) for way in places.place(one, count, chunks, part)]
            mine += list({way.layout: way for way in tried if way not in mine}.values())
    some = [one for one in product(*ways) if fits(one, room)]
    return sorted(some, key=lambda one: sum(map(_total_s, one)))[:MOST_WAYS]


MOST_WAYS = 64
"""Of modules on the same devices that are simulated, those that take turns soonest first."""


def _total_s(way: Placed) -> float:
    return way.seconds.forward_s + way.seconds.both_s + way.seconds.once_s


def fits(ways: tuple[Placed, ...], room_bytes: float) -> bool:
    stays = sum(way.resident_bytes for way in ways)
    return all(way.peak_bytes + stays - way.resident_bytes <= room_bytes for way in ways)


Way = dict[tuple[str, str], float]
"""Seconds of a byte from one module to another; 0 on the same devices."""


def _way(places: Places, split: Split) -> Way:
    """Every device of the smaller group sends or receives its share, over the outermost links of the larger one."""
    group = {name: i for i, (_, names) in enumerate(split) for name in names}
    most = places.clusters[max(places.clusters)]
    tier, found = most.tiers[-1] if len(split) > 1 else most.tiers[0], {}
    for one in places.job.modules:
        for name in one.takes:
            few = min(split[group[name]][0], split[group[one.name]][0])
            found[name, one.name] = 0.0 if group[name] == group[one.name] else 1.0 / (tier.rate * few)
    return found


Key = tuple[str, str, int]
"""Module, phase, part of the batch."""


def _tasks(job: Job, split: Split, chunks: int, seconds: dict[str, Seconds], way: Way) -> list[Task]:
    """The tasks of a step, each behind those it waits for."""
    group = {name: i for i, (_, names) in enumerate(split) for name in names}
    waits = _waits(job, chunks, way)
    place = {key: i for i, key in enumerate(waits)}
    found = []
    for (name, phase, part), after in waits.items():
        module, own, parts = job.of(name), seconds[name], _parts(job, job.of(name), chunks)
        once = own.once_s if phase == BOTH and part == parts - 1 else 0.0
        length = module.runs * ((own.forward_s if phase == FORWARD else own.both_s) + once)
        label = f"{name} {phase}" + (f" {part}" if parts > 1 else "")
        found.append(Task(label, group[name], length, tuple((place[key], one) for key, one in after.items())))
    return found


def _waits(job: Job, chunks: int, way: Way) -> dict[Key, dict[Key, float]]:
    """What each task waits for, and the seconds from there; in an order that keeps to it."""
    waits: dict[Key, dict[Key, float]] = {}
    for module in job.modules:
        for phase in ((FORWARD,) if _goes_first(job, module) else ()) + ((BOTH,) if module.trains else ()):
            for k in range(_parts(job, module, chunks)):
                after: dict[Key, float] = {(module.name, phase, k - 1): 0.0} if k else {}
                after |= {_last(job, job.of(name), chunks): 0.0 for name in module.after}
                for one in (job.of(name) for name in module.takes):
                    after[one.name, _first(job, one), k] = one.sent_bytes / chunks * way[one.name, module.name]
                if phase == BOTH:
                    for one in job.feeds(module):
                        after[one.name, BOTH, k] = module.sent_bytes / chunks * way[module.name, one.name]
                waits[module.name, phase, k] = after
    ordered: dict[Key, dict[Key, float]] = {}
    while len(ordered) < len(waits):
        ready = [key for key, after in waits.items() if key not in ordered and all(one in ordered for one in after)]
        if not ready:
            name = next(key[0] for key in waits if key not in ordered)
            raise LegalityError(
                f"module {name}", "expected to wait for what can end before it begins, but gradients it sends are "
                "waited for there", "Take the name out of after: what a module takes it waits for anyway.",
            )  # fmt: skip
        ordered |= {key: waits[key] for key in ready}
    return ordered


FORWARD, BOTH = "forward", "forward and backward"


def _goes_first(job: Job, module: Module) -> bool:
    """Whether its forward is a task of its own."""
    return not module.trains or bool(job.feeds(module))


def _first(job: Job, module: Module) -> str:
    """The task that has its results."""
    return FORWARD if _goes_first(job, module) else BOTH


def _last(job: Job, module: Module, chunks: int) -> Key:
    """Its last task of the step."""
    return module.name, BOTH if module.trains else FORWARD, _parts(job, module, chunks) - 1


def _parts(job: Job, module: Module, chunks: int) -> int:
    return chunks if job.is_chained(module) else 1


def _none_fits(job: Job, sizes: tuple[int, ...], devices: int) -> InfeasibleError:
    names = ", ".join(one.name for one in job.modules)
    return InfeasibleError(
        "job", f"expected room for {names} on {devices} devices in groups of {', '.join(map(str, sizes))}, but in no "
        "split all of them fit", "Use more devices, or smaller batches.",
    )  # fmt: skip
