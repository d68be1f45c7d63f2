"""A cluster in words and a table."""

from __future__ import annotations

from hpsearch.cluster.device import Device
from hpsearch.cluster.group import Group, weakest_device
from hpsearch.cluster.read import Fact
from hpsearch.cluster.tier import Tier
from hpsearch.cluster.units import in_unit


def describe(
    name: str, devices: int, summary: str, device: Device, groups: tuple[Group, ...], tiers: tuple[Tier, ...],
    facts: tuple[Fact, ...],
) -> str:  # fmt: skip
    """The device, the groups, the tiers, and where each number comes from."""
    lines = [f"{name}: {devices} devices" + (f", {summary}" if summary else ""), "", *_device(device), ""]
    lines += _table([("tier", "devices", "link", "bandwidth", "latency", "tables"), *(_tier(t) for t in tiers)])
    if groups:
        lines += [
            "",
            *_table([("group", "devices", "memory", "bandwidth", "compute"), *(_group(g, device) for g in groups)]),
        ]
    if facts:
        lines += ["", *_table([("number", "value", "kind", "source"), *map(_fact, facts)])]
    return "\n".join(lines)


def _device(device: Device) -> list[str]:
    peaks = ", ".join(f"{dtype} {in_unit('rate', rate)}" for dtype, rate in device.peak)
    return [
        f"device {device.name}: {in_unit('size', device.memory_bytes)}, "
        f"{in_unit('bandwidth', device.memory_bytes_per_s)}",
        f"peak {peaks}",
        f"launch {in_unit('time', device.launch_s)}, {len(device.matmul)} matmul tables",
    ]


def _tier(tier: Tier) -> tuple[str, ...]:
    share = "" if tier.efficiency == 1.0 else f" x {tier.efficiency:g}"
    return (
        tier.name, str(tier.size), tier.link, in_unit("bandwidth", tier.bytes_per_s) + share,
        in_unit("time", tier.latency_s), str(len(tier.curves)),
    )  # fmt: skip


def _group(group: Group, device: Device) -> tuple[str, ...]:
    own = weakest_device(device, [group])
    return (
        group.name, str(group.devices), in_unit("size", own.memory_bytes), in_unit("bandwidth", own.memory_bytes_per_s),
        f"x {group.compute:g}",
    )  # fmt: skip


def _fact(fact: Fact) -> tuple[str, ...]:
    return fact.path, f"{fact.value} {fact.unit}", fact.kind, fact.source


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
