"""Prices across nodes against published measurements. No number of any cluster file is fitted to these curves, except
that the ring share of A100 clusters is the 96 GB/s of three nodes; the EFA curve is a table of its own cluster only.
`python -m tests.benchmarks.bench_collectives` prints them all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.curve import bus_factor
from tests.benchmarks.bench_collectives import left_out, measured_curves

from .figures import (
    B200_GATHER_US,
    B200_REDUCE_NVLS_US,
    B200_REDUCE_RING_US,
    B200_SCATTER_US,
    B200_SIZES,
    EFA_BUS,
    EFA_SIZES,
    Figure,
    all_reduces,
    dispatches,
    without_curves,
)

MIB = 2**20
SIZES = B200_SIZES


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


def group(figures: list[Figure], what: str) -> np.ndarray:
    found = np.array([f.error for f in figures if f.what.startswith(what)])
    assert len(found)
    return found


def test_all_reduce_over_64_nodes_by_ring_and_by_switches() -> None:
    """Within 25 % but for 4 to 16 MiB by ring, where 4 MiB take longer than 8 and the protocol changes by rules that
    are not copied here, and for 8 GiB by switches, which lose bandwidth from 4 GiB on."""
    figures = all_reduces()
    ring, switches = group(figures, "512 B200, all_reduce ring"), group(figures, "512 B200, all_reduce NVLS")
    assert abs(np.delete(ring, [2, 3, 4])).max() < 0.25
    assert abs(ring).max() < 0.62
    assert abs(switches[:-1]).max() < 0.25
    assert abs(switches).max() < 0.35
    assert np.median(abs(ring)) < 0.1
    assert np.median(abs(switches)) < 0.15


def test_all_reduce_over_64_nodes_takes_the_better_way() -> None:
    best = np.minimum(B200_REDUCE_RING_US, B200_REDUCE_NVLS_US) * 1e-6
    found = errors(Cluster.load("b200-hgx-ib400", devices=512), "all_reduce", 512, SIZES, list(best))
    assert np.median(abs(found)) < 0.15
    assert np.percentile(abs(found), 90) < 0.22
    assert abs(found).max() < 0.3


def test_all_reduce_over_4_nodes() -> None:
    """All within 25 % of EFA without its own curve, but for the three smallest sizes, printed as 0.01, 0.04 and 0.45
    GB/s: 6.3 ms for 32 KiB where 256 KiB take 0.4."""
    found = group(all_reduces(), "32 B200 over EFA")
    assert abs(found[3:]).max() < 0.25
    assert np.median(abs(found[3:])) < 0.15
    measured = Cluster.load("b200-hgx-efa400", devices=32)
    seconds = [bus_factor("all_reduce", 32) * n / (bus * 1e9) for n, bus in zip(EFA_SIZES, EFA_BUS, strict=True)]
    assert abs(errors(measured, "all_reduce", 32, EFA_SIZES[3:], seconds[3:])).max() < 0.05
    assert measured.collective("all_reduce", MIB, 32, 1).basis == "measured"
    assert without_curves("b200-hgx-efa400", 32).collective("all_reduce", MIB, 32, 1).basis == "modelled"


def test_dispatch_to_experts() -> None:
    """DeepEP between nodes, every figure within 25 %: copies together from 4,096 tokens on, one by one at 128. Inside a
    node its low-latency kernel waits longer than any latency of the link explains."""
    figures = dispatches()
    assert abs(group(figures, "DeepEP V1, H800")).max() < 0.15
    assert abs(group(figures, "DeepEP V2")).max() < 0.15
    slow = [f for f in figures if f.what.startswith("DeepEP V1 low latency")]
    assert max(abs(f.error) for f in slow if f.detail != "8 ranks") < 0.25
    assert all(f.error > -0.4 for f in slow)
    assert all(-0.25 < f.error < 0 for f in figures if f.what == "CloudMatrix384, combine")
    assert all(-0.55 < f.error < -0.5 for f in figures if f.what == "CloudMatrix384, dispatch")


def test_every_measured_table_ships_with_its_device() -> None:
    """12 of a node of eight, 8 of a tray of four. Every second size left out, most tables are within 5 % in the median
    and 15 % at the 90th centile each for itself."""
    curves = measured_curves()
    assert {device: len(found) for device, found in curves.items()} == {
        "A100-SXM4-80GB": 12, "B200-SXM-180GB": 12, "GB200": 8, "GB300": 8, "H100-SXM5-80GB": 12, "H200-SXM5-141GB": 12,
    }  # fmt: skip
    off = [left_out(curve) for found in curves.values() for curve in found]
    assert sum(np.median(errors) > 0.05 for errors in off) <= 8
    assert sum(np.percentile(errors, 90) > 0.15 for errors in off) <= 6


def test_smallest_all_reduce_over_32_nodes() -> None:
    """256 A100, 8 and 128 bytes: 63 us (https://github.com/NVIDIA/nccl/issues/652)."""
    cluster = Cluster.load("a100-sxm-40gb", devices=256)
    for nbytes in (8, 128):
        assert cluster.collective("all_reduce", nbytes, 256, 1).seconds == pytest.approx(63e-6, rel=0.08)


def test_racks_of_gb200() -> None:
    """8 GPUs of two trays at 811 GB/s by switches (https://www.lixueduan.com/posts/ai/13-gb200-mnnvl-nccl-test), a
    whole rack at 850, a ring over it at 680 (https://github.com/stas00/ml-engineering/blob/master/network/README.md)."""
    cluster = Cluster.load("gb200-nvl72", devices=72)
    for kind, size, bus, within in (
        ("all_reduce", 8, 811e9, 0.05), ("all_reduce", 72, 850e9, 0.12), ("all_gather", 72, 680e9, 0.2),
    ):  # fmt: skip
        measured = bus_factor(kind, size) * 2**33 / bus
        assert cluster.collective(kind, 2**33, size, 1).seconds == pytest.approx(measured, rel=within)


def test_full_mesh_of_mi300x() -> None:
    """4 GiB at 312.9 GB/s over 8, 47.7 over 2 (https://github.com/stas00/ml-engineering/blob/master/network/README.md)."""
    cluster = Cluster.load("mi300x-ib400", devices=8)
    for size, bus in ((8, 312.9e9), (2, 47.7e9)):
        measured = bus_factor("all_reduce", size) * 2**32 / bus
        assert cluster.collective("all_reduce", 2**32, size, 1).seconds == pytest.approx(measured, rel=0.1)
