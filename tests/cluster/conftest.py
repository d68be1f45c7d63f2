"""A cluster with round numbers: 4 nodes of 8, 100 GB/s and 1 us inside, 10 GB/s and 10 us outside."""

from __future__ import annotations

import dataclasses

import pytest

from hpsearch.cluster import Cluster, Device, Tier

TOY_DEVICE = Device(
    name="toy",
    memory_bytes=10**10,
    memory_bytes_per_s=1e12,
    memory_efficiency=0.5,
    peak=(("bfloat16", 1e14), ("float32", 1e13)),
    matmul_efficiency=0.8,
    attention_efficiency=0.5,
    launch_s=1e-6,
    collective_launch_s=0.0,
)
NODE = Tier("node", 8, "nvlink", 100e9, 1e-6)
FABRIC = Tier("fabric", 32, "roce", 10e9, 10e-6)


@pytest.fixture
def toy() -> Cluster:
    return Cluster("toy", 32, TOY_DEVICE, (NODE, FABRIC))


@pytest.fixture
def deep() -> Cluster:
    """Four tiers: pairs, nodes of 8, supernodes of 32, a fabric of 64, each 4 times slower than the one inside."""
    tiers = [dataclasses.replace(NODE, name="pair", size=2, bytes_per_s=400e9)]
    tiers += [NODE, dataclasses.replace(NODE, name="supernode", size=32, bytes_per_s=25e9)]
    return Cluster("deep", 64, TOY_DEVICE, (*tiers, dataclasses.replace(FABRIC, size=64, bytes_per_s=6.25e9)))
