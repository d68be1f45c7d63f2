"""Activations and optimizer states in host memory: what moves, what it costs, what it saves, and the same numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import hpsearch
from hpsearch.capture import CapturedGraph, capture
from hpsearch.cluster import Cluster
from hpsearch.cost import Job, recipe_of
from hpsearch.cost import build as prices
from hpsearch.cost.offload import moved
from hpsearch.errors import ClusterError, LegalityError, PlanError
from hpsearch.graph import ModelGraph
from hpsearch.layout import Mesh
from hpsearch.lower import ParallelProgram, PipelineProgram, lower
from hpsearch.plan import Plan
from hpsearch.run import ParallelModule
from hpsearch.search import search
from hpsearch.strategy import enumerate_space
from tests.end_to_end.models import ROWS, Case, build
from tests.end_to_end.parity import plain_loss, worst
from tests.end_to_end.slow import slow_devices
from tests.lower.stages import Played
from tests.search.toy import HIDDEN, SEQUENCE, toy_cluster, toy_model

RATE = 1e9
"""Bytes a second to the host."""


def with_host(cluster: Cluster, rate: float | None = RATE, overlap: float = 0.5) -> Cluster:
    device = replace(cluster.device, host_bytes_per_s=rate, overlap_efficiency=overlap)
    return replace(cluster, device=device)


@cache
def made(rows: int = ROWS) -> tuple[Case, CapturedGraph]:
    case = build("llama_deep", torch.float64)
    return case, capture(case.model, case.batch, recipe="fp64", rows=rows)


def planned(graph: ModelGraph, devices: int = 1, **fix: object) -> Plan:
    pinned = {"recompute": "none", "micro_batches": 1, **fix}
    return search(graph, with_host(slow_devices(devices)), global_batch=ROWS, fix=pinned)


# What it costs


@pytest.mark.parametrize(("rate", "overlap"), [(1e3, 0.0), (1e3, 1.0), (1e5, 1.0), (1e5, 0.8)])
def test_copies_are_hidden_under_compute_up_to_what_fits(rate: float, overlap: float) -> None:
    """By hand: five blocks, of which three send what they keep but the input that a frame around them gives."""
    graph = toy_model(depth=5)
    cluster = with_host(toy_cluster(devices=1), rate, overlap)
    plain, away = (
        search(graph, cluster, global_batch=8, fix={"recompute": "none", "micro_batches": 2, "offload": what})
        for what in ("none", "activations")
    )
    assert moved(graph, graph.blocks["Block"], recompute=False) == {"h", "a"}
    nbytes = 2 * 4 * SEQUENCE * HIDDEN * 4
    copy_s = nbytes / rate
    step_s = plain.file.predicted.step_s
    each = [block_s(graph, cluster, phase) for phase in ("forward", "backward")]
    exposed = sum((1 - overlap) * copy_s + overlap * max(0.0, copy_s - c) for c in each)
    assert away.file.predicted.step_s - step_s == pytest.approx(3 * 2 * exposed, rel=1e-9)
    saved = plain.file.predicted.bytes["activations"] - away.file.predicted.bytes["activations"]
    assert saved == 3 * nbytes


def block_s(graph: ModelGraph, cluster: Cluster, phase: str) -> float:
    """Compute of one call, by the prices of its ops."""
    job = Job(8, 2, recipe_of("fp32"), "adamw")
    table = prices(enumerate_space(graph, 1), cluster, Mesh.of(), job, float("inf"))
    block = graph.blocks["Block"]
    return sum(float(table.seconds["Block", op.name][0]) for op in block.ops if op.phase == phase)


def test_without_a_host_link_it_is_refused_by_name() -> None:
    with pytest.raises(ClusterError, match="expected host_bandwidth, to price offload, but found none"):
        search(toy_model(4), with_host(toy_cluster(1), None), global_batch=8, fix={"offload": "activations"})
    with pytest.raises(LegalityError, match="fix offload=all: expected one of none, activations"):
        planned(made()[1].graph, offload="all")
    with pytest.raises(LegalityError, match=r"expected a schedule with whole backwards .*but found zb-h1"):
        planned(made()[1].graph, 2, pp=2, schedule="zb-h1", offload="activations")


# What runs


def test_what_leaves_is_back_one_unit_before_its_backward() -> None:
    _, captured = made()
    plan = planned(captured.graph, offload="activations")
    program = lower(captured, plan)
    assert isinstance(program, ParallelProgram)
    verbs = ("forward", "backward_input", "offload.issue", "offload.wait", "fetch.issue", "fetch.wait")
    block = [str(a).replace("LlamaDecoderLayer", "") for a in program.actions if a.verb in verbs]
    assert block == [
        "forward outer_0", "forward [0]", "offload.issue [0]", "forward [1]", "offload.wait [0]", "offload.issue [1]",
        "forward [2]", "offload.wait [1]", "offload.issue [2]", "forward [3]", "offload.wait [2]", "forward [4]",
        "forward outer_5", "backward_input outer_5", "backward_input [4]", "fetch.issue [2]", "backward_input [3]",
        "fetch.wait [2]", "fetch.issue [1]", "backward_input [2]", "fetch.wait [1]", "fetch.issue [0]",
        "backward_input [1]", "fetch.wait [0]", "backward_input [0]", "backward_input outer_0",
    ]  # fmt: skip
    entry = plan.file.job.offload
    assert entry is not None
    assert entry.blocks == ("LlamaDecoderLayer",)
    gone = moved(captured.graph, captured.graph.blocks["LlamaDecoderLayer"], recompute=False)
    assert not gone & {"position_embeddings_0", "position_embeddings_1"}, "what all blocks read stays"
    broken = plan.content.replace(b'"blocks": ["LlamaDecoderLayer"]', b'"blocks": ["Another"]')
    with pytest.raises(PlanError, match=r"job.offload.blocks: no block class is called 'Another'"):
        Plan.from_bytes(broken)


def trained(fix: dict[str, object], steps: int = 2) -> tuple[ParallelModule, torch.optim.Optimizer, list[float]]:
    case, captured = made()
    plan = planned(captured.graph, **fix)
    parallel = hpsearch.compile(case.model, plan=plan, recipe="fp64")
    rows = parallel.local_rows(case.batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        losses.append(parallel.step(rows).item())
        optimizer.step()
        optimizer.zero_grad()
    return parallel, optimizer, losses


WAYS: list[Any] = [
    {"offload": "activations+optimizer"},
    pytest.param({"offload": "activations", "recompute": "full"}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("fix", WAYS, ids=str)
def test_the_same_numbers_to_the_last_bit(fix: dict[str, object]) -> None:
    """And where states rest on the host, every one lies there between updates: in memory that no operator made."""
    kept = {"recompute": fix.get("recompute", "none")}
    (here, _, expected), (away, optimizer, losses) = trained(kept), trained(fix)
    assert losses == expected
    wanted, found = here.state_dict(full=True), away.state_dict(full=True)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    if "recompute" not in fix:
        held = {
            storage._cdata for pairs in away._states._away.values() for _, trip in pairs for storage in trip.parcels
        }
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        assert len(held) == len(moments) == 2 * len(list(away.parameters()))
        assert {t._local_tensor.untyped_storage()._cdata for t in moments} == held


@pytest.mark.parametrize("recompute", ["full", pytest.param("none", marks=pytest.mark.exhaustive)])
def test_stages_send_what_their_micro_batches_keep(recompute: str) -> None:
    """Two stages, three micro-batches in flight."""
    case, captured = made(ROWS // 3)
    fix: dict[str, object] = {"pp": 2, "micro_batches": 3, "recompute": recompute}
    plain, plan = (planned(captured.graph, 2, **fix, offload=what) for what in ("none", "activations"))
    program = lower(captured, plan)
    assert isinstance(program, PipelineProgram)
    batch: dict[str, Any] = {n: t.chunk(3) for n, t in case.batch.items() if isinstance(t, torch.Tensor)}
    count = (case.batch["labels"][:, 1:] != -100).sum()
    rows = [{n: pieces[i] for n, pieces in batch.items()} | {"num_items_in_batch": count} for i in range(3)]
    state = {n: p.detach() for n, p in case.model.named_parameters()}
    loss, grads = Played(program).step(state, dict(case.model.named_buffers()), rows, 1.0)
    case.model.zero_grad()
    expected = plain_loss(case.model, case.batch, None)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = {n: p.grad for n, p in case.model.named_parameters() if p.grad is not None}
    assert worst("gradient", grads, gradients, 1e-9)["gradient"] <= 1e-10
    assert plan.file.predicted.peak_bytes < plain.file.predicted.peak_bytes
