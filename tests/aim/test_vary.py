"""Wrong prices: simulations again equal pricing each one alone; plans keep their band; the robust layout equals the
best worst case over every corner of the prices, of every layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hpsearch.aim import Aim, reach, steadiness, steady, ties
from hpsearch.aim.vary import TERMS, Draw, again_s, band_of, dearer
from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.errors import LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout, estimate, memory, price
from hpsearch.estimate.pins import layout_of
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.work import moe
from hpsearch.space import Space, best
from tests.aim.test_reach import BASE, CASES
from tests.space.naive import Pins, every_layout, step_s

DENSE = ModelShape("dense", 4096, 32, 8, 128, 128256, transformer(16, 0, 0), ffn=14336)
EXPERTS = ModelShape(
    "experts", 2048, 32, 4, 128, 64000, transformer(8, 0, 64), experts=64, top_k=8, moe_ffn=768, shared_ffn=768
)
PLANS: dict[str, tuple[ModelShape, str, int, Pins]] = {
    "data ranks": (DENSE, "h100-sxm-roce400", 32, {}),
    "tensor": (DENSE, "a100-sxm-selene", 16, {"tp": (4,)}),
    "pipeline": (DENSE, "h100-sxm-roce400", 16, {"pp": (4,), "micro_batch": (1,), "vpp": (1,)}),
    "virtual stages": (DENSE, "b200-hgx-ib400", 16, {"pp": (2,), "vpp": (2,), "micro_batch": (1,)}),
    "experts": (EXPERTS, "h800-sxm-ib400", 16, {"ep": (8,)}),
    "three tiers": (EXPERTS, "atlas-800-a3", 16, {"ep": (4,), "pp": (1,)}),
    "fully sharded": (DENSE, "gb200-nvl72", 32, {"zero": (3,)}),
}


def space_of(name: str) -> Space:
    shape, machine, devices, pins = PLANS[name]
    return Space(shape, Cluster.load(machine, devices=devices), replace(BASE, global_batch=64), pins)


@pytest.mark.parametrize("name", PLANS)
def test_four_of_five_simulations_lie_in_the_band(name: str) -> None:
    space = space_of(name)
    layout = best(space, gap=0.02).best.layout
    found = steadiness(space, layout)
    assert found.draws == 1000
    assert found.inside >= 0.8
    assert found.least_s < found.most_s
    assert found == steadiness(space, layout)
    told = estimate(space.shape, layout, space.cluster)
    assert (found.low_s, found.high_s) == pytest.approx((told.low_s, told.high_s), rel=0.02)
    assert found.seed != (other := steadiness(space, layout, seed=1)).seed
    assert found.least_s != other.least_s


@pytest.mark.parametrize("name", ["pipeline", "virtual stages", "experts", "fully sharded"])
def test_simulations_equal_pricing_alone(name: str) -> None:
    space = space_of(name)
    layout, cluster = best(space, gap=0.02).best.layout, space.cluster
    draw = Draw.of(cluster, 6, 3)
    for terms, links, found in zip(draw.terms, draw.links, again_s(space.shape, layout, cluster, draw), strict=True):
        there = dearer(cluster, terms.tolist(), draw.levels[links].tolist())
        one = price(space.shape, layout, there)
        assert found == pytest.approx(step_s(one, efficiency_of(there.device.name, there.efficiency)), rel=1e-9)
    low, high = band_of(space, layout)
    nominal = step_s(price(space.shape, layout, cluster), efficiency_of(cluster.device.name, cluster.efficiency))
    assert np.sqrt(low * high) == pytest.approx(nominal, rel=1e-9)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_the_robust_layout_is_the_best_worst_case(name: str) -> None:
    case = CASES[name]
    pins = {**dict(case.pins), "tp": (1, 2), "micro_batch": (1,), "zero": (1,)}
    space = replace(case.space(), pins=pins, cluster=case.cluster(4))
    worst_of: dict[ParallelLayout, float] = {}
    corners = list(product(*[(0.9, 1.1)] * (len(TERMS) + len(space.cluster.tiers)), (1.0, 1.4)))
    for layout in every_layout(space.shape, space.cluster, space.base, pins):
        if memory(space.shape, replace(layout, imbalance=1.4)).peak_bytes > space.cluster.device.memory_bytes:
            continue
        worst_of[layout] = 0.0
        for corner in corners:
            there = dearer(space.cluster, corner[: len(TERMS)], corner[len(TERMS) : -1])
            one = price(space.shape, replace(layout, imbalance=corner[-1]), there)
            step = step_s(one, efficiency_of(there.device.name, there.efficiency))
            worst_of[layout] = max(worst_of[layout], step)
    found = reach(Aim("robust", space, imbalance=1.4))
    assert found.score == pytest.approx(min(worst_of.values()), rel=1e-9)


def test_a_near_tie_goes_to_the_simpler_plan() -> None:
    space = space_of("data ranks")
    found = best(space)
    near = [best(replace(space, pins={"zero": (zero,)})).best for zero in (0, 1, 2, 3)]
    tried = {choice.layout: choice for choice in (*found.tried, *near)}
    found = replace(found, tried=tuple(sorted(tried.values(), key=lambda one: one.step_s)))
    others = ties(space, found)
    assert others
    assert [one.slower for one in others] == sorted(one.slower for one in others)
    assert all(0 <= one.beaten <= 1 for one in others)
    assert steady(found, ()) is found.best
    simple = replace(others[0], slower=0.005, choice=replace(found.best, layout=ParallelLayout(1, 4096, 1, 64)))
    assert steady(found, (simple,)) is simple.choice
    far = replace(simple, slower=0.05, beaten=0.9)
    assert steady(found, (far,)) is found.best
    assert steady(found, (replace(far, beaten=0.6),)) is simple.choice


def test_the_fullest_expert_rank() -> None:
    """Half as many tokens again: so many rows of its experts, so many bytes sent and kept; nothing else changes."""
    even = ParallelLayout(8, 4096, 1, 8, ep=8)
    full = replace(even, imbalance=1.5)
    one, more = moe(EXPERTS, even), moe(EXPERTS, full)
    assert [gemm[0] for gemm in more.grouped] == pytest.approx([1.5 * gemm[0] for gemm in one.grouped])
    assert more.ep_bytes == pytest.approx(1.5 * one.ep_bytes)
    assert more.routed_forward == pytest.approx(1.5 * one.routed_forward)
    assert more.saved > one.saved
    assert (more.linears, more.params, more.expert_params) == (one.linears, one.params, one.expert_params)


@pytest.mark.parametrize(("text", "found"), [("1.25", 1.25), ("1", 1.0)])
def test_imbalance_is_a_switch(text: str, found: float) -> None:
    made = layout_of({"imbalance": text}, devices=8, global_batch=8, seq_len=4096).layout
    assert made.imbalance == found
    for bad in ("0.9", "inf", "much"):
        with pytest.raises(LegalityError, match="pin imbalance: expected a number of at least 1"):
            layout_of({"imbalance": bad}, devices=8, global_batch=8, seq_len=4096)
