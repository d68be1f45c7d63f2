"""Overlap is real: the program of a searched 8B plan, played on the prices it was searched with.

Prices come from the cost room, not from round numbers: every op by the rule the plan chose for it, every collective by
the cluster's curves. So compute and communication must add up to the plan's own sums, and only *when* things happen is
new here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest

from hpsearch.capture import CapturedGraph, capture_config
from hpsearch.cluster import Cluster
from hpsearch.cost import Job, recipe_of
from hpsearch.cost.op_time import op_seconds
from hpsearch.graph import ITEM_BYTES, ModelGraph
from hpsearch.layout import Layout
from hpsearch.lower import lower
from hpsearch.lower.accounting import Overlap, overlap_of
from hpsearch.lower.statement import Sent
from hpsearch.plan import Plan
from hpsearch.search import search
from hpsearch.strategy import enumerate_space, propagate_all
from tests.lower.test_program import LLAMA_8B

DEVICES, GLOBAL_BATCH, SEQ_LEN = 64, 128, 8192
COVERED = 0.8
"""Least share of parameter gathers and gradient reductions that must lie under compute."""
ADAMW_ACCESSES = 7
"""AdamW reads parameter, gradient and two moments, and writes all but the gradient."""
AGREES = 0.03
"""Most by which the search's closed form may differ from the timeline."""


@pytest.mark.slow
@pytest.mark.parametrize("fix", [{}, {"tp": 8}, {"recompute": "full"}], ids=["own choice", "tp=8", "recompute=full"])
def test_compute_covers_gathers_and_reductions(
    fix: Mapping[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPSEARCH_CACHE", str(tmp_path))
    cluster = Cluster.load("h100-sxm-roce400", devices=DEVICES)
    first = capture_config(LLAMA_8B, seq_len=SEQ_LEN)
    plan = search(first.graph, cluster, global_batch=GLOBAL_BATCH, fix=fix)
    captured = capture_config(LLAMA_8B, rows=plan.micro_batch_rows, seq_len=SEQ_LEN)
    overlap = play(captured, plan, cluster)

    predicted, update_s = plan.file.predicted, updates_s(plan, cluster)
    step_s = overlap.timeline.end_s + update_s
    print(
        f"\n{plan.mesh}, {plan.file.job.micro_batches} micro-batches: compute covers {overlap.covered:.1%} of "
        f"{overlap.parameter_s:.3f} s; step {step_s:.4f} s played, {predicted.step_s:.4f} s predicted, "
        f"ratio {step_s / predicted.step_s:.4f}"
    )
    own = [c for c in plan.file.collectives if c.phase in ("gather", "reduce")]
    assert overlap.parameter_s == pytest.approx(sum(c.calls * c.seconds for c in own), rel=1e-6)
    assert overlap.parameter_s > 0.1  # there is something to cover
    assert overlap.timeline.busy_s("compute") + update_s == pytest.approx(predicted.compute_s, rel=1e-6)
    assert COVERED <= overlap.covered < 1.0
    assert step_s == pytest.approx(predicted.step_s, rel=AGREES)


def play(captured: CapturedGraph, plan: Plan, cluster: Cluster) -> Overlap:
    """The step of the plan's program, if everything takes as long as the search took it to."""
    prices = op_prices(plan, captured.graph, cluster)

    def collective_s(sent: Sent) -> float:
        axis = plan.mesh.axis(sent.axis)
        return cluster.collective(sent.kind, sent.nbytes, axis.size, axis.stride).seconds

    return overlap_of(lower(captured, plan), collective_s, lambda graph, op: prices[graph, op])


def op_prices(plan: Plan, model: ModelGraph, cluster: Cluster) -> dict[tuple[str, str], float]:
    """Seconds of each op on one rank, in the state that the plan chose."""
    job, mesh = plan.file.job, plan.mesh
    again = frozenset(block for block, kind in job.recompute.items() if kind == "full")
    rows = Job(job.global_batch, job.micro_batches, recipe_of(job.recipe), job.optimizer, again).micro_rows()
    space = enumerate_space(model, mesh.size("tp"), propagate_all(model, model.rows))
    seconds = op_seconds(space, cluster, rows, mesh)
    found = {}
    for key, by_state in seconds.items():
        rules = [f"{','.join(ins)}->{','.join(outs)}" for ins, outs in space.nodes[key].rules]
        chosen = plan.file.placements[key[0]].get(key[1], {}).get("tp")
        states = [i for i, text in enumerate(rules) if text == chosen or (chosen is None and set(text) <= set("R,->"))]
        assert len(states) == 1, (key, chosen, rules)
        found[key] = float(by_state[states[0]])
    return found


def updates_s(plan: Plan, cluster: Cluster) -> float:
    """Seconds of the optimizer's updates, which the program does not run."""
    total = 0.0
    for entry in plan.file.parameters:
        elements = prod(Layout.parse(entry.stored).local_shape(entry.shape, plan.mesh.sizes))
        moved = ADAMW_ACCESSES * elements * ITEM_BYTES["float32"]
        total += entry.count * float(cluster.device.memory_bound_s(moved))
    return total
