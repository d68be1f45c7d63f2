"""Predicted against measured steps of many plans of one small Llama on four gloo ranks of this machine.

    python -m tests.benchmarks.bench_profile [--rounds N] [--folder DIR]

The machine is profiled twice with `hpsearch profile --quick`; the second profile prices 18 plans that differ in mesh,
storage and micro-batches, each forced by pins. Every plan then runs on the same four ranks, plan by plan and round
after round, so that what else the machine does hits all of them. A step is forward, backward and fused AdamW, from a
barrier until the slowest rank is done; of all rounds the fastest counts, as it does in a profile. Compute is priced in
CPU seconds, so the CPU seconds of the steps stand beside it: they say which part of an error is the load.
Writes results/profile.md, unless `--folder` names profiles that were made before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hpsearch.capture import CapturedGraph, capture
from hpsearch.cluster import Cluster
from hpsearch.graph import ModelGraph
from hpsearch.lower import lower
from hpsearch.measure.compare import compare
from hpsearch.measure.kernels import ranks_a_core
from hpsearch.plan import Plan
from hpsearch.quickstart import LEARNING_RATE, ROWS, SEQ_LEN, batch, small_llama
from hpsearch.run import Built, ParallelModule
from hpsearch.search import search
from tests.benchmarks.machine import described
from tests.end_to_end.ranks import RankPool

RANKS = 4
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
SHARDED = {f"model.layers.*.{name}.weight": "dp_shard:S0" for name in (*LINEARS, "mlp.up_proj", "mlp.down_proj")}
MESHES: dict[str, dict[str, object]] = {
    "DDP": {"dp_replicate": 4},
    "FSDP": {"dp_shard": 4, **SHARDED},
    "HSDP 2x2": {"dp_replicate": 2, "dp_shard": 2, **SHARDED},
    "TP": {"tp": 4},
    "DDP 2 x TP 2": {"dp_replicate": 2, "tp": 2},
    "dp_shard 2 x TP 2": {"dp_shard": 2, "tp": 2},
}
MICRO_BATCHES = (1, 2, 4)
RESULT = Path(__file__).parent / "results" / "profile.md"
TIMEOUT_S = 900

Times = tuple[float, float]
"""Seconds, and CPU seconds of the rank's process, of one step."""


def plans(graph: ModelGraph, cluster: Cluster) -> dict[str, Plan]:
    found = {}
    for name, mesh in MESHES.items():
        for count in MICRO_BATCHES:
            degrees: dict[str, object] = {"dp_replicate": 1, "dp_shard": 1, "tp": 1}
            fix = degrees | mesh | {"micro_batches": count, "recompute": "none"}
            found[f"{name}, {count} micro-batches"] = search(graph, cluster, global_batch=ROWS, fix=fix)
    return found


def step_of(plan: Plan, captured: CapturedGraph) -> Callable[[], Times]:
    """A step of the emitted program, as `hpsearch.compile` builds it, but with one capture for many plans."""
    built = Built(captured.graph, plan, lower(captured, plan), batch(0))
    parallel = ParallelModule(small_llama(), lambda *_: built, global_batch=ROWS).prepare(batch(0))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE, fused=True)
    local = parallel.local_rows(batch(0))

    def step() -> Times:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        parallel.step(local)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start, time.process_time() - cpu

    return step


def measure(given: dict[str, bytes], rounds: int) -> dict[str, list[Times]]:
    """On every rank: what each plan took in each round, after one step to warm up."""
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


def profiled(folder: Path) -> float:
    """Seconds that `hpsearch profile --quick` took, from its command line to its end."""
    command = [sys.executable, "-m", "hpsearch", "profile", "-o", str(folder), "--quick", "--ranks", str(RANKS)]
    start = time.monotonic()
    subprocess.run([*command, "--most-spread", "10"], check=True, timeout=TIMEOUT_S)
    return time.monotonic() - start


def spearman(a: list[float], b: list[float]) -> float:
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def within_noise(slowest: dict[str, list[float]]) -> str:
    """Pairs of plans that the even rounds order one way and the odd ones the other, and how well those two agree."""
    even, odd = ({label: min(s[start::2]) for label, s in slowest.items()} for start in (0, 1))
    labels = list(slowest)
    pairs = [(a, b) for i, a in enumerate(labels) for b in labels[i + 1 :]]
    turned = [f"{a} and {b}" for a, b in pairs if (even[a] < even[b]) != (odd[a] < odd[b])]
    return (
        f"Even rounds against odd ones: Spearman {spearman(list(even.values()), list(odd.values())):.3f}; "
        f"{len(turned)} of {len(pairs)} pairs change their order, which is noise: {'; '.join(turned) or 'none'}."
    )


def report(found: dict[str, Plan], ranks: list[dict[str, list[Times]]]) -> tuple[list[str], str, str]:
    """(Rows of the table, one line that sums it up, what is within noise)."""
    rows = ["| plan | predicted, ms | measured, ms | ratio | median, ms | priced compute, ms | CPU, ms |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|")
    predicted, measured, errors = [], [], []
    every: dict[str, list[float]] = {}
    crowd = ranks_a_core(RANKS)
    for label, plan in found.items():
        slowest = every[label] = [max(r[label][i][0] for r in ranks) for i in range(len(ranks[0][label]))]
        cpu = statistics.mean(min(t[1] for t in r[label]) for r in ranks) * crowd
        entry = plan.file.predicted
        predicted.append(entry.step_s)
        measured.append(min(slowest))
        errors.append(abs(entry.step_s / measured[-1] - 1))
        numbers = [entry.step_s, measured[-1], statistics.median(slowest), entry.compute_s, cpu]
        p, m, middle, compute, used = (f"{1e3 * value:.0f}" for value in numbers)
        rows.append(f"| {label} | {p} | {m} | {entry.step_s / measured[-1]:.2f} | {middle} | {compute} | {used} |")
    summary = (
        f"{len(found)} plans: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, "
        f"Spearman {spearman(predicted, measured):.3f}."
    )
    return rows, summary, within_noise(every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="with profiles `first` and `second`; the result file is left alone")
    given = parser.parse_args()
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="hpsearch-profile-") as scratch:
        folder = given.folder or Path(scratch)
        first, second = folder / "first", folder / "second"
        took = [] if given.folder else [profiled(first), profiled(second)]
        loads.append(os.getloadavg()[0])
        differ = compare(first, second).median_differs
        found = plans(capture(small_llama(), batch(0), recipe="fp32").graph, Cluster.load(second, devices=RANKS))
        pool = RankPool(RANKS)
        try:
            content = {label: plan.content for label, plan in found.items()}
            ranks = pool.run(
                "tests.benchmarks.bench_profile:measure", ranks=RANKS, timeout_s=TIMEOUT_S, given=content,
                rounds=given.rounds,
            )  # fmt: skip
        finally:
            pool.close()
    loads.append(os.getloadavg()[0])
    rows, summary, noise = report(found, ranks)
    load = "Load {:.1f} before the profiles, {:.1f} after them, {:.1f} after the steps (4 of it the ranks)".format(
        *loads
    )
    times = f"Profiles took {' and '.join(f'{s:.0f} s' for s in took)}; " if took else ""
    text = f"{summary} {times}The two differ by {differ:.1%} in the median. {load}.\n\n{noise}"
    print("\n".join([*rows, "", text]))
    if not given.folder:
        what = (
            f"Small Llama of `hpsearch quickstart`, fp32, {ROWS} rows of {SEQ_LEN}, {RANKS} gloo ranks of one thread; "
        )
        what += (
            f"best of {given.rounds} rounds, plans in turn. CPU: seconds of a rank times the ranks that share a core."
        )
        head = f"# Predicted and measured steps\n\n{described('torch', 'transformers')}\n\n{what}\n\n{text}\n\n"
        RESULT.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
