"""Predicted against measured steps of many plans of one small Llama on four gloo ranks of this machine.

    python -m tests.benchmarks.bench_profile [--rounds N] [--cluster FOLDER] [--keep FOLDER]

The machine is profiled twice with `hpsearch profile --quick`; the second profile prices plans that differ in mesh,
micro-batches and storage, each forced by pins. Every plan then runs on the same four ranks, plan by plan and round
after round, so that what else the machine does hits all of them. A step is forward, backward and AdamW on the slowest
rank.
Writes results/profile.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hpsearch.capture import CapturedGraph, capture
from hpsearch.cluster import Cluster
from hpsearch.graph import ModelGraph
from hpsearch.lower import lower
from hpsearch.plan import Plan
from hpsearch.quickstart import LEARNING_RATE, ROWS, batch, small_llama
from hpsearch.run import Built, ParallelModule
from hpsearch.search import search

RANKS = 4
MESHES: tuple[dict[str, int], ...] = (
    {"dp_replicate": 4},
    {"dp_shard": 4},
    {"tp": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_shard": 2, "tp": 2},
)
MICRO_BATCHES = (1, 2, 4)


def plans(graph: ModelGraph, cluster: Cluster, rows: int) -> dict[str, Plan]:
    found = {}
    for mesh in MESHES:
        for count in MICRO_BATCHES:
            degrees = {name: mesh.get(name, 1) for name in ("dp_replicate", "dp_shard", "tp")}
            fix = degrees | {"micro_batches": count, "recompute": "none"}
            label = " ".join(f"{k}={v}" for k, v in mesh.items()) + f" mb={count}"
            found[label] = search(graph, cluster, global_batch=rows, fix=fix)
    return found


Times = tuple[float, float]
"""Seconds of forward and backward, and of AdamW."""


def step_of(plan: Plan, captured: CapturedGraph) -> Callable[[], Times]:
    """A step of the emitted program, as `hpsearch.compile` builds it, but with one capture for many plans."""
    built = Built(captured.graph, plan, lower(captured, plan), batch(0))
    parallel = ParallelModule(small_llama(), lambda *_: built, global_batch=ROWS).prepare(batch(0))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE, fused=True)
    local = parallel.local_rows(batch(0))

    def step() -> Times:
        dist.barrier()
        start = time.perf_counter()
        parallel.step(local)
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        return middle - start, end - middle

    return step


def measure(given: dict[str, bytes], rounds: int) -> dict[str, list[Times]]:
    """On every rank: seconds of each plan in each round, after one step to warm up."""
    read = {label: Plan.from_bytes(content) for label, content in given.items()}
    model, rows = small_llama(), {plan.micro_batch_rows for plan in read.values()}
    captured = {count: capture(model, batch(0), recipe="fp32", rows=count) for count in sorted(rows)}
    steps = {label: step_of(plan, captured[plan.micro_batch_rows]) for label, plan in read.items()}
    for step in steps.values():
        step()
    found: dict[str, list[Times]] = {label: [] for label in steps}
    for _ in range(rounds):
        for label, step in steps.items():
            found[label].append(step())
    return found
