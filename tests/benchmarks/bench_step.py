"""A training step (forward and backward, fp32) of one Llama on two gloo ranks: our programs against torch's.

    python -m tests.benchmarks.bench_step [--pairs N] [--only fsdp|tp] [--profile FILE]

FSDP: our program with every parameter cut in two at rest, blocks gathered for each pass and the rest once a step,
against `fully_shard` on every layer and on the model, which does the same. TP: our program of a plan searched with tp=2
and the cuts of `parallelize_module` pinned, against that: column- and row-wise linears, embedding and head column-wise.
Both sides of a pair run in the same two processes, in turn (ABAB), so that what else the machine does hits both. What
counts is the ratio of medians; the least and largest ratio of a pair say how sure it is. First both must give the same
loss. Writes results/step.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import hpsearch
from hpsearch.capture import capture
from hpsearch.cluster import Cluster
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.benchmarks.machine import described
from tests.end_to_end.ranks import RankPool

RANKS, ROWS, SEQ_LEN = 2, 4, 256
SIZES = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 8192, "max_position_embeddings": SEQ_LEN,
}  # fmt: skip
RESULT = Path(__file__).parent / "results" / "step.md"
WARM_UP = 2

COLUMN_WISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW_WISE = ("self_attn.o_proj", "mlp.down_proj")
CUT = {
    **{f"model.layers.*.{name}.weight": "tp:S0" for name in COLUMN_WISE},
    **{f"model.layers.*.{name}.weight": "tp:S1" for name in ROW_WISE},
    "model.embed_tokens.weight": "tp:S1",
    "lm_head.weight": "tp:S0",
}
"""Pins that cut our linears as `parallelize_module` is told to cut torch's."""

Step = Callable[[], float]
"""Forward and backward; the loss of the global batch."""


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(SIZES["vocab_size"], (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


# Plans, in the measuring process


def plan_of(kind: str) -> Plan:
    graph = capture(llama(), batch(), recipe="fp32").graph
    cluster = Cluster.load("h100-sxm-roce400", devices=RANKS)
    fix: dict[str, object] = {"micro_batches": 1, "recompute": "none"}
    if kind == "tp":
        return search(graph, cluster, global_batch=ROWS, fix=fix | {"tp": RANKS} | CUT)
    return _everything_sharded(search(graph, cluster, global_batch=ROWS, fix=fix | {"dp_shard": RANKS}))


def _everything_sharded(plan: Plan) -> Plan:
    """As `fully_shard` on every layer and on the model: blocks go between the passes, the rest stays gathered."""
    entries = []
    for entry in plan.file.parameters:
        residency = "micro_batch" if entry.graph != "outer" else "step"
        reduce = "micro_batch" if entry.graph != "outer" else "step"
        update = {"stored": "dp_shard:S0", "residency": residency, "reduce": reduce}
        entries.append(entry.model_copy(update=update))
    return Plan(plan.file.model_copy(update={"parameters": tuple(entries)}))


# On every rank


def our_step(plan: bytes) -> Step:
    parallel = hpsearch.compile(llama(), plan=Plan.from_bytes(plan), recipe="fp32")
    local = parallel.local_rows(batch())

    def step() -> float:
        for parameter in parallel.parameters():
            parameter.grad = None
        return parallel.step(local).item()

    return step


def their_step(kind: str) -> Step:
    model, rows = llama(), batch()
    mesh = init_device_mesh("cpu", (RANKS,))
    if kind == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        rank, each = dist.get_rank(), ROWS // RANKS
        rows = {name: tensor[rank * each : (rank + 1) * each] for name, tensor in rows.items()}
    else:
        _cut_linears(model, mesh)

    def step() -> float:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(**rows, use_cache=False).loss
        loss.backward()
        value = loss.detach().clone()
        if kind == "fsdp":
            dist.all_reduce(value)
            value /= RANKS
        return value.item()

    return step


def _cut_linears(model: nn.Module, mesh: Any) -> None:
    layer = {name: ColwiseParallel() for name in COLUMN_WISE} | {name: RowwiseParallel() for name in ROW_WISE}
    for block in model.model.layers:
        parallelize_module(block, mesh, layer)
    ends = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("model.embed_tokens", "lm_head")}
    parallelize_module(model, mesh, ends)


def measure(kind: str, plan: bytes, pairs: int, profile: str = "") -> dict[str, list[float]]:
    """Seconds and CPU seconds of each step of both sides, on this rank."""
    sides = {"ours": our_step(plan), "theirs": their_step(kind)}
    losses = {name: [step() for _ in range(WARM_UP)][-1] for name, step in sides.items()}
    assert abs(losses["ours"] - losses["theirs"]) <= 1e-5 * losses["theirs"], losses
    if profile and dist.get_rank() == 0:
        _profile(sides, profile)
    elif profile:
        for step in sides.values():
            step()
    found: dict[str, list[float]] = {}
    for _ in range(pairs):
        for name, step in sides.items():
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            step()
            found.setdefault(name, []).append(time.perf_counter() - start)
            found.setdefault(f"{name} cpu", []).append(time.process_time() - cpu)
    return found


def _profile(sides: dict[str, Step], path: str) -> None:
    with open(path, "w") as file:
        for name, step in sides.items():
            with torch.profiler.profile() as profiler:
                step()
            file.write(f"{name}\n{profiler.key_averages().table(sort_by='self_cpu_time_total', row_limit=30)}\n")


# What is reported


def report(kind: str, ranks: list[dict[str, list[float]]]) -> list[str]:
    """One table row: of a pair the slower rank counts."""
    slowest = {name: [max(values) for values in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}
    row = [kind]
    for suffix in ("", " cpu"):
        ours, theirs = slowest[f"ours{suffix}"], slowest[f"theirs{suffix}"]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        middle = statistics.median(ours), statistics.median(theirs)
        row += [f"{s:.3f}" for s in middle]
        row.append(f"**{middle[0] / middle[1]:.3f}** ({min(ratios):.2f} to {max(ratios):.2f})")
    return row


HEAD = [
    "plan", "ours, s", "torch, s", "ratio of medians (least to largest pair)", "ours, CPU s", "torch, CPU s", "ratio"
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", choices=("fsdp", "tp"), help="the result file is left alone")
    parser.add_argument("--profile", default="", help="where to write what rank 0 spends time on")
    given = parser.parse_args()
    rows = [HEAD, ["---"] + ["---:"] * (len(HEAD) - 1)]
    pool = RankPool(RANKS)
    try:
        for kind in [given.only] if given.only else ("fsdp", "tp"):
            plan = plan_of(kind).content
            ranks = pool.run(
                "tests.benchmarks.bench_step:measure", ranks=RANKS, timeout_s=600,
                kind=kind, plan=plan, pairs=given.pairs, profile=given.profile,
            )  # fmt: skip
            rows.append(report(kind, ranks))
    finally:
        pool.close()
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    print(table)
    if not given.only:
        RESULT.parent.mkdir(exist_ok=True)
        what = ", ".join(f"{name} {size}" for name, size in SIZES.items())
        text = f"{described('torch', 'transformers')} One thread a rank.\n\nLlama, {what}; {ROWS} rows of {SEQ_LEN}, "
        text += f"fp32, {RANKS} gloo ranks, {given.pairs} pairs. Of a pair the slower rank counts."
        RESULT.write_text(f"# A step on two gloo ranks\n\n{text}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
