"""From a model's facts and a cluster to the fastest plan, with its bound.

Plans on one mesh come first (`one_mesh`), then pipelines that could be faster than the best of them (`pipelines`), all
by one judge: the integer program on prices of the program that will run, and the schedule on its stages' seconds.
Sequences are cut where they are long, where rows are fewer than devices, or where nothing fits without; what waits on
the host is looked at where nothing fits otherwise. The plan says which of these its bound covers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from hpsearch.cluster import Cluster
from hpsearch.cost import check_batch, optimizer_states, recipe_of
from hpsearch.errors import ClusterError, InfeasibleError, LegalityError
from hpsearch.graph import ITEM_BYTES, ModelGraph, with_capacity
from hpsearch.layout import Mesh
from hpsearch.plan import Plan
from hpsearch.search import pipelines
from hpsearch.search.assemble import Certificate, plan_of
from hpsearch.search.candidates import SPACE, meshes, refused_meshes
from hpsearch.search.fix import OFFLOADED, Fix, parse_fix
from hpsearch.search.infeasible import why_infeasible
from hpsearch.search.memory import usable_bytes
from hpsearch.search.one_mesh import OneMesh, Progress
from hpsearch.search.pipeline import PipelineSearch
from hpsearch.search.spaces import Spaces
from hpsearch.search.tally import Tally
from hpsearch.strategy import sequence_lengths

LONG = 32_768
"""Positions from which on sequences are cut, whether or not they fit without."""


def search(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    global_batch: int,
    fix: Mapping[str, object] | None = None,
    optimizer: str = "adamw",
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan for `graph` on all devices of `cluster`, with its bound.

    `global_batch`: rows of one optimizer step. `fix`: pins (see search/fix.py). `time_limit_s`: stop then with the best
    plan so far and its honest gap.
    Raises LegalityError (a pin or batch that cannot be), InfeasibleError (nothing fits; says what would).
    """
    if cluster.groups:
        names = ", ".join(group.name for group in cluster.groups)
        raise ClusterError(
            f"cluster {cluster.name}", f"expected devices that are all alike, but it has groups of nodes: {names}",
            "`hpsearch search` puts stages on unlike nodes; here, state the weakest of them as [device].",
        )  # fmt: skip
    optimizer_states(optimizer)
    pins = parse_fix(fix)
    graph = with_capacity(graph, pins.capacity)
    deadline_s = time.monotonic() + time_limit_s if time_limit_s is not None else float("inf")
    if pins.pp > 1:
        return PipelineSearch(graph, cluster, global_batch, optimizer, pins, deadline_s, progress).run()
    return _Search(graph, cluster, global_batch, optimizer, pins, deadline_s, progress).run()


@dataclass
class _Search:
    """State of one search; lives for one call."""

    model: ModelGraph
    cluster: Cluster
    global_batch: int
    optimizer: str
    pins: Fix
    deadline_s: float
    progress: Progress | None
    tally: Tally = field(default_factory=Tally)
    spaces: Spaces = field(init=False)
    bound_s: float = float("inf")
    """Over all that was looked at."""
    looked_at: list[str] = field(default_factory=list)
    """In words, for the certificate."""
    beside: list[str] = field(default_factory=list)
    """What of it is not one mesh with all on the device, shorter, for the error."""

    def __post_init__(self) -> None:
        self.spaces = Spaces(self.model)

    def run(self) -> Plan:
        tally, pins = self.tally, self.pins
        tally.refused += refused_meshes(self.model, self.cluster.devices, self.global_batch, pins)
        self.look_at(pins)
        self.looked_at.append(SPACE)
        if self.has_pipelines:
            self.looked_at.append(pipelines.SPACE)
            self.beside.append("pipelines")
        cut = self.with_cut_sequences()
        if cut and (self.is_long or tally.best is None):
            for one in cut:
                self.look_at_variant(one)
            degrees = ", ".join(str(one.degrees["cp"]) for one in cut)
            self.looked_at.append(f"the same with sequences cut over cp of {degrees}")
            self.beside.append(f"sequences cut over cp of {degrees}")
        if tally.best is None and pins.offload is None:
            self.look_at_offloaded([pins, *cut])
        if tally.best is None:
            raise self.why_none()
        counts = min(self.bound_s, tally.best_s), tally.considered, tally.solved, tally.pruned
        certificate = Certificate(*counts, tuple(tally.refused), tuple(tally.lost), "; ".join(self.looked_at))
        return plan_of(self.model, self.cluster, tally.best, certificate, pins)

    @property
    def has_pipelines(self) -> bool:
        return "pp" not in self.pins.text and self.cluster.devices > 1

    @property
    def is_long(self) -> bool:
        """Whether cut sequences may pay where all fits without."""
        longest = max(sequence_lengths(self.model), default=0)
        return longest >= LONG or self.global_batch < self.cluster.devices

    def look_at(self, fix: Fix) -> None:
        """Plans on one mesh and, where none is pinned, pipelines."""
        job = self.model, self.cluster, self.global_batch, self.optimizer, fix, self.deadline_s, self.tally, self.spaces
        self.bound_s = min(self.bound_s, OneMesh(*job, self.progress).run())
        if self.has_pipelines and self.has_room(fix):
            self.bound_s = min(self.bound_s, pipelines.Pipelines(*job, self.progress).run())

    def with_cut_sequences(self) -> list[Fix]:
        """The pins with each degree of cp that devices and sequences have; none where cp is pinned, or a capacity,
        which is counted in whole sequences."""
        longest, devices = max(sequence_lengths(self.model), default=0), self.cluster.devices
        if "cp" in self.pins.degrees or not longest or self.pins.capacity:
            return []
        degrees = [n for n in range(2, devices + 1) if devices % n == 0 and longest % n == 0]
        return [replace(self.pins, degrees=self.pins.degrees | {"cp": n}) for n in degrees]

    def look_at_variant(self, fix: Fix) -> None:
        """The same with cp or offload; positions that cannot be apart, or pins that leave no ranks, are refusals."""
        if not self.has_room(fix):
            return
        try:
            self.look_at(fix)
        except LegalityError as error:
            self.tally.refuse(f"cp={fix.degrees.get('cp', 1)} offload={fix.offload or 'none'}", error.problem)

    def has_room(self, fix: Fix) -> bool:
        """Whether parameters and optimizer states, each stored once, would fit in all devices together."""
        states = 0 if fix.offloads("optimizer") else optimizer_states(self.optimizer)
        each = ITEM_BYTES[recipe_of(self.model.recipe).master]
        total = sum(prod(p.shape) * each * (1 + states * p.trainable) for p in self.model.params.values())
        return total <= usable_bytes(self.cluster) * self.cluster.devices

    def look_at_offloaded(self, fixes: list[Fix]) -> None:
        """What waits in host memory: the least that lets something fit."""
        if self.cluster.device.host_bytes_per_s is None:
            self.tally.refuse("offload", f"{self.cluster.name} states no bandwidth to host memory")
            return
        for away in OFFLOADED[1:]:
            for fix in fixes:
                self.look_at_variant(replace(fix, offload=away))
            words = f"{away.replace('+', ' and ')} in host memory"
            self.looked_at.append(f"the same with {words}")
            self.beside.append(words)
            if self.tally.best is not None:
                return

    def why_none(self) -> InfeasibleError:
        """The error to raise when nothing fits; LegalityError if no mesh takes the pins, or none the batch."""
        tally = self.tally
        if not tally.considered:
            self.check_legal()
        return why_infeasible(
            self.model,
            self.cluster,
            tally.tightest,
            self.pins,
            tally.refused,
            self.beside,
            self.fits_without_pins,
        )

    def fits_without_pins(self) -> bool:
        """Whether anything fits when nothing is pinned."""
        try:
            search(self.model, self.cluster, global_batch=self.global_batch, optimizer=self.optimizer)
        except InfeasibleError:
            return False
        return True

    def check_legal(self) -> None:
        every = (Mesh.of(**degrees) for degrees in meshes(self.model, self.cluster.devices, self.pins))
        smallest = min(every, key=lambda mesh: mesh.num_data_ranks, default=None)
        if smallest is None:
            pins = " ".join(f"{k}={v}" for k, v in self.pins.text.items())
            raise LegalityError(
                f"{self.cluster.devices} devices",
                f"expected a mesh of at most two axes with {pins or 'legal degrees'}, but there is none",
                "Loosen --fix, or choose another number of devices.",
            )
        check_batch(self.global_batch, self.pins.micro_batches or 1, smallest)
