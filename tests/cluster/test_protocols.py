"""What one call of a library runs across nodes, full meshes, and jobs that fill racks alike: by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hpsearch.cluster import COLLECTIVES, Cluster, Curve, Tier
from hpsearch.cluster.protocol import Protocol, Switches, SwitchTree
from hpsearch.cluster.read import parse, read
from hpsearch.cluster.tier import packed
from hpsearch.cluster.write import write
from hpsearch.errors import ClusterError

from .test_files import GOOD

US = 1e-6
SMALL = Protocol("LL", 5 * US, 1 * US, 4 * US, 1 * US, 8 * US, 0.25, 0.5, 4e9)
LARGE = Protocol("Simple", 8 * US, 6 * US, 20 * US, 30 * US, 50 * US, 1.0, 0.5)


@pytest.fixture
def crossed(toy: Cluster) -> Cluster:
    """4 nodes of 8 at 100 GB/s, 10 GB/s a rank between them: 80 GB/s a node."""
    return dataclasses.replace(
        toy, tiers=(toy.tiers[0], dataclasses.replace(toy.tiers[1], protocols=(SMALL, LARGE)))
    )  # fmt: skip


BY_HAND = [
    # 32 ranks: 28 inner and 3 outer hops, twice for all_reduce
    ("all_gather", 1e9, 32, 1, 8 * US + (28 * 6 + 3 * 20) * US + 31 / 32 / 80, "Simple ring"),
    ("reduce_scatter", 1e3, 32, 1, 5 * US + (28 * 1 + 3 * 4) * US + 31 / 32 * 1e3 / 4e9, "LL ring"),
    ("all_reduce", 1e9, 32, 1, 8 * US + 2 * (28 * 6 + 3 * 20) * US + 2 * 31 / 32 / 80, "Simple ring"),
    # a tree: 7 inner hops and log2(4) outer ones, up and down
    ("all_reduce", 1e3, 32, 1, 5 * US + 2 * (7 * 1 + 2 * 8) * US + 2 * 1e3 / 8e9, "LL tree"),
    # 4 ranks a node bring 40 GB/s; one rank a node 10 GB/s and no inner hop
    ("all_gather", 1e9, 16, 2, 8 * US + (12 * 6 + 3 * 20) * US + 15 / 16 / 40, "Simple ring"),
    ("all_gather", 1e9, 4, 8, 8 * US + 3 * 20 * US + 3 / 4 / 10, "Simple ring"),
]


@pytest.mark.parametrize(("kind", "nbytes", "size", "stride", "seconds", "how"), BY_HAND)
def test_rings_and_trees_by_hand(
    crossed: Cluster, kind: str, nbytes: float, size: int, stride: int, seconds: float, how: str
) -> None:
    price = crossed.collective(kind, nbytes, size, stride)
    assert (price.seconds, price.basis) == (pytest.approx(seconds, rel=1e-12), "modelled")
    assert price.how == f"{kind} fabric x{size} ({how})"


def test_a_node_passes_on_no_more_than_its_links_carry(crossed: Cluster) -> None:
    node, fabric = crossed.tiers
    slow = dataclasses.replace(crossed, tiers=(dataclasses.replace(node, bytes_per_s=50e9), fabric))
    expected = 8 * US + (28 * 6 + 3 * 20) * US + 31 / 32 / 50
    assert slow.collective("all_gather", 1e9, 32, 1).seconds == pytest.approx(expected)


def test_rings_grow_with_ranks_and_trees_with_their_logarithm(crossed: Cluster) -> None:
    node, fabric = crossed.tiers
    wide = Cluster("wide", 4096, crossed.device, (node, dataclasses.replace(fabric, size=4096)))
    rings = [wide.collective("all_gather", 8, size, 1).seconds - SMALL.start_s for size in (64, 256, 1024, 4096)]
    assert np.all(np.array(rings[1:]) / rings[:-1] > 3.9)
    trees = [wide.collective("all_reduce", 8, size, 1).seconds for size in (64, 256, 1024, 4096)]
    assert np.diff(trees) == pytest.approx(2 * 2 * SMALL.tree_outer_s)


def test_inside_a_node_and_for_exchanges_nothing_changes(toy: Cluster, crossed: Cluster) -> None:
    for kind in COLLECTIVES:
        assert crossed.collective(kind, 1e6, 8, 1) == toy.collective(kind, 1e6, 8, 1)
    for size, stride in ((32, 1), (4, 8), (16, 2)):
        assert crossed.collective("all_to_all", 1e6, size, stride) == toy.collective("all_to_all", 1e6, size, stride)


SWITCHES = SwitchTree(25 * US, 20 * US, 0.8, 8e6, 5)


@pytest.mark.parametrize(
    ("nbytes", "window"),
    [(1e6, 1e6), (4e6, 4e6), (6e6, 4e6), (8e6, 4e6), (12e6, 6e6), (16e6, 8e6), (1e9, 8e6)],
)
def test_switches_that_add_up_by_hand(crossed: Cluster, nbytes: float, window: float) -> None:
    """4 nodes: log2(4) hops up and down, each waits for a window at the node's 80 GB/s; of more than two nodes each
    sends twice, so bytes pass at 0.8 of 40 GB/s, or as a node alone takes, whichever is slower."""
    node, fabric = crossed.tiers
    cluster = dataclasses.replace(crossed, tiers=(node, dataclasses.replace(fabric, switch_tree=SWITCHES)))
    found = {p.how: p.seconds for p in cluster.ways("all_reduce", nbytes, 32, 1)}
    inside = crossed.collective("all_reduce", nbytes, 8, 1).seconds
    expected = 4 * (20 * US + window / 80e9) + max(inside, 25 * US + nbytes / (0.8 * 40e9))
    assert found["all_reduce fabric x32 (switch tree)"] == pytest.approx(expected, rel=1e-12)
    two = {p.how: p.seconds for p in cluster.ways("all_reduce", nbytes, 16, 1)}
    expected = 2 * (20 * US + window / 80e9) + max(inside, 25 * US + nbytes / (0.8 * 80e9))
    assert two["all_reduce fabric x16 (switch tree)"] == pytest.approx(expected, rel=1e-12)


def test_switches_of_one_tier_by_hand(toy: Cluster) -> None:
    """Once to the switches and once back at 0.6 of 100 GB/s, whatever the group; from 5 ranks on, unless measured."""
    node, fabric = toy.tiers
    switches = Switches(25 * US, 0.6, 5)
    cluster = dataclasses.replace(toy, tiers=(dataclasses.replace(node, switches=switches), fabric))
    ring = 14 * US + 17.5e-3
    assert toy.collective("all_reduce", 1e9, 8, 1).seconds == pytest.approx(ring)
    found = cluster.ways("all_reduce", 1e9, 8, 1)
    assert (found[0].how, found[0].seconds) == ("all_reduce node x8 (switches)", pytest.approx(25 * US + 1e9 / 60e9))
    assert found[1].seconds == pytest.approx(ring)
    assert cluster.collective("all_reduce", 1e9, 4, 1) == toy.collective("all_reduce", 1e9, 4, 1)
    assert cluster.collective("all_gather", 1e9, 8, 1) == toy.collective("all_gather", 1e9, 8, 1)
    curve = Curve("all_reduce", 8, 1, (1000, 10**9), (1e-3, 5e-2))
    slow = dataclasses.replace(node, switches=switches, curves=(curve,))
    measured = dataclasses.replace(toy, tiers=(slow, fabric))
    assert measured.collective("all_reduce", 1e9, 8, 1).seconds == pytest.approx(5e-2)


def test_switches_take_part_from_enough_ranks_of_a_node_on(crossed: Cluster) -> None:
    node, fabric = crossed.tiers
    cluster = dataclasses.replace(crossed, tiers=(node, dataclasses.replace(fabric, switch_tree=SWITCHES)))
    for size, stride in ((16, 2), (4, 8)):  # 4 ranks and 1 rank a node
        assert cluster.ways("all_reduce", 1e6, size, stride) == crossed.ways("all_reduce", 1e6, size, stride)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert cluster.ways(kind, 1e6, 32, 1) == crossed.ways(kind, 1e6, 32, 1)


def test_ways_are_named_and_the_first_is_the_price(crossed: Cluster) -> None:
    found = crossed.ways("all_reduce", 1e6, 32, 1)
    assert sorted(p.how.partition("x32 ")[2] for p in found) == [
        "(LL ring)", "(LL tree)", "(Simple ring)", "(Simple tree)",
    ]  # fmt: skip
    assert found[0].how == "all_reduce fabric x32 (LL tree)"
    assert found[0] == crossed.collective("all_reduce", 1e6, 32, 1)
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)


def test_a_measured_curve_comes_before_the_library_model(crossed: Cluster) -> None:
    node, fabric = crossed.tiers
    curve = Curve("all_reduce", 32, 1, (1000, 10**9), (1e-3, 5e-2))
    measured = dataclasses.replace(crossed, tiers=(node, dataclasses.replace(fabric, curves=(curve,))))
    assert measured.collective("all_reduce", 1000, 32, 1).basis == "measured"
    assert measured.collective("all_reduce", 1000, 32, 1).seconds == pytest.approx(1e-3)
    assert measured.collective("all_gather", 1000, 32, 1) == crossed.collective("all_gather", 1000, 32, 1)
    assert measured.collective("all_reduce", 1000, 16, 1) == crossed.collective("all_reduce", 1000, 16, 1)


def test_a_small_group_of_a_full_mesh_uses_few_of_its_links(toy: Cluster) -> None:
    """MI300X: 448 GB/s over seven links; all_reduce of 4 GiB at 312.9 GB/s bus bandwidth on 8 and 47.7 on 2
    (https://github.com/stas00/ml-engineering/blob/master/network/README.md)."""
    mesh = Tier("node", 8, "xgmi", 448e9, 1e-9, efficiency=0.7, wiring="full-mesh")
    cluster = Cluster("mesh", 8, toy.device, (mesh,))
    for size, bus in ((8, 312.9e9), (2, 47.7e9)):
        measured = 2 * (size - 1) / size * 2**32 / bus
        assert cluster.collective("all_reduce", 2**32, size, 1).seconds == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("devices", "rack"), [(72, 72), (64, 72), (144, 72), (128, 64), (256, 64), (1024, 64), (216, 72), (292, 72)]
)
def test_racks_are_filled_alike(devices: int, rack: int) -> None:
    """292 = 4 · 73: no equal parts of more than one tray, so nothing is said and groups lie unevenly."""
    tiers = (Tier("node", 4, "nvlink", 9e11, 1e-6), Tier("rack", 72, "nvlink", 9e11, 1e-6))
    tiers = (*tiers, Tier("fabric", 9216, "infiniband", 5e10, 1e-5))
    assert [tier.size for tier in packed(tiers, devices)] == [4, rack, 9216]
    if devices == 256:
        cluster = Cluster("racks", devices, read(GOOD, "x").device, packed(tiers, devices))
        assert cluster.shape(4, 64).counts == (4, 4, 1)
        assert cluster.tier_of(64, 1).name == "rack"


def test_a_rack_on_the_switches_of_its_trays_costs_what_they_cost(toy: Cluster) -> None:
    curves = tuple(Curve("all_gather", n, 1, (1000, 10**9), (n * US, n * 1e-3)) for n in (2, 4))
    tray = Tier("node", 4, "nvlink", 9e11, 1e-6, curves=curves)
    cluster = Cluster("rack", 16, toy.device, (tray, Tier("rack", 16, "nvlink", 9e11, 1e-6, like="node")))
    near, far = (cluster.collective("all_gather", 10**6, 4, stride) for stride in (1, 4))
    assert (far.seconds, near.basis, far.basis) == (near.seconds, "measured", "modelled")
    assert far.how == "all_gather rack x4 (measured at 4)"
    scaled = curves[1].latency_s * 7 / 3 + (4e-3 - curves[1].latency_s) * (7 / 8) / (3 / 4)
    flat = next(p for p in cluster.ways("all_gather", 10**9, 8, 1) if p.how.startswith("all_gather rack x8"))
    assert (flat.seconds, flat.how) == (pytest.approx(scaled), "all_gather rack x8 (scaled from 4 measured)")


def test_beyond_the_last_size_time_grows_as_it_did_last() -> None:
    """7 us of 10 at the last size are for the last three quarters of its bytes; a byte is never free."""
    sizes = np.array([5e8, 2e9])
    curve = Curve("all_gather", 2, 1, (10**6, 10**8, 2 * 10**8, 4 * 10**8), (2 * US, 3 * US, 6 * US, 10 * US))
    assert curve.at(sizes) == pytest.approx([10 * US + 1e8 * 7 * US / 3e8, 10 * US + 16e8 * 7 * US / 3e8])
    noisy = Curve("all_gather", 2, 1, (10**6, 10**8, 2 * 10**8), (2 * US, 2 * US, 2 * US))
    assert noisy.at(sizes) == pytest.approx(2 * US + (sizes - 2e8) * 0.8 * US / 1e8)


def test_unknown_attention_is_refused(toy: Cluster) -> None:
    line = 'attention_efficiency = { value = 0.4, unit = "fraction", kind = "fitted", source = "here" }\n'
    device = read(GOOD.replace(line, ""), "x").device
    assert device.attention_efficiency is None
    with pytest.raises(ClusterError, match=r"device gpu: expected the share of peak that attention reaches, but no"):
        device.attention_s(1e9, 1e6, "bfloat16")


PROTOCOL = """
[[tiers.protocols]]
name = "Simple"
start = { value = 8.4, unit = "us", kind = "published", source = "here" }
ring_inner = { value = 3.4, unit = "us", kind = "published", source = "here" }
ring_outer = { value = 9.6, unit = "us", kind = "published", source = "here" }
tree_inner = { value = 28, unit = "us", kind = "published", source = "here" }
tree_outer = { value = 50, unit = "us", kind = "published", source = "here" }
ring_share = { value = 0.87, unit = "fraction", kind = "fitted", source = "here" }
tree_share = { value = 0.9, unit = "fraction", kind = "fitted", source = "here" }
channel = { value = 16.7, unit = "GB/s", kind = "published", source = "here" }
"""


def test_protocols_are_read_and_written() -> None:
    text = GOOD + PROTOCOL
    found = read(text, "x")
    expected = Protocol("Simple", 8.4 * US, 3.4 * US, 9.6 * US, 28 * US, 50 * US, 0.87, 0.9, 16.7e9)
    assert dataclasses.astuple(found.tiers[1].protocols[0]) == pytest.approx(dataclasses.astuple(expected))
    assert parse(write(parse(text, "x")), "y") == parse(text, "x")
    assert next(f.path for f in found.facts if "Simple" in f.path) == "fabric.Simple.start"
    plain, crossed = (Cluster("a", 8, d.device, d.tiers).digest for d in (read(GOOD, "x"), found))
    assert plain != crossed


SWITCHED = """
[tiers.switches]
start = { value = 25, unit = "us", kind = "published", source = "here" }
share = { value = 0.6, unit = "fraction", kind = "fitted", source = "here" }
members = { value = 5, unit = "devices", kind = "measured", source = "here" }
"""
SWITCH_TREE = """
[tiers.switch_tree]
start = { value = 25, unit = "us", kind = "published", source = "here" }
outer = { value = 20.9, unit = "us", kind = "published", source = "here" }
share = { value = 0.8, unit = "fraction", kind = "published", source = "here" }
window = { value = 16, unit = "MiB", kind = "published", source = "here" }
members = { value = 5, unit = "devices", kind = "measured", source = "here" }
"""


def test_trees_of_switches_are_read_written_and_checked() -> None:
    text = GOOD + PROTOCOL + SWITCHED + SWITCH_TREE
    found = read(text, "x")
    assert found.tiers[1].switches == Switches(25 * US, 0.6, 5)
    with pytest.raises(ClusterError, match=r"tiers\[1\]\.switches\.share: expected 0.01 fraction to 1 fraction"):
        read(text.replace("0.6,", "6,"), "x")
    assert found.tiers[1].switch_tree == SwitchTree(25 * US, pytest.approx(20.9 * US), 0.8, 2.0**24, 5)
    assert parse(write(parse(text, "x")), "y") == parse(text, "x")
    assert "fabric.switch_tree.window" in {f.path for f in found.facts}
    with pytest.raises(
        ClusterError, match=r"switch_tree: expected protocols beside the tree of switches, but found none"
    ):
        read(GOOD + SWITCH_TREE, "x")
    with pytest.raises(ClusterError, match=r"tiers\[1\]\.switch_tree\.outer: expected 0.01 us to 1 ms for one hop"):
        read(text.replace('20.9, unit = "us"', '20.9, unit = "ms"'), "x")


def test_protocols_and_meshes_that_cannot_be() -> None:
    with pytest.raises(ClusterError, match=r"tiers\[1\]\.protocols\[0\]\.ring_inner: expected 0.01 us to 1 ms for one"):
        read(GOOD + PROTOCOL.replace('3.4, unit = "us"', '3.4, unit = "ms"'), "x")
    with pytest.raises(ClusterError, match=r"protocols\[0\]\.tree_share: expected 0.01 fraction to 1 fraction"):
        read(GOOD + PROTOCOL.replace("0.9,", "9,"), "x")
    with pytest.raises(ClusterError, match=r"protocols\[0\]\.start\.source: expected a URL or a key of \[sources\]"):
        read(GOOD + PROTOCOL.replace('source = "here"', 'source = "there"', 1), "x")
    with pytest.raises(ClusterError, match=r"tiers\[1\]\.wiring: expected a full mesh on the innermost tier alone"):
        read(GOOD + 'wiring = "full-mesh"\n', "x")
    inner = GOOD.replace("[[tiers.collectives]]", PROTOCOL + "[[tiers.collectives]]", 1)
    with pytest.raises(ClusterError, match=r"tiers\[0\]\.protocols: expected protocols on a tier that joins"):
        read(inner, "x")
