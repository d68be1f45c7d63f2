"""`Cluster`: devices on tiers of links, with the price in seconds of a collective, a matmul, a kernel.

Ranks fill inner tiers first: ranks 0..7 are the first node, and so on. No torch; frozen; prints and compares.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hpsearch.cluster.curve import COLLECTIVES, Curve, Floats
from hpsearch.cluster.device import Device
from hpsearch.cluster.dispatch import Routing, dispatch_ways
from hpsearch.cluster.efficiency import OwnNumber
from hpsearch.cluster.exchange import Exchange, choose, exchanges
from hpsearch.cluster.find import find
from hpsearch.cluster.group import Group, check_groups, weakest_device
from hpsearch.cluster.read import Fact, read
from hpsearch.cluster.route import Links, Price, Way, cheapest, ways
from hpsearch.cluster.text import describe
from hpsearch.cluster.tier import GroupShape, Tier, group_shape, node_size, packed
from hpsearch.errors import ClusterError

_PLAIN: tuple[tuple[str, Any], ...] = (
    ("wiring", "switch"), ("like", ""), ("protocols", ()), ("switches", None), ("switch_tree", None), ("stream", None),
    ("arrival_s", 0.0), ("arrivals", ()),
)  # fmt: skip
"""Fields that a digest passes over while they say nothing, so that older digests stay as they were."""
_BESIDE = ("power_w", "price_a_second", "currency")
"""Fields that no second depends on."""


@dataclass(frozen=True)
class Cluster:
    name: str
    devices: int
    device: Device
    tiers: tuple[Tier, ...]
    """From the innermost to the outermost; the last holds every device."""
    summary: str = field(default="", compare=False)
    facts: tuple[Fact, ...] = field(default=(), compare=False, repr=False)
    efficiency: tuple[OwnNumber, ...] = ()
    """Fitted to runs on this cluster (`hpsearch calibrate`), in place of the device generation's."""

    groups: tuple[Group, ...] = ()
    """Nodes that have less than `device`, in the order of ranks; (): all are alike."""

    def __post_init__(self) -> None:
        check_devices(self.name, self.devices, self.tiers)
        check_groups(self.name, self.devices, node_size(self.tiers), self.groups)

    @staticmethod
    def load(name: str | Path, *, devices: int) -> Cluster:
        """The cluster that ships under `name`, or is described at a path, or was measured here as `local`.

        ClusterError: unknown name (the nearest is offered), a file that cannot be believed (with its line), a device
        count that does not fit, or `local` before it was measured.
        """
        path = find(name, devices)
        found = read(path.read_text(encoding="utf-8"), str(path))
        check_devices(found.name, devices, found.tiers)
        return Cluster(
            found.name, devices, found.device, packed(found.tiers, devices), found.summary, found.facts,
            found.efficiency, found.groups,
        )  # fmt: skip

    def among(self, names: tuple[str, ...]) -> Cluster:
        """The cluster as work meets it that waits for all of these groups: as if every device were the weakest of
        them. () is the whole cluster without groups."""
        if not self.groups:
            return self
        if names not in self._among:
            device = weakest_device(self.device, [group for group in self.groups if group.name in names])
            self._among[names] = replace(self, device=device, groups=())
        return self._among[names]

    def collective(self, kind: str, nbytes: float, size: int, stride: int) -> Price:
        """The price of one call of `kind` on groups of `size` ranks `stride` apart, all groups at once.

        `nbytes` by the convention of `hpsearch.layout.redistribute`: the large tensor of all_gather and
        reduce_scatter, the tensor of all_reduce, the local tensor of all_to_all, on one rank. `shift` is no
        collective of a library: every rank sends to the next one of its group.
        """
        if size == 1:
            return Price(0.0, "exact", "one rank")
        if kind == "shift":
            tier = self.tier_of(size, stride)
            seconds = tier.latency_s + self.device.collective_launch_s + nbytes / tier.rate
            return Price(seconds, "modelled", f"shift {tier.name} x{size}")
        key = (self._kind(kind), float(nbytes), size, stride)
        if key not in self._prices:
            self._prices[key] = cheapest(ways(self._links, kind, self.shape(size, stride), np.array([float(nbytes)])))
        return self._prices[key]

    def ways(self, kind: str, nbytes: float, size: int, stride: int) -> tuple[Price, ...]:
        """Every legal way to run one call of `kind`, priced, the cheapest first; `collective` is the first of them."""
        if size == 1:
            return (Price(0.0, "exact", "one rank"),)
        found = ways(self._links, self._kind(kind), self.shape(size, stride), np.array([float(nbytes)]))
        return _ranked(found)

    def dispatch(self, routing: Routing, size: int, stride: int) -> tuple[Price, ...]:
        """Every way to send tokens to experts spread over groups of `size` ranks `stride` apart, the cheapest first.

        All groups at once, experts drawn evenly. Combining costs the same with the token bytes of the way back.
        """
        if size == 1:
            return (Price(0.0, "exact", "one rank"),)
        return _ranked(dispatch_ways(self._links, routing, self.shape(size, stride)))

    def exchange(self, routing: Routing, size: int, stride: int, form: str | None = None) -> Exchange:
        """The way an emitted program moves tokens over groups of `size` ranks `stride` apart: the cheapest, or `form`.

        LegalityError: a form that no program has, or that never pays; see `hpsearch/cluster/exchange.py`.
        """
        return choose(exchanges(self._links, routing, self.shape(size, stride)), form)

    def collective_s(self, kind: str, nbytes: ArrayLike, size: int, stride: int) -> Floats:
        """Seconds of `collective` for every size in an array; same shape."""
        asked = np.asarray(nbytes, dtype=np.float64)
        if size == 1:
            return np.zeros_like(asked)
        found = ways(self._links, self._kind(kind), self.shape(size, stride), asked.reshape(-1))
        return np.asarray(np.min([seconds for seconds, _, _ in found], axis=0)).reshape(asked.shape)

    def tier_of(self, size: int, stride: int) -> Tier:
        """The outermost tier that groups of `size` ranks, `stride` apart, have to cross."""
        return self.tiers[0] if size == 1 else self.tiers[self.shape(size, stride).outermost]

    def shape(self, size: int, stride: int) -> GroupShape:
        """How such groups lie on the tiers."""
        if size < 1 or stride < 1 or size * stride > self.devices:
            raise ClusterError(
                f"group of {size} ranks {stride} apart",
                f"expected to fit in {self.devices} devices of {self.name}, but it needs {size * stride}",
                "Use a mesh whose degrees multiply to the device count.",
            )
        key = (size, stride)
        if key not in self._shapes:
            self._shapes[key] = group_shape(self._tier_sizes, self.devices, size, stride)
        return self._shapes[key]

    def matmul_s(self, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str, batch: ArrayLike = 1) -> Floats:
        """Seconds of `batch` products [m, k] @ [k, n] in one kernel; see `Device.matmul_s`."""
        return self.device.matmul_s(m, n, k, dtype, batch)

    def attention_s(self, flops: ArrayLike, nbytes: ArrayLike, dtype: str) -> Floats:
        """Seconds of one fused attention kernel."""
        return self.device.attention_s(flops, nbytes, dtype)

    def memory_bound_s(self, nbytes: ArrayLike) -> Floats:
        """Seconds of one kernel that moves `nbytes`, its launch included."""
        return self.device.memory_bound_s(nbytes)

    @property
    def launch_s(self) -> float:
        """Fixed seconds of one kernel; contained in every kernel price above."""
        return self.device.launch_s

    @cached_property
    def digest(self) -> str:
        """sha256 over everything a price can depend on, device count included; not over wording and sources."""
        content = {"name": self.name, "devices": self.devices, "device": _told(self.device)}
        content["tiers"] = [_told(tier) for tier in self.tiers]
        if self.efficiency:
            content["efficiency"] = [asdict(number) for number in self.efficiency]
        if self.groups:
            content["groups"] = [asdict(group) for group in self.groups]
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def __str__(self) -> str:
        return describe(self.name, self.devices, self.summary, self.device, self.groups, self.tiers, self.facts)

    def _kind(self, kind: str) -> str:
        if kind not in COLLECTIVES:
            raise ClusterError(f"collective {kind!r}", f"expected one of {', '.join(COLLECTIVES)}", "")
        return kind

    @property
    def _tier_sizes(self) -> tuple[int, ...]:
        return tuple(tier.size for tier in self.tiers)

    @cached_property
    def _prices(self) -> dict[tuple[str, float, int, int], Price]:
        return {}

    @cached_property
    def _among(self) -> dict[tuple[str, ...], Cluster]:
        return {}

    @cached_property
    def _shapes(self) -> dict[tuple[int, int], GroupShape]:
        return {}

    @cached_property
    def _links(self) -> Links:
        """Curves are placed on a full fabric: their shape does not depend on how many devices are in use."""
        sizes = self._tier_sizes
        placed = [[(curve, curve_shape(sizes, curve)) for curve in tier.curves] for tier in self.tiers]
        return Links(self.tiers, self.device.collective_launch_s, placed)


def _ranked(found: list[Way]) -> tuple[Price, ...]:
    """Prices of ways to do one thing, the cheapest first."""
    return tuple(sorted((Price(float(s[0]), basis, how) for s, basis, how in found), key=lambda price: price.seconds))


def _told(part: Device | Tier) -> dict[str, Any]:
    """The fields of a part, those left out that say nothing."""
    return {k: v for k, v in asdict(part).items() if (k, v) not in _PLAIN and k not in _BESIDE}


def curve_shape(tier_sizes: tuple[int, ...], curve: Curve) -> GroupShape:
    """How the groups lay on the tiers when the curve was measured."""
    span = curve.size * curve.stride
    whole = next((size for size in tier_sizes if size % span == 0), span)
    return group_shape(tier_sizes, whole, curve.size, curve.stride)


def check_devices(name: str, devices: int, tiers: tuple[Tier, ...]) -> None:
    """ClusterError unless `devices` is positive, inside the fabric, and at most one node or whole nodes."""
    node, most = node_size(tiers), tiers[-1].size
    if devices < 1:
        raise ClusterError(f"cluster {name}", f"expected at least 1 device, but got {devices}", f"Ask for 1 to {most}.")
    if devices > most:
        raise ClusterError(
            f"cluster {name}", f"expected at most {most} devices in its {tiers[-1].name}, but got {devices}",
            f"Ask for {most} or fewer, or describe a larger cluster.",
        )  # fmt: skip
    if devices > node and devices % node:
        low, high = devices // node * node, -(-devices // node) * node
        near = f"{low} or {high}" if high <= most else f"{low}"
        raise ClusterError(
            f"cluster {name}", f"expected up to {node} devices (one node) or whole nodes of {node}, but got {devices}",
            f"The nearest counts are {near}.",
        )  # fmt: skip
