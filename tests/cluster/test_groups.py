"""[[groups]]: nodes that have less than [device]; what a group, or several together, computes as; what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpsearch.cluster import Cluster, Group
from hpsearch.cluster.read import parse, read
from hpsearch.cluster.write import write
from hpsearch.errors import ClusterError
from tests.cluster.test_files import GOOD

GROUPS = """\
[[groups]]
name = "new"
nodes = 2
[[groups]]
name = "small"
nodes = 1
memory = { value = 40, unit = "GB", kind = "specification", source = "here" }
memory_bandwidth = { value = 1.555, unit = "TB/s", kind = "specification", source = "here" }
[[groups]]
name = "slow"
nodes = 1
compute = { value = 0.7, unit = "times the device", kind = "measured", source = "here" }
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "cluster.toml").write_text(GOOD + GROUPS)
    return Cluster.load(tmp_path, devices=32)


def test_groups_are_read_and_written(cluster: Cluster) -> None:
    assert cluster.groups == (
        Group("new", 16), Group("small", 8, memory_bytes=40 * 10**9, memory_bytes_per_s=1.555e12),
        Group("slow", 8, compute=0.7),
    )  # fmt: skip
    entry = parse(GOOD + GROUPS, "x")
    assert parse(write(entry), "y") == entry
    assert {fact.path for fact in cluster.facts} >= {"small.memory", "small.memory_bandwidth", "slow.compute"}
    told = " ".join(str(cluster).split())
    assert "small 8 40 GB 1555 GB/s x 1" in told
    assert "slow 8 80 GB 3350 GB/s x 0.7" in told


def test_the_digest_knows_groups_and_files_without_them_keep_theirs(cluster: Cluster) -> None:
    found = read(GOOD, "x")
    plain = Cluster(found.name, 32, found.device, found.tiers)
    assert replace(cluster, groups=()).digest == plain.digest != cluster.digest
    slower = replace(cluster, groups=(*cluster.groups[:2], replace(cluster.groups[2], compute=0.6)))
    assert slower.digest != cluster.digest


def test_what_waits_for_groups_computes_as_the_weakest_of_them(cluster: Cluster) -> None:
    """At measured sizes by the rate itself; what memory bounds by bandwidth; a kernel's start as everywhere."""
    new, small, slow, both = (cluster.among(one) for one in (("new",), ("small",), ("slow",), ("small", "slow")))
    assert new.device == cluster.device
    assert [one.device.memory_bytes // 10**9 for one in (new, small, slow, both)] == [80, 40, 80, 40]
    large = [float(one.matmul_s(2**16, 2**16, 2**16, "bfloat16")) for one in (new, small, slow, both)]
    assert large == pytest.approx([large[0], large[0], large[0] / 0.7, large[0] / 0.7], rel=1e-3)
    thin = [float(one.matmul_s(16, 2**16, 2**16, "bfloat16")) for one in (new, small, slow, both)]
    assert thin == pytest.approx([thin[0], thin[0] * 3.35 / 1.555, thin[0], thin[0] * 3.35 / 1.555], rel=1e-2)
    for one, rate in ((new, 3.35e12), (slow, 3.35e12), (small, 1.555e12), (both, 1.555e12)):
        assert one.memory_bound_s(1e9) == pytest.approx(4e-6 + 1e9 / (rate * 0.8))
    flops = np.array([1e12, 1e13])
    fast_s, slow_s = (one.attention_s(flops, 1.0, "bfloat16") - 4e-6 for one in (new, slow))
    assert slow_s == pytest.approx(fast_s / 0.7)
    assert both.collective("all_reduce", 1e9, 8, 1) == cluster.collective("all_reduce", 1e9, 8, 1)
    assert cluster.among(("slow",)) is slow


def test_nothing_is_faster_on_a_group_than_on_the_device(cluster: Cluster) -> None:
    """What bounds rest on: over shapes that lie on, between and far from the tables."""
    sizes = np.array([1, 16, 100, 1024, 5000, 65536])
    m, n, k = np.meshgrid(sizes, sizes, sizes)
    fast = cluster.matmul_s(m, n, k, "bfloat16")
    for names in (("small",), ("slow",), ("small", "slow"), ("new",)):
        assert (cluster.among(names).matmul_s(m, n, k, "bfloat16") >= fast * (1 - 1e-12)).all()


def test_groups_have_to_add_up(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(GOOD + GROUPS)
    with pytest.raises(ClusterError) as caught:
        Cluster.load(tmp_path, devices=16)
    assert str(caught.value) == (
        "cluster small: expected the 32 devices of its groups (2 nodes of 'new', 1 node of 'small', 1 node of 'slow', "
        "8 a node), but got 16. Ask for 32, or state the groups that are in use."
    )


BROKEN = [
    ('unit = "times the device"', 'unit = "fraction"', "groups[2].compute.unit: expected a unit of compute (times the "
     "device), but found 'fraction', a unit of fraction"),
    ("value = 0.7", "value = 1.2", "groups[2].compute: expected 0.01 times the device to 1 times the device for a rate "
     "over the device's, but found 1.2 times the device"),
    ("value = 40, unit", "value = 96, unit", "groups[1].memory: expected at most the 80 GB of [device], but found 96 "
     "GB. Let [device] describe the best of the nodes."),
    ("value = 1.555", "value = 8", "groups[1].memory_bandwidth: expected at most the 3350 GB/s of [device], but "
     "found 8 TB/s."),
    ("nodes = 2", "nodes = 0", "groups[0].nodes: expected 1 or more, but found 0"),
    ("nodes = 2", "node = 2", "groups[0].nodes: expected this field, but it is missing"),
    ('name = "small"', 'name = "new"', "groups[1].name: expected a new name without +, but found 'new'. Rename it."),
    ('name = "small"', 'name = "a+b"', "groups[1].name: expected a new name without +, but found 'a+b'. Rename it."),
    ('memory = { value = 40, unit = "GB", kind = "specification", source = "here" }', "memory = 40",
     "groups[1].memory: expected a table"),
    ('"measured", source = "here"', '"measured", source = "there"', "groups[2].compute.source: expected a URL or a"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BROKEN, ids=[b[2][:30] for b in BROKEN])
def test_a_broken_group_is_refused(old: str, new: str, message: str) -> None:
    assert GROUPS.count(old) == 1
    with pytest.raises(ClusterError) as caught:
        read(GOOD + GROUPS.replace(old, new), "my.toml")
    assert message in str(caught.value)
