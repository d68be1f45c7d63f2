"""From the text of a cluster file to frozen SI objects, or one error that names the line and the likely slip."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from pydantic import ValidationError

from hpsearch.cluster.check import complaints
from hpsearch.cluster.curve import Curve, bus_factor
from hpsearch.cluster.device import Device, MatmulTable, StreamTable
from hpsearch.cluster.efficiency import OwnNumber
from hpsearch.cluster.group import Group
from hpsearch.cluster.lines import line_of, line_of_paths, path_text
from hpsearch.cluster.protocol import Protocol, Switches, SwitchTree
from hpsearch.cluster.schema import (
    ClusterFile,
    CurveEntry,
    DeviceEntry,
    GroupEntry,
    Number,
    Numbers,
    ProtocolEntry,
    SwitchesEntry,
    SwitchTreeEntry,
    TierEntry,
)
from hpsearch.cluster.tier import Tier, node_size
from hpsearch.cluster.units import UNITS, Complaint
from hpsearch.cluster.wrong import complaints_of_schema
from hpsearch.errors import ClusterError


@dataclass(frozen=True)
class Fact:
    """One number, or one table, as its file states it."""

    path: str
    value: str
    unit: str
    kind: str
    source: str


@dataclass(frozen=True)
class Description:
    """All that a file says; a cluster once it has a device count."""

    name: str
    summary: str
    device: Device
    tiers: tuple[Tier, ...]
    facts: tuple[Fact, ...]
    efficiency: tuple[OwnNumber, ...] = ()
    groups: tuple[Group, ...] = ()


def read(text: str, file: str) -> Description:
    """The description in `text`; `file` names it in errors. ClusterError with file, line, and what to write instead."""
    entry = parse(text, file)
    found = complaints(entry)
    if found:
        raise _error(found, text, file)
    tiers, own = tuple(map(_tier, entry.tiers)), _efficiency(entry)
    groups = tuple(_group(group, node_size(tiers)) for group in entry.groups)
    return Description(entry.name, entry.summary, _device(entry.device), tiers, facts(entry), own, groups)


def parse(text: str, file: str) -> ClusterFile:
    """The file's fields, of the right types, units and ranges not yet checked."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(file, f"expected TOML, but {error}", "Correct the syntax there.") from error
    try:
        return ClusterFile.model_validate(content)
    except ValidationError as error:
        raise _error(complaints_of_schema(error), text, file) from error


def _error(found: list[Complaint], text: str, file: str) -> ClusterError:
    """The complaint that stands first in the file; the number of others is told."""
    lines = line_of_paths(text)
    first = min(found, key=lambda complaint: line_of(lines, complaint.path))
    subject = f"{file}, line {line_of(lines, first.path)}, {path_text(first.path)}".removesuffix(", ")
    more = f" ({len(found) - 1} more after this one.)" if len(found) > 1 else ""
    return ClusterError(subject, first.problem, first.remedy + more)


def si(number: Number, dimension: str) -> float:
    return number.value * UNITS[dimension][number.unit]


def _many(numbers: Numbers, dimension: str) -> tuple[float, ...]:
    return tuple(value * UNITS[dimension][numbers.unit] for value in numbers.values)


def _basis(kind: str) -> str:
    return kind if kind in ("measured", "published") else "modelled"


def _device(entry: DeviceEntry) -> Device:
    return Device(
        name=entry.name,
        memory_bytes=int(si(entry.memory, "size")),
        memory_bytes_per_s=si(entry.memory_bandwidth, "bandwidth"),
        memory_efficiency=entry.memory_efficiency.value,
        peak=tuple((dtype, si(entry.peak[dtype], "rate")) for dtype in sorted(entry.peak)),
        matmul_efficiency=entry.matmul_efficiency.value,
        attention_efficiency=None if entry.attention_efficiency is None else entry.attention_efficiency.value,
        launch_s=si(entry.launch, "time"),
        collective_launch_s=si(entry.collective_launch, "time"),
        overlap_efficiency=entry.overlap_efficiency.value,
        arrival_s=0.0 if entry.arrival is None else si(entry.arrival, "time"),
        arrivals=tuple((a.group, a.stride, si(a.time, "time")) for a in entry.arrivals),
        host_bytes_per_s=None if entry.host_bandwidth is None else si(entry.host_bandwidth, "bandwidth"),
        matmul=tuple(
            MatmulTable(t.dtype, t.n, t.k, t.m, _many(t.rate, "rate"), _basis(t.rate.kind)) for t in entry.matmul
        ),
        stream=None if entry.stream is None else StreamTable(entry.stream.nbytes, _many(entry.stream.time, "time")),
        power_w=None if entry.power is None else si(entry.power, "power"),
        price_a_second=None if entry.price is None else si(entry.price, "price"),
        currency="" if entry.price is None else entry.price.unit.removesuffix("/h"),
    )


def _group(entry: GroupEntry, node: int) -> Group:
    bandwidth = entry.memory_bandwidth
    return Group(
        name=entry.name,
        devices=entry.nodes * node,
        memory_bytes=None if entry.memory is None else int(si(entry.memory, "size")),
        memory_bytes_per_s=None if bandwidth is None else si(bandwidth, "bandwidth"),
        compute=1.0 if entry.compute is None else entry.compute.value,
    )


def _efficiency(entry: ClusterFile) -> tuple[OwnNumber, ...]:
    def in_si(name: str, number: Number) -> float:
        return si(number, "time" if name.endswith("_s") else "factor")

    return tuple(OwnNumber(name, in_si(name, n), n.error) for name, n in sorted(entry.efficiency.items()))


def _tier(entry: TierEntry) -> Tier:
    return Tier(
        name=entry.name,
        size=int(entry.size.value),
        link=entry.link,
        bytes_per_s=si(entry.bandwidth, "bandwidth"),
        latency_s=si(entry.latency, "time"),
        efficiency=1.0 if entry.efficiency is None else entry.efficiency.value,
        pipelining=None if entry.pipelining is None else entry.pipelining.value,
        curves=tuple(_curve(curve) for curve in entry.collectives),
        wiring=entry.wiring,
        like=entry.like,
        protocols=tuple(_protocol(protocol) for protocol in entry.protocols),
        switches=None if entry.switches is None else _switches(entry.switches),
        switch_tree=None if entry.switch_tree is None else _switch_tree(entry.switch_tree),
    )


def _protocol(entry: ProtocolEntry) -> Protocol:
    return Protocol(
        name=entry.name,
        start_s=si(entry.start, "time"),
        ring_inner_s=si(entry.ring_inner, "time"),
        ring_outer_s=si(entry.ring_outer, "time"),
        tree_inner_s=si(entry.tree_inner, "time"),
        tree_outer_s=si(entry.tree_outer, "time"),
        ring_share=entry.ring_share.value,
        tree_share=entry.tree_share.value,
        channel_bytes_per_s=None if entry.channel is None else si(entry.channel, "bandwidth"),
    )


def _switches(entry: SwitchesEntry) -> Switches:
    return Switches(si(entry.start, "time"), entry.share.value, int(entry.members.value))


def _switch_tree(entry: SwitchTreeEntry) -> SwitchTree:
    return SwitchTree(
        start_s=si(entry.start, "time"),
        outer_s=si(entry.outer, "time"),
        share=entry.share.value,
        window_bytes=si(entry.window, "size"),
        members=int(entry.members.value),
    )


def _curve(entry: CurveEntry) -> Curve:
    seconds, numbers = curve_seconds(entry)
    return Curve(entry.op, entry.group, entry.stride, entry.nbytes, seconds, _basis(numbers.kind))


def curve_seconds(entry: CurveEntry) -> tuple[tuple[float, ...], Numbers]:
    """Seconds of each point from time, busbw or algbw, whichever the file gives: algbw = nbytes / seconds, and
    busbw = algbw · 2(n-1)/n for all_reduce, · (n-1)/n for the others."""
    if entry.time is not None:
        return _many(entry.time, "time"), entry.time
    numbers = entry.busbw or entry.algbw
    assert numbers is not None
    factor = bus_factor(entry.op, entry.group) if entry.busbw is not None else 1.0
    rates = _many(numbers, "bandwidth")
    return tuple(factor * size / rate for size, rate in zip(entry.nbytes, rates, strict=True)), numbers


def facts(entry: ClusterFile) -> tuple[Fact, ...]:
    """Every number of the file with its kind and the URL behind it, in file order; a table is one fact."""

    def one(path: str, number: Number | Numbers) -> Fact:
        value = f"{number.value:.6g}" if isinstance(number, Number) else f"{len(number.values)} points"
        return Fact(path, value, number.unit, number.kind, entry.sources.get(number.source, number.source))

    found = [one(f"device.{name}", n) for name, n in entry.device if isinstance(n, Number)]
    found += [one(f"device.peak.{dtype}", n) for dtype, n in entry.device.peak.items()]
    found += [one(f"device.matmul {t.dtype} n={t.n} k={t.k}", t.rate) for t in entry.device.matmul]
    found += [one(f"device.arrivals x{a.group} stride {a.stride}", a.time) for a in entry.device.arrivals]
    found += [one("device.stream", entry.device.stream.time)] if entry.device.stream else []
    found += [one(f"efficiency.{name}", n) for name, n in entry.efficiency.items()]
    found += [one(f"{g.name}.{name}", n) for g in entry.groups for name, n in g if isinstance(n, Number)]
    for tier in entry.tiers:
        found += [one(f"{tier.name}.{name}", n) for name, n in tier if isinstance(n, Number | Numbers)]
        for p in tier.protocols:
            found += [one(f"{tier.name}.{p.name}.{name}", n) for name, n in p if isinstance(n, Number)]
        for table in ("switches", "switch_tree"):
            found += [one(f"{tier.name}.{table}.{name}", n) for name, n in getattr(tier, table) or ()]
        for c in tier.collectives:
            found.append(one(f"{tier.name}.{c.op} x{c.group}", c.time or c.busbw or c.algbw or _none(c)))
    return tuple(found)


def _none(entry: CurveEntry) -> Numbers:
    raise AssertionError(f"a curve without numbers passed the check: {entry.op}")
