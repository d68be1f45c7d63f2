"""The cluster file, field by field (TOML). Every number has value, unit, kind and source; see `cost_models/`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = "hpsearch.cluster/1"

Count = Annotated[int, Field(strict=True, ge=1)]
Value = Annotated[float, Field(strict=True)]
Kind = Literal["measured", "published", "specification", "fitted"]
Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Number(_Strict):
    value: Value
    unit: str
    kind: Kind
    source: str
    """A URL, or a key of [sources]."""
    note: str = ""


class Numbers(_Strict):
    values: tuple[Value, ...]
    unit: str
    kind: Kind
    source: str
    note: str = ""


class CurveEntry(_Strict):
    """One measured collective; exactly one of time, busbw and algbw (nccl-tests' words)."""

    op: Op
    group: Annotated[int, Field(strict=True, ge=2)]
    stride: Count = 1
    """Ranks of a group stand this far apart; all groups were running at once."""
    nbytes: tuple[Count, ...]
    """By the convention of `hpsearch.layout.redistribute`."""
    time: Numbers | None = None
    busbw: Numbers | None = None
    algbw: Numbers | None = None


class ProtocolEntry(_Strict):
    """Rings and trees of a library between the domains of a tier; see `hpsearch.cluster.protocol`."""

    name: str
    start: Number
    ring_inner: Number
    ring_outer: Number
    tree_inner: Number
    tree_outer: Number
    ring_share: Number
    tree_share: Number
    channel: Number | None = None
    """Bandwidth that one ring or tree cannot exceed."""


class SwitchesEntry(_Strict):
    """All_reduce by the switches of one tier; see `hpsearch.cluster.protocol`."""

    start: Number
    share: Number
    members: Number


class SwitchTreeEntry(_Strict):
    """All_reduce by switches that add up inside a domain; see `hpsearch.cluster.protocol`."""

    start: Number
    outer: Number
    share: Number
    window: Number
    members: Number


class TierEntry(_Strict):
    name: str
    size: Number
    link: str
    bandwidth: Number
    """Of one device, one direction, while all devices of the domain send."""
    each: Numbers | None = None
    """The same of each device of an inner domain in rank order, where they differ (a shared NIC, another socket);
    `bandwidth` is then the least of them, because a collective waits for the slowest."""
    latency: Number
    efficiency: Number | None = None
    pipelining: Number | None = None
    wiring: Literal["switch", "full-mesh"] = "switch"
    """full-mesh: a link to each of the others, so that a group of n uses n - 1 of them; `bandwidth` is of all."""
    like: str = ""
    """An inner tier whose switches this one's ranks share: its curves hold for groups of this tier too."""
    protocols: tuple[ProtocolEntry, ...] = ()
    """What one call of a collective runs; without them the cheapest composition of the tiers is the price."""
    switches: SwitchesEntry | None = None
    switch_tree: SwitchTreeEntry | None = None
    collectives: tuple[CurveEntry, ...] = ()


class MatmulEntry(_Strict):
    dtype: str
    n: Count
    k: Count
    m: tuple[Count, ...]
    rate: Numbers


class StreamEntry(_Strict):
    """Memory-bound kernels by the bytes they read and write: caches make small ones faster than memory."""

    nbytes: tuple[Count, ...]
    time: Numbers
    """Launch included."""


class ArrivalEntry(_Strict):
    """What a collective of such groups costs beyond its own time where compute waits for it."""

    group: Annotated[int, Field(strict=True, ge=2)]
    stride: Count = 1
    time: Number


class DeviceEntry(_Strict):
    name: str
    memory: Number
    memory_bandwidth: Number
    memory_efficiency: Number
    matmul_efficiency: Number
    attention_efficiency: Number | None = None
    """Left out where nothing is known: attention is then refused a price."""
    launch: Number
    collective_launch: Number
    overlap_efficiency: Number
    arrival: Number | None = None
    """Of groups that are not among `arrivals`."""
    arrivals: tuple[ArrivalEntry, ...] = ()
    host_bandwidth: Number | None = None
    host_link: str = "pcie"
    """Kind of the link to host memory, by the names of a tier's."""
    power: Number | None = None
    """Thermal design power, for the energy of a step."""
    price: Number | None = None
    """Of one device for an hour, in a currency."""
    peak: dict[str, Number]
    matmul: tuple[MatmulEntry, ...] = ()
    stream: StreamEntry | None = None
    """Left out where only `memory_bandwidth` is known."""


class GroupEntry(_Strict):
    """Nodes that have less of something than [device], which describes the best of them."""

    name: str
    nodes: Count
    memory: Number | None = None
    memory_bandwidth: Number | None = None
    compute: Number | None = None
    """Rate of matmuls and attention over the device's: 0.7 of a node whose clocks are held down."""


class EfficiencyEntry(Number):
    """One number of `hpsearch.cluster.efficiency.Efficiency`, fitted to runs on this cluster."""

    error: Value = 0.0
    """Standard error of its log."""


class ClusterFile(_Strict):
    schema_version: Literal["hpsearch.cluster/1"]
    name: str
    summary: str = ""
    sources: dict[str, str] = {}
    device: DeviceEntry
    tiers: Annotated[tuple[TierEntry, ...], Field(min_length=1)]
    groups: tuple[GroupEntry, ...] = ()
    """In the order of ranks; all of the nodes, or none where they are alike."""
    efficiency: dict[str, EfficiencyEntry] = {}
    """Numbers that take the place of the device generation's."""
