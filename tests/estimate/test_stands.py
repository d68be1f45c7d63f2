"""Stages on groups of unlike nodes: who computes how fast, who has which room, by the estimate of like devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from hpsearch.cluster import Cluster, Group
from hpsearch.errors import LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout, efficiency_of, estimate, memory, price
from hpsearch.estimate.many import estimate_all
from hpsearch.estimate.memory import rank_memory
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stands import arrangements, stands_of

SHAPE = ModelShape("wide", 16384, 128, 8, 128, 32000, transformer(8, 0, 0), ffn=53248)
ALIKE = Cluster.load("h100-sxm-roce400", devices=32)
FAST, LITTLE = Group("fast", 16), Group("little", 8, 10**10)
SLOW = Group("slow", 8, compute=0.5, memory_bytes_per_s=2e12)
CLUSTER = replace(ALIKE, groups=(FAST, SLOW, LITTLE))
LAYOUT = ParallelLayout(devices=32, seq_len=4096, micro_batch=1, global_batch=64, tp=8, pp=4, cut=(2, 2, 2, 2))


def test_a_stage_computes_as_the_devices_of_its_group() -> None:
    """`slow` as a cluster of slow devices alone; `little` as the others."""
    rates = efficiency_of(ALIKE.device.name)
    forward, backward = price(SHAPE, LAYOUT, CLUSTER).chunk_seconds(rates)
    fast = price(SHAPE, LAYOUT, ALIKE).chunk_seconds(rates)
    slow = price(SHAPE, LAYOUT, replace(ALIKE, device=CLUSTER.among(("slow",)).device)).chunk_seconds(rates)
    for found, like, unlike in ((forward, fast[0], slow[0]), (backward, fast[1], slow[1])):
        assert found.tolist() == [like[0], like[1], unlike[2], like[3]]
        assert (unlike > 1.3 * like).all()
    told = replace(LAYOUT, stage_groups=("slow", "fast", "little", "fast"))
    forward, _ = price(SHAPE, told, CLUSTER).chunk_seconds(rates)
    assert forward.tolist() == [slow[0][0], *fast[0][1:]]


def test_virtual_stages_stand_where_their_rank_does() -> None:
    layout = replace(LAYOUT, vpp=2, cut=(1,) * 8)
    rates = efficiency_of(ALIKE.device.name)
    forward, _ = price(SHAPE, layout, CLUSTER).chunk_seconds(rates)
    like = price(SHAPE, layout, ALIKE).chunk_seconds(rates)[0]
    assert (forward[[2, 6]] > 1.3 * like[[2, 6]]).all()
    others = [0, 1, 3, 4, 5, 7]
    assert forward[others].tolist() == like[others].tolist()


@pytest.mark.parametrize("pp", [1, 2])
def test_stages_that_span_groups_are_those_of_the_weakest(pp: int) -> None:
    """One stage over all, or one over `slow` and `little`: then all wait, and all have the smallest memory."""
    layout = replace(LAYOUT, pp=pp, cut=())
    assert stands_of(CLUSTER, layout) == ((("fast", "slow", "little"),) if pp == 1 else (("fast",), ("slow", "little")))
    weak = replace(ALIKE, device=CLUSTER.among(("slow", "little")).device)
    rates = efficiency_of(ALIKE.device.name)
    found, all_weak, like = (price(SHAPE, layout, one).chunk_seconds(rates)[0] for one in (CLUSTER, weak, ALIKE))
    assert found.tolist() == ([all_weak[0]] if pp == 1 else [like[0], all_weak[1]])
    if pp == 1:
        assert estimate(SHAPE, layout, CLUSTER).step_s == estimate(SHAPE, layout, weak).step_s
        assert estimate(SHAPE, layout, CLUSTER).room_bytes == 10**10


def test_memory_is_that_of_the_rank_with_the_least_left() -> None:
    """The first rank is the fullest, the fourth has 10 GB."""
    found = estimate(SHAPE, LAYOUT, CLUSTER)
    assert memory(SHAPE, LAYOUT).rank == 0
    assert (found.memory.rank, found.room_bytes) == (3, 10**10)
    assert found.memory == rank_memory(SHAPE, LAYOUT, 3)
    first = estimate(SHAPE, replace(LAYOUT, stage_groups=("little", "fast", "fast", "slow")), CLUSTER)
    assert (first.memory.rank, first.room_bytes) == (0, 10**10)
    alike = estimate(SHAPE, LAYOUT, ALIKE)
    assert (alike.memory.rank, alike.room_bytes) == (0, ALIKE.device.memory_bytes)


def test_many_at_once_are_each_alone() -> None:
    layouts = [LAYOUT, replace(LAYOUT, stage_groups=("slow", "fast", "little", "fast")), replace(LAYOUT, pp=2, cut=())]
    found = estimate_all(SHAPE, layouts, CLUSTER).step_s
    assert found == pytest.approx([estimate(SHAPE, one, CLUSTER).step_s for one in layouts], rel=1e-12)
    assert len(np.unique(found)) == 3


def test_every_arrangement_is_told_once() -> None:
    """4 stages on 2 + 1 + 1 nodes: 4!/2! ways; 2 stages of which one spans: by the order of the groups; 16 on
    8 + 4 + 4: too many, so groups stay together."""
    few = arrangements(CLUSTER, 4, 8)
    assert len(few) == len(set(few)) == 12
    assert all(sorted(one) == [("fast",), ("fast",), ("little",), ("slow",)] for one in few)
    assert set(arrangements(CLUSTER, 2, 16)) == {
        (("fast",), ("slow", "little")), (("fast", "slow"), ("fast", "little")),
        (("fast", "little"), ("fast", "slow")), (("slow", "little"), ("fast",)),
    }  # fmt: skip
    many = arrangements(CLUSTER, 16, 2)
    assert len(many) == 6
    assert all(sum(a != b for a, b in pairwise(one)) == 2 for one in many)
    assert arrangements(ALIKE, 4, 8) == ((),)


@pytest.mark.parametrize(
    "told",
    ["fast fast fast fast", "fast fast slow", "fast fast slow new", "fast fast slow slow", "slow+little"],
)
def test_stages_stand_on_devices_that_are_there(told: str) -> None:
    layout = replace(LAYOUT, stage_groups=tuple(told.split()))
    with pytest.raises(LegalityError, match=r"stage_groups: expected 4 stages of 8 devices on 16 of 'fast', 8 of "):
        estimate(SHAPE, layout, CLUSTER)


def test_like_devices_have_no_groups() -> None:
    with pytest.raises(
        LegalityError, match="expected none on h100-sxm-roce400, whose devices are all alike, but found"
    ):
        estimate(SHAPE, replace(LAYOUT, stage_groups=("fast",) * 4), ALIKE)
