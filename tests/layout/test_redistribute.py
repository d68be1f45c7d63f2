"""Sums over several axes as one: bytes over the slow links once, exact on every rank, no dearer on any cluster."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch

from hpsearch.cluster import Cluster, shipped
from hpsearch.layout import PARTIAL, REPLICATE, Collective, Layout, Mesh, Placement, redistribute, shard, steps_between
from hpsearch.layout.redistribute import PIECE_BYTES, path
from tests.lower.test_redistribution import check

TWO = Mesh.of(dp_replicate=4, tp=8)
"""4 nodes of 8: dp_replicate crosses them."""
BOTH = Layout.of({"dp_replicate": PARTIAL, "tp": PARTIAL})


def sent(c: Collective, mesh: Mesh) -> float:
    """Bytes that one rank of a ring sends."""
    n = mesh.size(c.axis)
    return c.nbytes * (n - 1) / n * (2 if c.kind == "all_reduce" else 1)


def over_slow_links(found: tuple[Collective, ...], mesh: Mesh, slow: str) -> float:
    """Bytes that all ranks of one node send out of it."""
    return sum(mesh.num_ranks / mesh.size(slow) * sent(c, mesh) for c in found if c.axis == slow)


def test_a_sum_over_two_axes_crosses_the_slow_links_once() -> None:
    """8 MiB on 4 nodes of 8: a ring over nodes needs 2 · 3/4 · 8 MiB = 12 MiB from each node. Axis by axis each of the
    8 ranks of a node sends that, 96 MiB."""
    shape, size = (2048, 2048), 2 * 2048 * 2048
    found = redistribute(shape, 2, BOTH, Layout(), TWO.sizes)
    assert found == (
        Collective("reduce_scatter", "tp", size),
        Collective("all_reduce", "dp_replicate", size // 8),
        Collective("all_gather", "tp", size),
    )
    assert over_slow_links(found, TWO, "dp_replicate") == 2 * 3 / 4 * size
    one_by_one = tuple(Collective("all_reduce", axis, size) for axis in ("dp_replicate", "tp"))
    assert over_slow_links(one_by_one, TWO, "dp_replicate") == 8 * over_slow_links(found, TWO, "dp_replicate")
    assert sum(sent(c, TWO) for c in found if c.axis == "tp") == sent(one_by_one[1], TWO), "and no more inside a node"


def test_three_axes_and_a_sum_that_ends_cut() -> None:
    mesh = Mesh.of(dp_replicate=2, dp_shard=4, tp=8)
    everywhere = Layout(tuple((axis, PARTIAL) for axis in mesh.names))
    shape, size = (8192, 2048), 2 * 8192 * 2048
    assert [(c.kind, c.axis, size // c.nbytes) for c in redistribute(shape, 2, everywhere, Layout(), mesh.sizes)] == [
        ("reduce_scatter", "tp", 1),
        ("reduce_scatter", "dp_shard", 8),
        ("all_reduce", "dp_replicate", 32),
        ("all_gather", "dp_shard", 8),
        ("all_gather", "tp", 1),
    ]
    stored = Layout.of({"dp_shard": shard(0)})
    assert [(c.kind, c.axis, size // c.nbytes) for c in redistribute(shape, 2, everywhere, stored, mesh.sizes)] == [
        ("reduce_scatter", "tp", 1),
        ("reduce_scatter", "dp_shard", 8),
        ("all_reduce", "dp_replicate", 32),
        ("all_gather", "tp", 4),
    ]


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((), BOTH, Layout()),  # a loss
        ((2**20,), BOTH, Layout()),  # 2 MiB
        ((1026, 1025), BOTH, Layout()),  # no dim that 8 divides
        ((2048, 2048), Layout.of({"tp": PARTIAL}), Layout()),  # one axis
        ((2048, 2048), BOTH, Layout.of({"tp": shard(0)})),  # the fast axis cuts anyway
    ],
)
def test_axis_by_axis_where_there_is_nothing_to_gain(shape: tuple[int, ...], source: Layout, target: Layout) -> None:
    assert steps_between(shape, 2, source, target, TWO.sizes) == path(source, target, TWO.names)


def test_a_cut_dim_is_left_alone() -> None:
    mesh = Mesh.of(dp_replicate=2, dp_shard=2, tp=2)
    source = Layout((("dp_replicate", PARTIAL), ("tp", PARTIAL), ("dp_shard", shard(0))))
    target = Layout((("dp_shard", shard(0)),))
    steps = steps_between((4096, 4096), 2, source, target, mesh.sizes)
    assert [(s.axis, str(s.source), str(s.target)) for s in steps] == [
        ("tp", "P", "S1"), ("dp_replicate", "P", "R"), ("tp", "S1", "R"),
    ]  # fmt: skip


PLACEMENTS: list[Placement] = [REPLICATE, PARTIAL, shard(0), shard(1)]


@pytest.mark.parametrize("mesh", [Mesh.of(dp_shard=2, tp=2), Mesh.of(dp_replicate=2, dp_shard=2, tp=2)], ids=str)
def test_every_rank_ends_with_its_piece(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered and run on all ranks, small tensors summed as one too."""
    monkeypatch.setattr(sys.modules["hpsearch.layout.redistribute"], "PIECE_BYTES", 0)
    together = 0
    for first, second in product(PLACEMENTS, PLACEMENTS):
        source = Layout(tuple((axis, PARTIAL) for axis in mesh.names))
        ends = dict(zip(reversed(mesh.names), (first, second), strict=False))
        target = Layout(tuple((axis, ends[axis]) for axis in mesh.names if axis in ends))
        if first == second == PARTIAL or (first.is_shard and second.is_shard and first.dim == second.dim):
            continue
        together += steps_between((8, 4, 6), 8, source, target, mesh.sizes) != path(source, target, mesh.names)
        check(torch.randn(8, 4, 6).double(), source, target, mesh)
    assert together >= 3


NODES = [n for n in sorted(set(shipped()) - {"local"}) if Cluster.load(n, devices=1).tiers[-1].size >= 128]


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("piece", [PIECE_BYTES, 2**21, 2**25, 2**29])
def test_together_is_cheaper_over_slow_links(name: str, piece: int) -> None:
    cluster = Cluster.load(name, devices=128)
    fast = next(tier.size for tier in cluster.tiers if tier.name == "node")
    fast = max(tier.size if tier.like else fast for tier in cluster.tiers)
    mesh, nbytes = Mesh.of(dp_replicate=128 // fast, tp=fast), piece * fast
    found = redistribute((nbytes // 1024, 512), 2, BOTH, Layout(), mesh.sizes)
    assert len(found) == 3
    one_by_one = tuple(Collective("all_reduce", axis, nbytes) for axis in ("dp_replicate", "tp"))

    def seconds(collectives: tuple[Collective, ...]) -> float:
        axes = [mesh.axis(c.axis) for c in collectives]
        return sum(
            cluster.collective(c.kind, c.nbytes, axis.size, axis.stride).seconds
            for c, axis in zip(collectives, axes, strict=True)
        )

    assert seconds(found) < seconds(one_by_one)
