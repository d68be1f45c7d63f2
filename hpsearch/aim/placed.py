"""A module laid out on some devices of its own: seconds of its parts, bytes, and bounds of both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hpsearch.aim.forward import best_forward, floors_s, forward_s
from hpsearch.aim.module import Job, Module
from hpsearch.aim.narrow import Apart, mesh_of
from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.errors import InfeasibleError, LegalityError
from hpsearch.estimate import ParallelLayout, price, rank_memory
from hpsearch.estimate.memory import CONTEXT_BYTES, RESERVE
from hpsearch.estimate.pipeline import run_s
from hpsearch.space import Choice, Space, best
from hpsearch.space.prices import Prices

NEVER = float("inf")
MESHES = 3
"""Others than the best that a module which runs a forward of its own is looked for on."""
ROOMS = 8
"""Parts of a device's memory that modules on the same devices are offered."""


@dataclass(frozen=True)
class Seconds:
    """Of one part of the batch; what comes once a step, once."""

    forward_s: float
    both_s: float
    """Forward and backward."""
    once_s: float


@dataclass(frozen=True)
class Placed:
    """One way to run a module on some devices."""

    module: str
    layout: ParallelLayout
    seconds: Seconds
    peak_bytes: float
    resident_bytes: float
    """What stays on a device while another module runs there."""


@dataclass
class Places:
    """Ways to run the modules of a job, looked for when they are asked for, and once."""

    job: Job
    clusters: dict[int, Cluster]
    gap: float = 0.0
    searched: int = 0
    _floors: dict[tuple[str, int], Seconds] = field(default_factory=dict)
    _bounds: dict[tuple[str, int, int], Seconds] = field(default_factory=dict)
    _found: dict[tuple[str, int, int, int], tuple[Placed, ...]] = field(default_factory=dict)

    def space(self, module: Module, devices: int, chunks: int) -> Space:
        """Layouts of one part of the module's batch."""
        chunks = chunks if self.job.is_chained(module) else 1
        base = replace(module.base, global_batch=module.base.global_batch // chunks)
        return Space(module.shape, self.clusters[devices], base, module.pins)

    def floor(self, module: Module, devices: int, chunks: int) -> Seconds:
        """No way takes less, on the devices alone; found without a search. A part of the batch has no inside that the
        whole has not, so it takes its share of the whole's floor at least."""
        if (key := (module.name, devices)) not in self._floors:
            space = self.space(module, devices, 1)
            once = efficiency_of(space.cluster.device.name, space.cluster.efficiency).step_s if module.trains else 0.0
            self._floors[key] = Seconds(*floors_s(Prices(space)), once)
        whole, parts = self._floors[key], chunks if self.job.is_chained(module) else 1
        return Seconds(whole.forward_s / parts, whole.both_s / parts if module.trains else 0.0, whole.once_s)

    def bound(self, module: Module, devices: int, chunks: int) -> Seconds:
        """The same, or what a search has proven."""
        return self._bounds.get((module.name, devices, chunks)) or self.floor(module, devices, chunks)

    def place(self, module: Module, devices: int, chunks: int, room: int = ROOMS) -> tuple[Placed, ...]:
        """The quickest way in `room` of ROOMS parts of a device's memory; several where a forward of its own may be
        worth a slower step. None where nothing fits, or nothing is legal."""
        key = module.name, devices, chunks, room
        if key not in self._found:
            space = self.space(module, devices, chunks)
            device = replace(space.cluster.device, memory_bytes=space.cluster.device.memory_bytes * room // ROOMS)
            space = replace(space, cluster=replace(space.cluster, device=device))
            self.searched += 1
            try:
                found, proven = self._trained(module, space) if module.trains else _only_forward(module, space)
            except (InfeasibleError, LegalityError):
                found, proven = (), Seconds(NEVER, NEVER, 0.0)
            self._found[key] = found
            if room == ROOMS:
                self._bounds[key[:3]] = self._tighter(module, devices, chunks, proven)
        return self._found[key]

    def _tighter(self, module: Module, devices: int, chunks: int, proven: Seconds) -> Seconds:
        """A search bounds the part with what comes once: what it has over the floor of other parts counts there."""
        floor = self.floor(module, devices, chunks)
        both = NEVER if proven.both_s == NEVER else floor.both_s
        once = max(floor.once_s, proven.both_s + proven.once_s - floor.both_s) if both < NEVER else 0.0
        return Seconds(max(floor.forward_s, proven.forward_s), both, once)

    def _trained(self, module: Module, space: Space) -> tuple[tuple[Placed, ...], Seconds]:
        once = efficiency_of(space.cluster.device.name, space.cluster.efficiency).step_s
        found = best(space, gap=self.gap)
        choices, proven = [found.best], Seconds(0.0, found.certificate.bound_s - once, once)
        if not self.job.feeds(module):
            return (_timed(module, space, found.best),), proven
        gone = frozenset({mesh_of(found.best.layout)})
        choices = list(found.tried)
        for _ in range(MESHES):
            try:
                other = best(Apart.of(space, without=gone), gap=self.gap)
            except (InfeasibleError, LegalityError):
                break
            choices += other.tried
            gone |= {mesh_of(other.best.layout)}
        return _not_dominated([_timed(module, space, choice) for choice in choices]), proven


def _not_dominated(ways: list[Placed]) -> tuple[Placed, ...]:
    """Those that no other is as quick as in forward and in forward with backward, the quickest steps first."""
    found: list[Placed] = []
    for way in sorted(ways, key=lambda one: (one.seconds.both_s + one.seconds.once_s, one.seconds.forward_s)):
        if not found or way.seconds.forward_s < found[-1].seconds.forward_s:
            found.append(way)
    return tuple(found)


def _timed(module: Module, space: Space, choice: Choice) -> Placed:
    layout, cluster = choice.layout, space.cluster
    rates = efficiency_of(cluster.device.name, cluster.efficiency)
    priced = price(space.shape, layout, cluster)
    parts = priced.split_seconds(rates)
    if layout.pp == 1:
        pipe = layout.micro_batches * sum(float(part.sum()) for part in parts)
    else:
        f, i, w = (part.tolist() for part in parts)
        hop_s = priced.hop_s * rates.links
        pipe = run_s(layout.schedule_kind, (f, i, w), layout.pp, layout.micro_batches, hop_s)
    seconds = Seconds(forward_s(priced, rates), pipe, choice.step_s - pipe)
    ranks = [rank_memory(space.shape, layout, rank) for rank in range(layout.pp)]
    context = max(dict(one.parts)["context"] for one in ranks) - CONTEXT_BYTES
    stays = max(one.persistent_bytes for one in ranks) * (1 + RESERVE) + context
    return Placed(module.name, layout, seconds, max(one.peak_bytes for one in ranks), stays + _kept(module, space))


def _only_forward(module: Module, space: Space) -> tuple[tuple[Placed, ...], Seconds]:
    found = best_forward(space)
    seconds = Seconds(found.seconds, 0.0, 0.0)
    stays = found.resident_bytes + _kept(module, space)
    return (Placed(module.name, found.layout, seconds, found.peak_bytes, stays),), seconds


def _kept(module: Module, space: Space) -> float:
    """Results on a device, of one part of the batch."""
    return 2.0 * space.global_batch * space.base.seq_len * module.shape.hidden / space.devices
