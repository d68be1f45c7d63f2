"""Products in 8 bits: what is rounded and how, the same under every layout, priced by the tables of 8 bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from hpsearch.capture import CapturedGraph, capture
from hpsearch.cluster import Cluster
from hpsearch.errors import ClusterError
from hpsearch.graph.scaled import scaled_products
from hpsearch.lower import ParallelProgram, lower
from hpsearch.lower.scaled import amax, scaled_einsum
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.end_to_end.models import ROWS, Case, build
from tests.end_to_end.slow import slow_devices
from tests.lower.reference import cut, stated_by_kind, sum_by_kind
from tests.lower.simulate import run_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def eight_bits(cluster: Cluster, rate: float = 4e8) -> Cluster:
    peaks = (*cluster.device.peak, ("float8_e4m3fn", rate))
    return replace(cluster, device=replace(cluster.device, peak=peaks))


@cache
def made(recipe: str = "fp8") -> tuple[Case, CapturedGraph]:
    case = build("llama", torch.float32)
    return case, capture(case.model, case.batch, recipe=recipe)


def rounded_by_hand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Row by row: the largest element becomes the largest number of the format."""
    found = torch.empty_like(x, dtype=torch.float32)
    for index, row in enumerate(x.float()):
        unit = row.abs().max() / torch.finfo(dtype).max
        found[index] = (row / unit).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float() * unit
    return found


def test_each_row_is_rounded_by_its_own_largest_element() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(6, 16) * torch.logspace(-3, 3, 6)[:, None], torch.randn(5, 16)
    made = scaled_einsum("mk,nk->mn", a, b, amax(a, (1,)), amax(b, (1,)), (E5M2, E4M3))
    expected = rounded_by_hand(a, E5M2) @ rounded_by_hand(b, E4M3).t()
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=0)
    assert (made - a @ b.t()).norm() / (a @ b.t()).norm() < 0.2
    zeros = torch.zeros(2, 16)
    assert not scaled_einsum("mk,nk->mn", zeros, b, amax(zeros, (1,)), amax(b, (1,)), (E4M3, E4M3)).any()


def test_linears_of_blocks_and_gradients_of_their_inputs() -> None:
    _, captured = made()
    graph = captured.graph
    (block,) = graph.blocks.values()
    found = scaled_products(graph, block)
    formats = {block.step(name).phase: pair for name, pair in found.items()}
    assert formats == {"forward": ("float8_e4m3fn",) * 2, "backward": ("float8_e5m2", "float8_e4m3fn")}
    assert len(found) == 2 * 7
    assert not scaled_products(graph, graph.outer)
    assert not scaled_products(made("bf16")[1].graph, made("bf16")[1].graph.blocks[block.name])


def in_fp32() -> tuple[Case, CapturedGraph]:
    """All but the products of 8 bits in fp32: a number that another order of a sum moves across the border between two
    numbers of 8 bits moves by a quarter, so bf16 would hide what is to be seen."""
    case, captured = made("fp32")
    return case, replace(captured, graph=replace(captured.graph, recipe="fp8"))


def gradients(plan: Plan, program: ParallelProgram) -> tuple[float, dict[str, Tensor]]:
    """Loss, and whole gradients of one step on simulated ranks; what is sent is what the plan says."""
    case, captured = in_fp32()
    state, mesh = {n: p.detach() for n, p in case.model.named_parameters()}, program.mesh
    batch = case.batch | {"num_items_in_batch": (case.batch["labels"][:, 1:] != -100).sum()}
    leaves = captured.batch.flatten(batch)

    def work(rank: int, bound: Any) -> Any:
        params = {s.fqn: cut(state[s.fqn], s.stored, mesh, rank) for s in program.params}
        inputs = [cut(t, s.layout, mesh, rank) for t, s in zip(leaves, program.inputs, strict=True)]
        return *bound.step(params, dict(case.model.named_buffers()), [inputs]), bound.functions["c10d"].log

    answers = run_ranks(program, work)
    sent = answers[0][2] if mesh.axes else []
    assert sum_by_kind(sent) == stated_by_kind(program)
    assert sum_by_kind(sent)["all_reduce"] == stated_by_plan(plan).get("all_reduce", 0)
    found = {}
    for slot in program.params:
        whole = torch.zeros(slot.shape, dtype=torch.float32)
        for rank, (_, grads, _) in enumerate(answers):
            where = cut(torch.arange(whole.numel()).reshape(slot.shape), slot.stored, mesh, rank)
            whole.view(-1)[where.reshape(-1)] = grads[slot.fqn].reshape(-1)
        found[slot.fqn] = whole
    return float(answers[0][0]), found


def stated_by_plan(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in plan.file.collectives:
        found[entry.kind] = found.get(entry.kind, 0) + entry.nbytes * entry.calls
    return found


ROW_AND_COLUMN = {
    **{f"model.layers.*.{n}_proj.weight": "tp:S0" for n in ("self_attn.q", "mlp.up", "mlp.gate")},
    "model.layers.*.mlp.down_proj.weight": "tp:S1",
}
"""The last is summed over a dim that tp cuts: scales need the largest element of all ranks."""
LAYOUTS: list[Any] = [
    (2, {"tp": 2, **ROW_AND_COLUMN}),
    (2, {"dp_shard": 2}),
    pytest.param(4, {"dp_shard": 2, "tp": 2, **ROW_AND_COLUMN, "recompute": "full"}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("devices", "fix"), LAYOUTS, ids=str)
def test_every_layout_rounds_alike(devices: int, fix: dict[str, object]) -> None:
    """Beside one device, and nothing like products that are not rounded."""
    _, captured = in_fp32()
    whole = {"micro_batches": 1, "recompute": "none"}
    plans = [search(captured.graph, eight_bits(slow_devices(n)), global_batch=ROWS, fix=whole | f)
             for n, f in ((1, {}), (devices, fix))]  # fmt: skip
    (loss, grads), (other, others) = (gradients(p, lower(captured, p)) for p in plans)
    errors = {n: float((others[n] - grads[n]).norm() / grads[n].norm()) for n in grads}
    print(f"{fix}: loss {abs(loss - other) / loss:.1e}, gradient {max(errors.values()):.1e}")
    assert abs(loss - other) / loss < 1e-6
    assert max(errors.values()) < 1e-3


def test_eight_bits_are_priced_by_their_own_tables() -> None:
    """Twice as fast products make the step shorter; without a peak the recipe is refused by name."""
    graph = made()[1].graph
    fix = {"micro_batches": 1, "recompute": "none"}
    times = [
        search(graph, eight_bits(slow_devices(1), rate), global_batch=ROWS, fix=fix).file.predicted.step_s
        for rate in (2e8, 4e8)
    ]
    flops = 0.0
    for name, block in graph.blocks.items():
        count = sum(1 for cls, _ in graph.instances if cls == name)
        flops += sum(block.step(op).flops[1] * ROWS * count for op in scaled_products(graph, block))
    assert times[0] - times[1] == pytest.approx(flops * (1 / 2e8 - 1 / 4e8), rel=1e-6)
    with pytest.raises(ClusterError, match="expected a peak for float8_e4m3fn"):
        search(graph, slow_devices(1), global_batch=ROWS, fix=fix)
