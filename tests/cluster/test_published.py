"""Prices across nodes against published measurements. No number of any cluster file is fitted to these curves, except
that the ring share of A100 clusters is the 96 GB/s below; the EFA curve is a table of its own cluster only."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.curve import bus_factor

MIB = 2**20
SIZES = [MIB * 2**i for i in range(14)]
# 512 B200, NCCL 2.29.7, one NDR400 HCA a GPU: "NCCL 64-node B200 benchmark report", 2026-04-16. One cluster's data;
# runs a week apart differ by up to 21 %. All_gather runs as a ring; all_reduce with NVLS, a tree of nodes.
B200_GATHER_US = [
    1107.6, 1262.1, 3426.1, 2379.9, 3243.6, 3258.3, 4503.3, 4696.3, 5030.5, 6325.7, 7567.6, 10301, 19979, 31145,
]  # fmt: skip
B200_SCATTER_US = [
    1123.4, 1252.0, 3406.1, 2353.9, 3134.6, 3271.9, 4507.6, 4691.6, 5067.8, 6293.3, 7643.8, 10226, 20086, 29897,
]  # fmt: skip
B200_REDUCE_RING_US = [
    2169.8, 2497.8, 7005.7, 4830.9, 6691.9, 6679.7, 9012.5, 9421.4, 10109, 12721, 15017, 20830, 31945, 61281,
]  # fmt: skip
B200_REDUCE_NVLS_US = [
    265.8, 309.3, 397.0, 571.2, 629.4, 1219.3, 1325.3, 1821.7, 2871.0, 4976.5, 9032.1, 17219, 37782, 84822,
]  # fmt: skip
# 32 B200 on 8 x 400G EFA, all_reduce, GB/s bus bandwidth from 256 KiB:
# https://github.com/stas00/ml-engineering/blob/master/network/README.md
EFA_BUS = [
    1.33, 2.84, 5.37, 10.38, 18.9, 35.12, 64.43, 91.19, 156.74, 197.94, 229.09, 326.9, 361.99, 372.42, 377.34, 380.39,
    381.8,
]  # fmt: skip


def errors(cluster: Cluster, kind: str, size: int, nbytes: list[int], seconds: list[float]) -> np.ndarray:
    """Price ÷ measurement - 1."""
    return cluster.collective_s(kind, nbytes, size, 1) / np.array(seconds) - 1


@pytest.mark.parametrize(
    ("kind", "microseconds"), [("all_gather", B200_GATHER_US), ("reduce_scatter", B200_SCATTER_US)]
)
def test_rings_over_64_nodes(kind: str, microseconds: list[float]) -> None:
    """1 MiB over 512 ranks takes a thousand times the time of its bytes: latency of 511 hops. The composition of tiers
    that no library runs in one call is three times too fast there."""
    cluster = Cluster.load("b200-hgx-ib400", devices=512)
    found = errors(cluster, kind, 512, SIZES, [us * 1e-6 for us in microseconds])
    assert np.median(abs(found)) < 0.10
    assert np.percentile(abs(found), 90) < 0.36
    assert abs(found).max() < 0.62  # 4 MiB, where the measurement is slower than 8 MiB
    assert abs(found[5:]).max() < 0.15
    node, fabric = cluster.tiers
    composed = dataclasses.replace(cluster, tiers=(node, dataclasses.replace(fabric, protocols=())))
    assert errors(composed, kind, 512, SIZES[:1], [microseconds[0] * 1e-6]).max() < -0.6


def test_all_reduce_over_64_nodes() -> None:
    best = np.minimum(B200_REDUCE_RING_US, B200_REDUCE_NVLS_US) * 1e-6
    found = errors(Cluster.load("b200-hgx-ib400", devices=512), "all_reduce", 512, SIZES, list(best))
    assert np.median(abs(found)) < 0.18
    assert np.percentile(abs(found), 90) < 0.3
    assert abs(found).max() < 0.8  # 16 MiB


def test_all_reduce_over_4_nodes() -> None:
    """Priced as InfiniBand, measured on EFA: from 4 MiB on within 30 %; below, EFA's latency is four times as long."""
    nbytes = [MIB // 4 * 2**i for i in range(len(EFA_BUS))]
    seconds = [bus_factor("all_reduce", 32) * n / (bus * 1e9) for n, bus in zip(nbytes, EFA_BUS, strict=True)]
    found = errors(Cluster.load("b200-hgx-ib400", devices=32), "all_reduce", 32, nbytes, seconds)
    assert abs(found[4:]).max() < 0.3
    assert np.median(abs(found[4:])) < 0.2
    assert (found[:4] < 0).all()
    measured = Cluster.load("b200-hgx-efa400", devices=32)
    assert abs(errors(measured, "all_reduce", 32, nbytes, seconds)).max() < 0.05
    assert measured.collective("all_reduce", MIB, 32, 1).basis == "measured"


def test_smallest_all_reduce_over_32_nodes() -> None:
    """256 A100, 8 and 128 bytes: 63 us (https://github.com/NVIDIA/nccl/issues/652)."""
    cluster = Cluster.load("a100-sxm-40gb", devices=256)
    for nbytes in (8, 128):
        assert cluster.collective("all_reduce", nbytes, 256, 1).seconds == pytest.approx(63e-6, rel=0.16)


def test_racks_of_gb200() -> None:
    """8 GPUs of two trays at 811 GB/s with NVLink SHARP, which tables of 4 GPUs do not know (https://www.lixueduan.com/posts/ai/13-gb200-mnnvl-nccl-test);
    a ring over 72 at 680 (https://github.com/stas00/ml-engineering/blob/master/network/README.md)."""
    cluster = Cluster.load("gb200-nvl72", devices=72)
    pair = cluster.collective("all_reduce", 2**33, 8, 1).seconds
    assert pair == pytest.approx(bus_factor("all_reduce", 8) * 2**33 / 811e9, rel=0.28)
    ring = cluster.collective("all_gather", 2**33, 72, 1).seconds
    assert ring == pytest.approx(bus_factor("all_gather", 72) * 2**33 / 680e9, rel=0.2)


def test_full_mesh_of_mi300x() -> None:
    """4 GiB at 312.9 GB/s over 8, 47.7 over 2 (https://github.com/stas00/ml-engineering/blob/master/network/README.md)."""
    cluster = Cluster.load("mi300x-ib400", devices=8)
    for size, bus in ((8, 312.9e9), (2, 47.7e9)):
        measured = bus_factor("all_reduce", size) * 2**32 / bus
        assert cluster.collective("all_reduce", 2**32, size, 1).seconds == pytest.approx(measured, rel=0.1)
