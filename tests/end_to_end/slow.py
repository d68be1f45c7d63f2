"""Devices so slow, on links so fast, that the search splits whatever can be split."""

from __future__ import annotations

from hpsearch.cluster import Cluster, Device, Tier


def slow_devices(count: int) -> Cluster:
    """A node of `count` of them."""
    rates = (("float64", 1e8), ("float32", 2e8), ("bfloat16", 2e8))
    device = Device("slow", 1 << 30, 1e9, 1.0, rates, 1.0, 1.0, 0.0, 0.0)
    return Cluster("slow devices", count, device, (Tier("node", count, "wire", 1e12, 1e-9),), "for tests")
