"""The cluster of a published row: a shipped description where one fits, the row's own specification elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from hpsearch.cluster import LOCAL, Cluster, Device, Tier, shipped
from hpsearch.cluster.efficiency import generation
from hpsearch.errors import ClusterError
from hpsearch.estimate.price import LOW

RACK = 64
"""Ranks of one job in a 72-GPU NVLink domain: 18 trays of 4, of which schedulers hand out 16."""
UNTRIED = {"matmul": 0.8, "attention": 0.4, "memory": 0.8, "overlap": 0.92, "link": 0.8}
"""Shares of the data sheet for a device nobody has described: the middle of those that are described."""
UNKNOWN_NETWORK = {"volta": 0.125, "ampere": 0.125}
"""Of the described network, where a row does not state its own: nodes of these generations were sold with one to
eight ports, and one is assumed; later ones have a port for each device."""
HOST_LINK = 32e9
"""Of a device whose link to its host nobody states: PCIe 4 x16, one way."""
USABLE = 0.99
"""Of the memory on the data sheet, whose GB are 2^30 bytes: an "80 GB" device reports 79.15 GiB."""
Described = tuple[Device, tuple[Tier, ...]]


@cache
def described() -> tuple[Described, ...]:
    """Shipped clusters, in order of their names."""
    clusters = [Cluster.load(name, devices=1) for name in shipped() if name != LOCAL]
    return tuple((cluster.device, cluster.tiers) for cluster in clusters)


def machine(hardware: Mapping[str, Any], filled: list[str]) -> Cluster:
    """The cluster of a row's `hardware`; what had to be assumed is added to `filled`. ClusterError: a device count
    that does not fit."""
    needed = ("devices", "memory_GB", "hbm_GBps")
    if missing := [key for key in needed if not hardware.get(key)] + ([] if _sixteen(hardware) else ["16-bit peak"]):
        raise ClusterError(
            str(hardware.get("device")), f"expected what the device is, but the row states no {', '.join(missing)}"
        )
    name, devices = str(hardware["device"]), int(hardware["devices"])
    near = nearest(hardware)
    device = replace(near[0], name=name, **_stated(hardware)) if near else _untried(name, hardware)
    if device.attention_efficiency is None:
        device = replace(device, attention_efficiency=UNTRIED["attention"])
        filled.append(f"attention_efficiency = {UNTRIED['attention']}")
    if device.host_bytes_per_s is None:
        device = replace(device, host_bytes_per_s=HOST_LINK)
        filled.append(f"host_GBps = {HOST_LINK / 1e9:.3g}")
    size = int(hardware.get("devices_per_node") or 8)
    tiers = [_node(near, size, hardware)]
    wide = "NVL72" in name or "72-GPU" in str(hardware.get("fabric"))
    if wide and devices > size:
        tiers.append(_rack(near, tiers[0], devices))
    if devices > tiers[-1].size:
        tiers.append(_fabric(near, tiers[0], devices, hardware, filled))
    return Cluster(f"{name} x{devices}", devices, device, tuple(tiers))


def nearest(hardware: Mapping[str, Any]) -> Described | None:
    """The shipped cluster of the same device, else of one of its generation with as fast cores; of several the one
    with the row's kind of network, then with the nearest bandwidth."""
    name, fabric = str(hardware["device"]), str(hardware.get("fabric")).lower()
    peak, inter = 1e12 * _sixteen(hardware), 1e9 * (hardware.get("inter_node_GBps_per_device") or 0)

    def distance(one: Described) -> tuple[bool, bool, float]:
        outer = one[1][-1]
        return (
            one[0].name != name.split()[0],
            outer.link in ("roce", "ethernet", "efa") and "infiniband" in fabric,
            abs(outer.bytes_per_s - inter),
        )

    alike = [
        one
        for one in described()
        if generation(one[0].name) == generation(name)
        and (one[0].name == name.split()[0] or abs(dict(one[0].peak).get("bfloat16", 0.0) / peak - 1) < 0.02)
    ]
    return min(alike, key=distance) if alike else None


def _stated(hardware: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "memory_bytes": int(2**30 * hardware["memory_GB"] * USABLE),
        "memory_bytes_per_s": 1e9 * float(hardware["hbm_GBps"]),
        "peak": _peaks(hardware),
    }


def _sixteen(hardware: Mapping[str, Any]) -> float:
    """Dense TFLOP/s in 16 bit, of whichever format the row states; 0 where it states none."""
    peaks = hardware.get("peak_dense_tflops") or {}
    return float(peaks.get("bf16") or peaks.get("fp16") or 0.0)


def _peaks(hardware: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    peaks = {key: 1e12 * float(value) for key, value in hardware["peak_dense_tflops"].items() if value}
    sixteen = 1e12 * _sixteen(hardware)
    found = {"bfloat16": sixteen, "float16": sixteen}
    if "fp8" in peaks:
        found[LOW] = peaks["fp8"]
    return tuple(sorted(found.items()))


def _untried(name: str, hardware: Mapping[str, Any]) -> Device:
    u, s = UNTRIED, _stated(hardware)
    return Device(
        name, s["memory_bytes"], s["memory_bytes_per_s"], u["memory"], s["peak"], u["matmul"], u["attention"], 4e-6,
        8e-6, overlap_efficiency=u["overlap"],
    )  # fmt: skip


def _node(near: Described | None, size: int, hardware: Mapping[str, Any]) -> Tier:
    """The inside of a node: the described one where its links are as wide."""
    intra = 1e9 * float(hardware.get("intra_node_GBps_per_device_one_way") or 0.0)
    inner = near[1][0] if near else Tier("node", size, "nvlink", intra or 100e9, 6e-6, UNTRIED["link"])
    if not intra or abs(inner.bytes_per_s / intra - 1) < 0.02:
        return replace(inner, size=size) if inner.size != size else inner
    return Tier("node", size, inner.link, intra, inner.latency_s, inner.efficiency)


def _rack(near: Described | None, node: Tier, devices: int) -> Tier:
    size = devices if devices <= 72 else RACK
    found = near[1][1] if near and len(near[1]) > 2 else None
    return replace(found, size=size) if found else replace(node, name="rack", size=size, curves=())


def _fabric(near: Described | None, node: Tier, devices: int, hardware: Mapping[str, Any], filled: list[str]) -> Tier:
    """The network between nodes, at the row's bandwidth if it states one."""
    outer = near[1][-1] if near and len(near[1]) > 1 else Tier("fabric", devices, "network", node.bytes_per_s / 9, 6e-6)
    inter = 1e9 * float(hardware.get("inter_node_GBps_per_device") or 0.0)
    if not inter:
        inter = UNKNOWN_NETWORK.get(generation(str(hardware["device"])), 1.0) * outer.bytes_per_s
        filled.append(f"inter_node_GBps = {inter / 1e9:.3g}")
    if abs(inter / outer.bytes_per_s - 1) > 0.1:
        outer = replace(outer, bytes_per_s=inter, curves=())
    return replace(outer, size=max(devices, node.size))
