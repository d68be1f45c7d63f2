"""How long a save keeps training waiting, written behind it against written before it goes on.

    python -m tests.benchmarks.bench_checkpoint [--pairs N]

Two gloo ranks, fully sharded, AdamW with its state: about 250 MB on disk. Both ways in turn in the same processes, a
training step before each; what counts is the ratio of medians. After a save behind training, two steps run beside the
writing, and then it is waited for, so that the next pair starts on an idle disk.

Writes results/checkpoint.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hpsearch
from hpsearch.plan import Plan
from tests.benchmarks.bench_step import RANKS, batch, llama, plan_of
from tests.benchmarks.machine import described
from tests.end_to_end.ranks import RankPool

RESULT = Path(__file__).parent / "results" / "checkpoint.md"


def stalls(plan: bytes, folder: Path, pairs: int) -> tuple[list[float], list[float], list[float], int]:
    """Seconds that a save takes, that a save behind training takes, from asking for it until it is there; bytes."""
    parallel = hpsearch.compile(llama(), plan=Plan.from_bytes(plan), recipe="fp32")
    local = parallel.local_rows(batch())
    optimizer = torch.optim.AdamW(parallel.parameters())

    def step() -> None:
        parallel.step(local)
        optimizer.step()
        optimizer.zero_grad()

    before, behind, until = [], [], []
    for _ in range(pairs):
        for wait in (True, False):
            step()
            dist.barrier()
            start = time.perf_counter()
            saving = parallel.save(folder / "latest", optimizer, wait=wait)
            stall = time.perf_counter() - start
            (before if wait else behind).append(stall)
            if not wait:
                step()
                step()
                saving.wait()
                until.append(time.perf_counter() - start)
    return before, behind, until, sum(path.stat().st_size for path in (folder / "latest").iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    pool = RankPool(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        told = {"plan": plan_of("fsdp").content, "folder": Path(folder), "pairs": given.pairs}
        try:
            found = pool.run("tests.benchmarks.bench_checkpoint:stalls", ranks=RANKS, timeout_s=900, **told)[0]
        finally:
            pool.close()
    before, behind, until, size = found
    ratios = sorted(b / a for a, b in zip(before, behind, strict=True))
    lines = [
        "# Saving a checkpoint", "", described("torch"), "", " ".join(__doc__.split("\n\n")[2].split()), "",
        "| bytes | a save, s | behind training, s | ratio of medians | ratios of pairs | all of it with two steps, s |",
        "|---|---|---|---|---|---|",
        f"| {size / 1e6:.0f} MB | {statistics.median(before):.2f} | {statistics.median(behind):.3f} | "
        f"{statistics.median(behind) / statistics.median(before):.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f} | "
        f"{statistics.median(until):.2f} |",
    ]  # fmt: skip
    print("\n".join(lines))
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
