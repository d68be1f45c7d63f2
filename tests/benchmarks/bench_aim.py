"""CPU seconds of `hpsearch aim` and `hpsearch together`, and what they answer.

    python -m tests.benchmarks.bench_aim [--only NAME]

Every figure is of a fresh process with the graph kept. Llama-3.1-8B, 128 rows of 8,192 tokens, up to 64 H100; the
models of examples/together on 32 and 64. Writes results/aim.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.bench_search import LLAMA_8B
from tests.benchmarks.machine import described

RESULT = Path(__file__).parent / "results" / "aim.md"
EXAMPLE = Path(__file__).parents[2] / "examples" / "together" / "job.toml"
CLUSTER = ("--cluster", "h100-sxm-roce400")
ROWS = ("--global-batch", "128", "--seq-len", "8192", "--devices", "64", *CLUSTER)
CASES: dict[str, tuple[str, ...]] = {
    "devices, step below 4 s": ("devices", "--step-below", "4"),
    "rate": ("rate",),
    "energy": ("energy",),
    "batch, step below 10 s": ("batch", "--step-below", "10"),
    "batch of one pass": ("batch",),
    "sequence": ("sequence", "--over", "8192..65536/8192,131072,262144,524288,1048576"),
    "front, 10 points": ("front", "--top", "10"),
    "plans, 5 meshes": ("plans", "--top", "5"),
    "robust": ("robust",),
}
TOGETHER = {f"together, {n} devices": ("--devices", str(n)) for n in (32, 64)}


def measured(command: list[str], cache: Path) -> tuple[float, str]:
    """CPU seconds of a fresh process, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "HPSEARCH_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def row(name: str, folder: Path) -> str:
    config, cache = folder / "config.json", folder / "cache"
    config.write_text(json.dumps(LLAMA_8B))
    start = [sys.executable, "-m", "hpsearch"]
    if name in TOGETHER:
        command = [*start, "together", str(EXAMPLE), *CLUSTER, *TOGETHER[name]]
    else:
        command = [*start, "aim", *CASES[name], "--model", str(config), *ROWS]
    if not cache.exists() or name == next(iter(TOGETHER)):  # graphs are not kept yet
        measured(command, cache)
    seconds, said = measured(command, cache)
    first = " ".join(said.split("\n\n")[0].split("Every value")[0].split("Devices ")[0].split(" layout ")[0].split())
    return f"| {name} | {seconds:.1f} | {first} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a case's name")
    given = parser.parse_args()
    lines = [
        "# `hpsearch aim` and `hpsearch together`",
        "",
        described("numpy"),
        "",
        __doc__.split("\n\n")[2].strip(),
        "",
    ]
    lines += ["| aim | CPU s | answer |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for name in (*CASES, *TOGETHER):
            if given.only in name:
                lines.append(row(name, Path(folder)))
                print(lines[-1], flush=True)
    if not given.only:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
