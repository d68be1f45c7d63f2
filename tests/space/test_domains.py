"""Hybrid sharding goes over whole domains of a tier, on clusters of three tiers too."""

from __future__ import annotations

from hpsearch.cluster import Cluster
from hpsearch.space.space import domains


def test_devices_of_a_domain() -> None:
    assert domains(Cluster.load("gb200-nvl72", devices=144)) == [4, 72]
    assert domains(Cluster.load("h100-sxm-roce400", devices=64)) == [8]
    atlas = Cluster.load("atlas-800-a3", devices=768)
    assert domains(atlas) == [tier.size for tier in atlas.tiers[:-1]] == [2, 16, 768]
