"""What compute pays for a collective it waits for is priced by the group's shape, once for each such collective."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpsearch.plan import Plan
from hpsearch.search import search
from tests.search.toy import toy_cluster, toy_model

ARRIVAL_S = 1e-12
"""So little that it moves no decision."""


def plan_with(arrivals: tuple[tuple[int, int, float], ...], arrival_s: float = 0.0) -> Plan:
    cluster = toy_cluster(memory_bytes=10**9)
    device = replace(cluster.device, arrivals=arrivals, arrival_s=arrival_s)
    fix = {"dp_replicate": 1, "dp_shard": cluster.devices // 2, "tp": 2, "micro_batches": 2, "recompute": "none"}
    return search(toy_model(), replace(cluster, device=device), global_batch=8, fix=fix)


def waited_for(plan: Plan) -> int:
    """Collectives of a step between activations on tp, which compute waits for."""
    found = [c for c in plan.file.collectives if c.axis == "tp" and c.phase in ("forward", "backward")]
    return sum(c.calls for c in found)


def test_each_collective_on_the_path_costs_the_arrival_of_its_shape() -> None:
    without = plan_with(()).file.predicted.step_s
    late = plan_with(((2, 1, ARRIVAL_S),))
    assert waited_for(late) > 0
    assert late.file.predicted.step_s - without == pytest.approx(waited_for(late) * ARRIVAL_S, rel=1e-3)


def test_a_shape_that_was_measured_does_not_cost_what_others_do() -> None:
    without = plan_with(()).file.predicted.step_s
    assert plan_with(((2, 1, 0.0),), arrival_s=1.0).file.predicted.step_s == pytest.approx(without, rel=1e-9)
    assert plan_with(((4, 1, 0.0),), arrival_s=ARRIVAL_S).file.predicted.step_s > without


def test_one_rank_waits_for_nobody() -> None:
    device = replace(toy_cluster(memory_bytes=10**9).device, arrival_s=1.0)
    assert device.arrival_of(1, 1) == 0.0
