"""Collective prices: by hand on a toy, and their laws on every shipped cluster."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from hpsearch.cluster import COLLECTIVES, Cluster, Curve, Tier, shipped
from hpsearch.cluster.tier import GroupShape, group_shape
from hpsearch.errors import ClusterError

US, MS = 1e-6, 1e-3
BY_HAND = [
    # one node: steps · 1 us + share · bytes / 100 GB/s
    ("all_gather", 1e9, 8, 1, 7 * US + 8.75 * MS),
    ("reduce_scatter", 1e9, 8, 1, 7 * US + 8.75 * MS),
    ("all_reduce", 1e9, 8, 1, 14 * US + 17.5 * MS),
    ("all_to_all", 1e9, 8, 1, 7 * US + 8.75 * MS),
    ("all_gather", 1e9, 2, 1, 1 * US + 5 * MS),
    ("all_gather", 1e9, 2, 4, 1 * US + 5 * MS),
    ("all_gather", 1e9, 4, 2, 3 * US + 7.5 * MS),
    ("all_reduce", 1e3, 8, 1, 6 * US + 0.02 * US),  # tree: 2 log2(8) steps, twice the bytes
    ("all_gather", 0, 8, 1, 7 * US),
    # one rank in each node: steps · 10 us + share · bytes / 10 GB/s
    ("all_gather", 1e9, 4, 8, 30 * US + 75 * MS),
    ("reduce_scatter", 1e9, 4, 8, 30 * US + 75 * MS),
    ("all_reduce", 1e9, 4, 8, 60 * US + 150 * MS),
    ("all_to_all", 1e9, 4, 8, 30 * US + 75 * MS),
    ("all_reduce", 1e9, 2, 16, 20 * US + 100 * MS),
    ("all_reduce", 1e3, 4, 8, 40 * US + 0.2 * US),  # tree
    # both tiers: the outer step moves an eighth (8 ranks a node), a quarter (4) or half (2)
    ("all_gather", 1e9, 32, 1, 30 * US + 9.375 * MS + 7 * US + 8.75 * MS),
    ("reduce_scatter", 1e9, 32, 1, 30 * US + 9.375 * MS + 7 * US + 8.75 * MS),
    ("all_reduce", 1e9, 32, 1, 2 * (7 * US + 8.75 * MS) + 60 * US + 18.75 * MS),
    ("all_gather", 1e9, 16, 2, 30 * US + 18.75 * MS + 3 * US + 7.5 * MS),
    ("all_gather", 1e9, 8, 4, 30 * US + 37.5 * MS + 1 * US + 5 * MS),
    ("all_gather", 1e9, 16, 1, 10 * US + 6.25 * MS + 7 * US + 8.75 * MS),
    ("all_to_all", 1e9, 32, 1, 310 * US + 75 * MS),  # direct: 24 of 32 pieces leave the node
    ("all_to_all", 1e6, 32, 1, 7 * US + 8.75 * US + 30 * US + 75 * US),  # an exchange a tier: fewer steps
    ("all_reduce", 1e9, 1, 1, 0.0),
]


@pytest.mark.parametrize(("kind", "nbytes", "size", "stride", "seconds"), BY_HAND)
def test_toy_prices_equal_those_by_hand(
    toy: Cluster, kind: str, nbytes: float, size: int, stride: int, seconds: float
) -> None:
    price = toy.collective(kind, nbytes, size, stride)
    assert price.seconds == pytest.approx(seconds, rel=1e-12)
    assert price.basis == ("exact" if size == 1 else "modelled")


def test_the_way_is_named(toy: Cluster) -> None:
    assert toy.collective("all_reduce", 1e9, 32, 1).how == (
        "reduce_scatter node x8 (ring) + all_reduce fabric x4 (ring or tree) + all_gather node x8 (ring)"
    )
    assert toy.collective("all_to_all", 1e9, 32, 1).how == "direct all_to_all fabric x32"
    assert toy.collective("all_gather", 1e9, 4, 8).how == "all_gather fabric x4 (ring)"


def brute_shape(tier_sizes: tuple[int, ...], devices: int, size: int, stride: int) -> tuple[int, ...]:
    """Domains touched at each tier by listing every group as a set of ranks; -1 where groups or domains differ."""
    block, groups = size * stride, []
    for first in range(0, devices // block * block, block):
        groups += [[first + offset + i * stride for i in range(size)] for offset in range(stride)]
    found = []
    for tier_size in tier_sizes:
        sizes = []
        for group in groups:
            domains: dict[int, int] = {}
            for rank in group:
                domains[rank // tier_size] = domains.get(rank // tier_size, 0) + 1
            sizes.append(tuple(domains.values()))
        alike = all(s == sizes[0] for s in sizes) and len(set(sizes[0])) == 1
        found.append(len(sizes[0]) if alike else -1)
    return tuple(found)


@pytest.mark.parametrize("tier_sizes", [(8, 64), (2, 8, 32, 64), (6, 24)])
def test_group_shapes_equal_those_of_listed_ranks(tier_sizes: tuple[int, ...]) -> None:
    for devices in {tier_sizes[0], tier_sizes[-1], tier_sizes[-1] // 2}:
        for size, stride in itertools.product(range(2, devices + 1), range(1, devices + 1)):
            if size * stride <= devices:
                shape = group_shape(tier_sizes, devices, size, stride)
                assert shape == GroupShape(size, brute_shape(tier_sizes, devices, size, stride))


def test_uneven_groups_take_a_flat_ring_over_the_slow_tier(toy: Cluster) -> None:
    price = toy.collective("all_gather", 1e9, 3, 1)  # ranks 6, 7, 8 lie on two nodes
    assert price.seconds == pytest.approx(2 * 10 * US + 2 / 3 * 1e9 / 10e9)
    assert toy.tier_of(3, 1).name == "fabric"
    three = dataclasses.replace(toy, devices=3)
    assert three.collective("all_gather", 1e9, 3, 1).seconds == pytest.approx(2 * US + 2 / 3 * 1e9 / 100e9)


def test_deep_tiers_compose(deep: Cluster) -> None:
    """Of all ways over four tiers the cheapest is taken; for large messages it cuts at every tier."""
    price = deep.collective("all_gather", 1e9, 64, 1)
    by_hand = [(0.5, 400e9, 1), (0.75 / 2, 100e9, 3), (0.75 / 8, 25e9, 3), (0.5 / 32, 6.25e9, 10)]
    assert price.seconds == pytest.approx(sum(share * 1e9 / rate + us * US for share, rate, us in by_hand))
    assert price.how.split(" + ") == [
        f"all_gather {t} x{n} (ring)" for t, n in [("fabric", 2), ("supernode", 4), ("node", 4), ("pair", 2)]
    ]
    assert deep.tier_of(2, 8).name == "supernode"
    assert deep.tier_of(2, 32).name == "fabric"


def test_tiers_are_crossed_in_one_step_when_that_is_cheaper(toy: Cluster) -> None:
    """Pairs that answer slowly and carry no more than their node: the ring over the node leaves them out."""
    slow_start = Tier("pair", 2, "nvlink", 100e9, 50e-6)
    cluster = Cluster("flat", 8, toy.device, (slow_start, toy.tiers[0]))
    assert cluster.collective("all_gather", 1e9, 8, 1).how == "all_gather node x8 (ring)"


def test_pipelining_overlaps_the_tiers_of_an_all_reduce(toy: Cluster) -> None:
    fast = dataclasses.replace(toy, tiers=(toy.tiers[0], dataclasses.replace(toy.tiers[1], pipelining=0.9)))
    price = fast.collective("all_reduce", 1e9, 32, 1)
    latency = 14 * US + 40 * US
    assert price.how.startswith("pipelined: ")
    assert price.seconds == pytest.approx(
        latency + (14 * US + 17.5 * MS + 60 * US + 18.75 * MS - latency - 17.5 * MS) / 0.9, rel=1e-2
    )
    assert price.seconds < toy.collective("all_reduce", 1e9, 32, 1).seconds


LAWS = [
    (name, 1536 if name == "atlas-800-a3" else min(256, Cluster.load(name, devices=8).tiers[-1].size))
    for name in shipped()
    if name != "local"
]


@pytest.mark.parametrize(("name", "devices"), LAWS)
def test_prices_never_fall_when_bytes_grow(name: str, devices: int) -> None:
    cluster = Cluster.load(name, devices=devices)
    nbytes = np.unique(np.geomspace(1, 2**36, 200).astype(np.int64))
    groups = [
        (s, t) for s in (2, 3, 4, 6, 8, 16, 64) for t in (1, 2, 8, 16) if s * t <= devices and devices % (s * t) == 0
    ]
    for kind, (size, stride) in itertools.product(COLLECTIVES, groups):
        seconds = cluster.collective_s(kind, nbytes, size, stride)
        assert (np.diff(seconds) >= -1e-15).all(), (kind, size, stride)
        assert (seconds > 0).all()


@pytest.mark.parametrize(("name", "devices"), LAWS)
def test_leaving_the_node_costs_more_than_staying(name: str, devices: int) -> None:
    cluster = Cluster.load(name, devices=devices)
    node = next(t.size for t in cluster.tiers if t.name == "node")
    if node == devices:
        with pytest.raises(ClusterError, match="expected at most"):
            Cluster.load(name, devices=2 * node)
        return
    outer = cluster.tier_of(2 * node, 1)
    same_wires = outer.like
    for kind, nbytes in itertools.product(COLLECTIVES, (2**15, 2**20, 2**30)):
        inside = cluster.collective(kind, nbytes, node, 1).seconds
        if kind != "all_reduce" or outer.switches is None:  # 8 GB200 by switches are quicker than 4 by a ring
            assert cluster.collective(kind, nbytes, 2 * node, 1).seconds > inside
        near = cluster.collective(kind, nbytes, 4, 1).seconds
        across = cluster.collective(kind, nbytes, 4, node).seconds
        assert across == near if same_wires else across > near


def test_every_tier_further_out_costs_more() -> None:
    """Four ranks a die apart, a package apart, a node apart; two ranks a supernode apart."""
    cluster = Cluster.load("atlas-800-a3", devices=1536)
    for kind, nbytes in itertools.product(COLLECTIVES, (2**10, 2**20, 2**30)):
        seconds = [cluster.collective(kind, nbytes, 2, stride).seconds for stride in (1, 2, 16, 768)]
        assert seconds == sorted(seconds), (kind, nbytes)
        assert cluster.tier_of(2, 768).name == "fabric"


def test_two_tier_all_reduce_of_a_gibibyte() -> None:
    cluster = Cluster.load("h100-sxm-roce400", devices=64)
    inside, both = (cluster.collective("all_reduce", 2**30, size, 1).seconds for size in (8, 64))
    across = cluster.collective("all_reduce", 2**30, 8, 8).seconds
    assert inside < both < across


def test_arrays_and_single_prices_agree() -> None:
    cluster = Cluster.load("h100-sxm-roce400", devices=64)
    nbytes = np.array([[1e3, 1e6], [1e8, 1e10]])
    for kind, (size, stride) in itertools.product(COLLECTIVES, [(1, 1), (8, 1), (6, 1), (64, 1), (8, 8)]):
        together = cluster.collective_s(kind, nbytes, size, stride)
        assert together.shape == (2, 2)
        assert together.ravel().tolist() == [cluster.collective(kind, b, size, stride).seconds for b in nbytes.ravel()]


@pytest.mark.parametrize("name", ["h100-sxm-roce400", "a100-sxm-selene"])
def test_a_measured_point_is_its_own_price(name: str) -> None:
    """Where the curve grows at a point and its neighbours, the price is the measured time itself."""
    cluster = Cluster.load(name, devices=8)
    for curve in cluster.tiers[0].curves:
        smooth = np.isclose(curve.smooth, curve.seconds, rtol=1e-12, atol=0)
        assert smooth.mean() > 0.5
        for nbytes, seconds in np.array([curve.nbytes, curve.seconds]).T[smooth]:
            price = cluster.collective(curve.kind, nbytes, curve.size, 1)
            assert (price.seconds, price.basis) == (pytest.approx(seconds, rel=1e-9), "measured")


def test_between_two_sizes_stand_a_latency_and_a_bandwidth() -> None:
    """3 us + 1 us a KiB at the ends, so 5 us in the middle."""
    curve = Curve("all_gather", 8, 1, (1024, 3072), (4e-6, 6e-6))
    assert curve.at(np.array([1.0, 1024, 2048, 3072])).tolist() == pytest.approx([4e-6, 4e-6, 5e-6, 6e-6])


def test_smoothing_pools_only_what_falls() -> None:
    curve = Curve("all_gather", 8, 1, (1, 2, 4, 8), (1e-6, 4e-6, 1e-6, 5e-6))
    assert curve.smooth.tolist() == pytest.approx([1e-6, 2e-6, 2e-6, 5e-6])


def test_leaving_out_every_second_point_predicts_it() -> None:
    """Interpolation over a factor-4 grid against the points between: 2 % in the median, 3 % in log-log."""
    errors: list[float] = []
    for name in ("h100-sxm-ib400", "a100-sxm-selene", "h200-sxm-ib400", "b200-hgx-ib400", "gb200-nvl72", "gb300-nvl72"):
        for curve in Cluster.load(name, devices=8).tiers[0].curves:
            coarse = dataclasses.replace(curve, nbytes=curve.nbytes[::2], seconds=curve.seconds[::2])
            errors += list(abs(coarse.at(np.array(curve.nbytes[1::2], dtype=float)) / curve.seconds[1::2] - 1))
    assert len(errors) == 640  # 64 tables
    assert np.median(errors) < 0.02
    assert np.percentile(errors, 90) < 0.12


def test_group_sizes_between_and_beyond_the_measured_ones() -> None:
    """All-reduce of 8 GiB on H200, the same links: 5, 6, 7 of 8 GPUs at 414, 436, 460 GB/s bus bandwidth
    (https://github.com/stas00/ml-engineering/blob/master/network/README.md). Ours from 4 and 8 of H100."""
    cluster = Cluster.load("h100-sxm-roce400", devices=8)
    for size, bus in ((5, 414.2), (6, 435.6), (7, 460.0)):
        price = dataclasses.replace(cluster, devices=size).collective("all_reduce", 8 * 2**30, size, 1)
        assert price.seconds == pytest.approx(2 * (size - 1) / size * 8 * 2**30 / (bus * 1e9), rel=0.15)
        assert price.basis == "modelled"
    wide = Cluster("wide", 16, cluster.device, (dataclasses.replace(cluster.tiers[0], size=16),))
    near, far = (wide.collective("all_gather", 2**29, size, 1).seconds for size in (8, 16))
    assert far == pytest.approx(near * (15 / 16) / (7 / 8), rel=0.02)


def test_published_multi_node_figures() -> None:
    """32 H100 nodes at 2 GiB: all_reduce 340, all_gather 200 GB/s bus bandwidth
    (https://github.com/NVIDIA/nccl/issues/1218). Neither is fitted."""
    for name in ("h100-sxm-roce400", "h100-sxm-ib400"):
        cluster = Cluster.load(name, devices=256)
        reduced, gathered = (cluster.collective(kind, 2**31, 256, 1).seconds for kind in ("all_reduce", "all_gather"))
        assert reduced == pytest.approx(2 * 255 / 256 * 2**31 / 340e9, rel=0.12)
        assert gathered == pytest.approx(255 / 256 * 2**31 / 200e9, rel=0.22)


def test_published_figure_of_three_a100_nodes() -> None:
    """3 nodes of 8 A100 with four HDR200 HCAs a node: all_reduce peaks at 96 GB/s bus bandwidth
    (https://github.com/NVIDIA/nccl-tests/issues/119)."""
    cluster = Cluster.load("a100-sxm-selene", devices=24)
    node, fabric = cluster.tiers
    shared = dataclasses.replace(cluster, tiers=(node, dataclasses.replace(fabric, bytes_per_s=12.5e9)))
    seconds = shared.collective("all_reduce", 2**33, 24, 1).seconds
    measured = 2 * 23 / 24 * 2**33 / 96e9
    assert measured < seconds < 1.1 * measured


def test_a_two_rank_group_with_one_rank_a_host_pays_the_slow_link(toy: Cluster) -> None:
    """https://github.com/meta-pytorch/autoparallel/pull/527: 1 GiB, 50 GB/s outside, is 21.5 ms and not 2.4 ms."""
    tiers = (Tier("node", 8, "nvlink", 450e9, 1e-6), Tier("fabric", 16, "roce", 50e9, 1e-6))
    cluster = Cluster("two", 16, toy.device, tiers)
    assert cluster.collective("all_reduce", 2**30, 2, 8).seconds == pytest.approx(21.5 * MS, rel=0.01)
    assert cluster.collective("all_reduce", 2**30, 2, 1).seconds == pytest.approx(2.4 * MS, rel=0.01)


def test_one_large_collective_beats_four_small_ones(toy: Cluster) -> None:
    tiers = (Tier("node", 8, "nvlink", 50e9, 12e-6),)
    cluster = Cluster("one", 8, toy.device, tiers)
    small, large = (cluster.collective("all_gather", size, 2, 1).seconds for size in (2**14, 2**16))
    assert (4 * small, large) == (pytest.approx(49e-6, rel=0.05), pytest.approx(13e-6, rel=0.05))


def test_curves_of_an_outer_tier_speak_for_groups_that_lie_as_theirs_did(toy: Cluster) -> None:
    """A curve over 4 ranks 8 apart is the price of that group, and of the outer step of larger groups; a curve over 32
    neighbours only that of 32 neighbours."""
    outer = Curve("all_gather", 4, 8, (10**6, 10**9), (1e-3, 1e-2))
    whole = Curve("all_gather", 32, 1, (10**6, 10**9), (1e-4, 1e-3))
    measured = dataclasses.replace(toy, tiers=(toy.tiers[0], dataclasses.replace(toy.tiers[1], curves=(outer,))))
    assert measured.collective("all_gather", 1e9, 4, 8).seconds == pytest.approx(1e-2)
    step = measured.collective("all_gather", 1e9, 32, 1)
    assert step.how == "all_gather fabric x4 (measured at 4) + all_gather node x8 (ring)"
    both = dataclasses.replace(toy, tiers=(toy.tiers[0], dataclasses.replace(toy.tiers[1], curves=(outer, whole))))
    flat = both.collective("all_gather", 1e9, 32, 1)
    assert (flat.seconds, flat.basis, flat.how) == (
        pytest.approx(1e-3),
        "measured",
        "all_gather fabric x32 (measured at 32)",
    )
    assert both.collective("all_gather", 1e9, 16, 2).how.startswith("all_gather fabric x4 (measured at 4)")


def test_errors_of_prices(toy: Cluster) -> None:
    with pytest.raises(
        ClusterError, match=r"collective 'broadcast': expected one of all_gather, reduce_scatter, all_reduce"
    ):
        toy.collective("broadcast", 1, 2, 1)
    with pytest.raises(
        ClusterError, match=r"group of 8 ranks 8 apart: expected to fit in 32 devices of toy, but it needs 64"
    ):
        toy.collective("all_gather", 1, 8, 8)


def test_every_shipped_cluster_prints_its_sources() -> None:
    for name in set(shipped()) - {"local"}:
        cluster = Cluster.load(name, devices=8)
        text = str(cluster)
        assert text.startswith(f"{name}: 8 devices")
        for tier in cluster.tiers:
            assert tier.name in text
        assert all(fact.source.startswith("https://") for fact in cluster.facts)
        assert text.count("https://") == len(cluster.facts) >= 14


def test_no_search_half_file_imports_torch() -> None:
    folder = Path(__file__).parents[2] / "hpsearch" / "cluster"
    assert not [path for path in folder.glob("*.py") if "import torch" in path.read_text()]
