"""Kernel prices: measured tables, the roofline under them, and their laws."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hpsearch.cluster import Cluster
from hpsearch.errors import ClusterError

TABLED = ["h100-sxm-roce400", "a100-sxm-selene"]
HALF, FP8 = "bfloat16", "float8_e4m3fn"
WITH_TABLES = [*((name, HALF) for name in TABLED), *(
    (name, dtype)
    for name in ("h100-sxm-ib400", "h200-sxm-ib400", "b200-hgx-ib400", "gb200-nvl72")
    for dtype in (HALF, FP8)
)]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), WITH_TABLES)
def test_matmul_is_exact_at_measured_points(name: str, dtype: str) -> None:
    """A product and its transpose are one point: where both were measured the price is their geometric mean."""
    cluster = Cluster.load(name, devices=8)
    points: dict[tuple[int, ...], list[float]] = {}
    for table in cluster.device.matmul:
        if table.dtype != dtype:
            continue
        for m, rate in zip(table.m, table.flops_per_s, strict=True):
            points.setdefault((*sorted((m, table.n)), table.k), []).append(2 * m * table.n * table.k / rate)
    assert sum(len(seconds) == 1 for seconds in points.values()) >= 45
    for (a, b, k), seconds in points.items():
        expected = pytest.approx(np.exp(np.mean(np.log(seconds))), rel=1e-6)
        assert cluster.matmul_s(a, b, k, dtype) == expected
        assert cluster.matmul_s(b, a, k, dtype) == expected


@pytest.mark.parametrize(
    ("name", "dtype", "median", "tail"),
    [("h100-sxm-roce400", HALF, 0.06, 0.17), ("a100-sxm-selene", HALF, 0.09, 0.17),
     ("h200-sxm-ib400", HALF, 0.06, 0.18), ("b200-hgx-ib400", HALF, 0.09, 0.35), ("gb200-nvl72", HALF, 0.1, 0.38),
     ("h100-sxm-ib400", FP8, 0.17, 0.47)],
)  # fmt: skip
def test_matmul_predicts_a_table_it_has_not_seen(name: str, dtype: str, median: float, tail: float) -> None:
    """Each (n, k) left out once: what `Device.matmul_s` says about its error. Tables of float8 hold the scaling too,
    whose share changes with the shape."""
    device = Cluster.load(name, devices=8).device
    errors = []
    for table in (t for t in device.matmul if t.dtype == dtype):
        others = dataclasses.replace(device, matmul=tuple(t for t in device.matmul if t is not table))
        m = np.array(table.m)
        truth = 2 * m * table.n * table.k / np.array(table.flops_per_s)
        errors += list(abs(np.log(others.matmul_s(m, table.n, table.k, table.dtype) / truth)))
    assert np.median(errors) < median
    assert np.percentile(errors, 90) < tail


@pytest.mark.parametrize("name", [*TABLED, "atlas-800-a3"])
def test_efficiency_falls_for_small_matmuls(name: str) -> None:
    cluster = Cluster.load(name, devices=8)
    peak = cluster.device.peak_flops_per_s("bfloat16")

    def efficiency(m: int, n: int, k: int) -> float:
        return 2 * m * n * k / float(cluster.matmul_s(m, n, k, "bfloat16")) / peak

    assert efficiency(8192, 8192, 8192) > 0.6
    for small in [(32, 8192, 8192), (8192, 32, 8192), (8192, 8192, 32), (256, 256, 256)]:
        assert efficiency(*small) < 0.5 * efficiency(8192, 8192, 8192), small
    assert efficiency(64, 64, 64) < 0.01


@pytest.mark.parametrize("name", [*TABLED, "atlas-800-a3"])
def test_twice_the_work_is_never_cheaper_by_much(name: str) -> None:
    """Tables are noisy: doubling one dim may at most look 10 % cheaper, never more."""
    cluster = Cluster.load(name, devices=8)
    shapes = np.array(
        [[m, n, k] for m in 2 ** np.arange(4, 17) for n in (256, 1024, 4096, 14336) for k in (128, 4096, 16384)]
    )
    before = cluster.matmul_s(*shapes.T, "bfloat16")
    for dim in range(3):
        doubled = shapes.copy()
        doubled[:, dim] *= 2
        assert (cluster.matmul_s(*doubled.T, "bfloat16") > 0.9 * before).all()


def test_arrays_broadcast_and_agree_with_single_shapes() -> None:
    cluster = Cluster.load("h100-sxm-roce400", devices=8)
    m, n = np.array([[64], [8192]]), np.array([128, 4096, 14336])
    together = cluster.matmul_s(m, n, 4096, "bfloat16")
    assert together.shape == (2, 3)
    one_by_one = [[float(cluster.matmul_s(a, b, 4096, "bfloat16")) for b in n] for a in m.ravel()]
    assert together.tolist() == [pytest.approx(row) for row in one_by_one]
    assert cluster.matmul_s(64, 64, 64, "bfloat16").shape == ()


def test_a_batch_costs_its_work_and_one_launch() -> None:
    cluster = Cluster.load("h100-sxm-roce400", devices=8)
    one, many = (float(cluster.matmul_s(2048, 128, 2048, "bfloat16", batch=b)) for b in (1, 64))
    assert one < many < 64 * one


def test_toy_rooflines_by_hand(toy: Cluster) -> None:
    """Launch 1 us; bfloat16 80 TFLOP/s reached; memory 500 GB/s reached; attention half of peak."""
    assert toy.matmul_s(1000, 1000, 1000, "bfloat16") == pytest.approx(1e-6 + 2e9 / 80e12)
    assert toy.matmul_s(1, 1000, 1000, "bfloat16") == pytest.approx(1e-6 + (1000 + 10**6 + 1000) * 2 / 500e9)
    assert toy.memory_bound_s(10**9) == pytest.approx(1e-6 + 2e-3)
    assert toy.attention_s(1e12, 10**6, "bfloat16") == pytest.approx(1e-6 + 1e12 / 50e12)
    assert toy.attention_s(1, 10**9, "bfloat16") == pytest.approx(1e-6 + 2e-3)
    assert toy.memory_bound_s(np.array([0, 500])).tolist() == pytest.approx([1e-6, 1e-6 + 1e-9])
    assert toy.launch_s == 1e-6


def test_what_a_matmul_price_rests_on_is_said() -> None:
    h100, atlas = (Cluster.load(name, devices=8).device for name in ("h100-sxm-roce400", "atlas-800-a3"))
    assert h100.matmul_basis("bfloat16") == "measured"
    assert h100.matmul_basis("float32") == atlas.matmul_basis("bfloat16") == "modelled"


def test_a_dtype_without_a_peak_is_refused(toy: Cluster) -> None:
    expected = r"device toy: expected a peak for float64, but only bfloat16, float32 are described\. Add float64 under"
    with pytest.raises(ClusterError, match=expected):
        toy.matmul_s(8, 8, 8, "float64")
