"""Peak bytes of a rank while it runs a step, beside what its plan promises."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from hpsearch.capture import CapturedGraph, capture
from hpsearch.cluster import Cluster
from hpsearch.lower import ParallelProgram, PipelineProgram, lower
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.end_to_end.models import ROWS, Case, build
from tests.end_to_end.slow import slow_devices
from tests.lower.reference import cut
from tests.lower.simulate import run_ranks
from tests.lower.stages import Played
from tests.lower.test_offload import with_host
from tests.search.test_memory_promise import Alive


@cache
def made(family: str, recipe: str, rows: int) -> tuple[Case, CapturedGraph]:
    case = build(family, torch.float32)
    return case, capture(case.model, case.batch, loss=case.loss, recipe=recipe, rows=rows)


def planned(family: str, recipe: str, devices: int, **fix: object) -> tuple[Plan, ParallelProgram | PipelineProgram]:
    return planned_on(family, recipe, with_host(slow_devices(devices)), **fix)


def planned_on(
    family: str, recipe: str, cluster: Cluster, **fix: object
) -> tuple[Plan, ParallelProgram | PipelineProgram]:
    rows = ROWS // int(str(fix["micro_batches"]))
    captured = made(family, recipe, rows)[1]
    plan = search(captured.graph, cluster, global_batch=ROWS, fix=fix)
    return plan, lower(captured, plan)


def batches_of(case: Case, parts: int) -> list[dict[str, Any]]:
    tensors = {n: t.chunk(parts) for n, t in case.batch.items() if isinstance(t, torch.Tensor)}
    count = (case.batch["labels"][:, 1:] != -100).sum()
    return [{n: t[i] for n, t in tensors.items()} | {"num_items_in_batch": count} for i in range(parts)]


def measured(family: str, recipe: str, plan: Plan, program: ParallelProgram | PipelineProgram) -> int:
    """Bytes of the fullest rank: its parameters and optimizer states by size, all else as it is allocated."""
    case, captured = made(family, recipe, plan.micro_batch_rows)
    parts = batches_of(case, plan.file.job.micro_batches)
    state = {n: p.detach() for n, p in case.model.named_parameters()}
    buffers = dict(case.model.named_buffers())
    if isinstance(program, PipelineProgram):
        alive = [Alive() for _ in program.schedule.ranks]
        Played(program, lambda rank: alive[rank]).step(state, buffers, parts, 1.0)
        entry = plan.file.pipeline
        assert entry is not None
        held = [0] * len(alive)
        for stage, rank in zip(entry.stages, program.schedule.placement, strict=True):
            held[rank] += sum(stage.bytes.get(name, 0) for name in ("parameters", "optimizer"))
        return max(own + one.peak for own, one in zip(held, alive, strict=True))

    def work(rank: int, bound: Any) -> int:
        params = {s.fqn: cut(state[s.fqn], s.stored, program.mesh, rank) for s in program.params}
        params = {n: p.clone() for n, p in params.items()}
        inputs = []
        for part in parts:
            leaves = captured.batch.flatten({n: part.get(n, False) for n in (*case.batch, "num_items_in_batch")})
            inputs.append([cut(t, s.layout, program.mesh, rank) for t, s in zip(leaves, program.inputs, strict=True)])
        with Alive() as alive:
            bound.step(params, buffers, inputs)
        return alive.peak

    return held_bytes(plan) + max(run_ranks(program, work))


def held_bytes(plan: Plan) -> int:
    """Parameters and optimizer states of a rank, from the plan's layouts."""
    total, states = 0, 0 if plan.file.job.offload and plan.file.job.offload.optimizer else 2
    for entry in plan.file.parameters:
        count = entry.count
        for size in plan.stored(entry.pattern).local_shape(entry.shape, plan.mesh.sizes):
            count *= size
        total += 4 * count * (1 + (states if entry.trainable else 0))
    return total
