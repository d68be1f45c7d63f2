"""The Pareto front of step time against memory per device, and the best plans of different meshes: searches one after
the other, each of what the ones before left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from hpsearch.aim.narrow import Apart, Mesh, mesh_of
from hpsearch.cluster import Device
from hpsearch.errors import InfeasibleError, LegalityError
from hpsearch.estimate import memory
from hpsearch.space import Choice, Found, Space, best


@dataclass(frozen=True)
class Point:
    """The fastest layout within some bytes."""

    choice: Choice
    peak_bytes: float
    room_bytes: int
    """What it was searched within: between its peak and this no layout is faster."""
    bound_s: float
    """No layout within `room_bytes` takes less."""


@dataclass(frozen=True)
class Front:
    """Points that no other beats in both, the fastest first."""

    points: tuple[Point, ...]
    step: float
    """A point is followed by the best within its bytes less this share."""
    nothing_within_bytes: int | None
    """Proven: no layout has less than this; None: more points were not asked for."""


def front(space: Space, *, step: float = 0.0, most: int | None = None, gap: float = 0.0) -> Front:
    """The front from the devices' memory down: step 0 gives every point, 0.05 one for every twentieth less memory.

    Raises as `best` where nothing fits.
    """
    found: list[Point] = []
    room, least = int(space.cluster.device.memory_bytes), None
    while most is None or len(found) < most:
        inside = replace(space, cluster=replace(space.cluster, device=_with_room(space, room)))
        try:
            answer = best(inside, gap=gap)
        except InfeasibleError:
            if not found:
                raise
            least = room
            break
        point = _leanest(inside, answer, room)
        if found and point.choice.step_s <= found[-1].choice.step_s:
            found.pop()  # as fast with less memory
        found.append(point)
        room = min(int(point.peak_bytes * (1 - step)), ceil(point.peak_bytes) - 1)
    return Front(tuple(found), step, least)


def _with_room(space: Space, room: int) -> Device:
    return replace(space.cluster.device, memory_bytes=room)


def _leanest(space: Space, answer: Found, room: int) -> Point:
    """Of the layouts as fast as the best, the one with the least memory."""
    tied = [one for one in answer.tried if one.step_s <= answer.best.step_s]
    peaks = [memory(space.shape, one.layout).peak_bytes for one in tied]
    peak, choice = min(zip(peaks, tied, strict=True), key=lambda pair: pair[0])
    return Point(choice, peak, room, answer.certificate.bound_s)


@dataclass(frozen=True)
class Ranked:
    """The best layout of a mesh, and the bound of all meshes that are not ranked before it."""

    choice: Choice
    bound_s: float


def ranked(space: Space, count: int, *, gap: float = 0.0) -> tuple[Ranked, ...]:
    """The best layouts of up to `count` different meshes, the fastest first; each is the best of all meshes that those
    before it leave."""
    found: list[Ranked] = []
    gone: set[Mesh] = set()
    while len(found) < count:
        try:
            answer = best(Apart.of(space, without=frozenset(gone)), gap=gap)
        except (InfeasibleError, LegalityError):
            if not found:
                raise
            break
        found.append(Ranked(answer.best, answer.certificate.bound_s))
        gone.add(mesh_of(answer.best.layout))
    return tuple(found)
