"""Hops of an axis: each reaches the right part of what the hop before left, and together they reach every rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from hpsearch.layout import Mesh, MeshAxis


@pytest.mark.parametrize("hops", [(), (8,), (2, 4), (4, 2), (2, 2, 2)])
def test_hops_reach_every_rank_of_the_axis_once(hops: tuple[int, ...]) -> None:
    axes = (MeshAxis("dp_shard", 3, 16), MeshAxis("ep", 8, 2), MeshAxis("tp", 2, 1))
    mesh = Mesh(tuple(replace(a, hops=hops) if a.name == "ep" else a for a in axes))
    assert [axis.name for axis in mesh.hops] == [f"ep/{i}" for i in range(len(hops))]
    assert mesh.names == ("dp_shard", "ep", "tp")
    for rank in range(mesh.num_ranks):
        reached = [rank]
        for hop in mesh.hops:
            reached = [other for here in reached for other in mesh.group(hop.name, here)]
        assert sorted(reached) == list(mesh.group("ep", rank) if hops else (rank,))
        inside = [mesh.group(hop.name, rank) for hop in mesh.hops]
        for outer, inner in pairwise(inside):
            assert max(inner) - min(inner) < outer[1] - outer[0], "an outer hop steps over whole domains"
