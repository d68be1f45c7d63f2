"""The cluster of a published row: a shipped description where one fits, the row's own specification elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from hpsearch.cluster import LOCAL, Cluster, Device, Tier, shipped
from hpsearch.estimate.efficiency import generation
from hpsearch.estimate.price import LOW

RACK = 64
"""Ranks of one job in a 72-GPU NVLink domain: 18 trays of 4, of which schedulers hand out 16."""
UNTRIED = {"matmul": 0.8, "attention": 0.5, "memory": 0.8, "overlap": 0.92, "link": 0.8}
"""Shares of the data sheet for a device nobody has described: the middle of those that are described."""


@cache
def described() -> dict[str, tuple[Device, tuple[Tier, ...]]]:
    """Shipped clusters by name."""
    found = {}
    for name in shipped():
        if name != LOCAL:
            cluster = Cluster.load(name, devices=1)
            found[name] = (cluster.device, cluster.tiers)
    return found


def machine(hardware: Mapping[str, Any], filled: list[str]) -> Cluster:
    """The cluster of a row's `hardware`; what had to be assumed is added to `filled`. ClusterError: a device count
    that does not fit."""
    name, devices = str(hardware["device"]), int(hardware["devices"])
    node = int(hardware.get("devices_per_node") or 8)
    intra = 1e9 * float(hardware.get("intra_node_GBps_per_device_one_way") or 0.0)
    device = _device(name, hardware)
    near = [tiers for found, tiers in described().values() if generation(found.name) == generation(name)]
    if not intra:
        intra = near[0][0].bytes_per_s if near else 100e9
        filled.append(f"intra_node_GBps = {intra / 1e9:g}")
    inter = 1e9 * float(hardware.get("inter_node_GBps_per_device") or 0.0)
    if not inter:
        inter = near[0][-1].bytes_per_s if near else intra / 9
        if devices > node:
            filled.append(f"inter_node_GBps = {inter / 1e9:g}")
    tiers = [_node(near, node, intra)]
    wide = "NVL72" in name or "72-GPU" in str(hardware.get("fabric"))
    if wide and devices > node:
        size = devices if devices <= 72 else RACK
        tiers.append(Tier("rack", size, "nvlink", intra, 8e-6, UNTRIED["link"]))
    if devices > tiers[-1].size:
        tiers.append(Tier("fabric", devices, "network", inter, 15e-6, 0.85))
    return Cluster(f"{name} x{devices}", devices, device, tuple(tiers))


def _node(near: list[tuple[Tier, ...]], size: int, intra: float) -> Tier:
    """The inside of a node: with the curves of a shipped description of the same links."""
    for tiers in near:
        inner = tiers[0]
        if inner.curves and inner.size == size and abs(inner.bytes_per_s / intra - 1) < 0.02:
            return inner
    return Tier("node", size, "nvlink", intra, 6e-6, UNTRIED["link"])


def _device(name: str, hardware: Mapping[str, Any]) -> Device:
    peaks = {key: 1e12 * float(value) for key, value in hardware["peak_dense_tflops"].items() if value}
    found = {"bfloat16": peaks["bf16"], "float16": peaks["bf16"]}
    if "fp8" in peaks:
        found[LOW] = peaks["fp8"]
    memory, stream = int(1e9 * hardware["memory_GB"]), 1e9 * float(hardware["hbm_GBps"])
    for donor, _ in described().values():
        same_cores = abs(dict(donor.peak).get("bfloat16", 0.0) / found["bfloat16"] - 1) < 0.02
        if generation(donor.name) == generation(name) and same_cores:
            return replace(donor, name=name, memory_bytes=memory, memory_bytes_per_s=stream, peak=tuple(found.items()))
    u = UNTRIED
    return Device(
        name, memory, stream, u["memory"], tuple(sorted(found.items())), u["matmul"], u["attention"], 4e-6, 8e-6,
        overlap_efficiency=u["overlap"],
    )  # fmt: skip
