"""CPU seconds of the inner solver: the two oracle problems, and joint graphs with a memory row and overlap terms.

    python -m tests.benchmarks.bench_solver [--repeat N]

Every figure is the median of N runs of build (arrays to `Problem`) and of `solve`, by `time.process_time`, one thread.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

from hpsearch.solve import Problem, Solution, solve
from tests.solve.problems import layered, oracle

BEST_KNOWN_S = {"llama8b_1d": 0.11, "llama8b_2d": 1.9}
"""CPU seconds of exact presolve + HiGHS on the oracle problems, as published with them; CBC on 2d: 52-60."""


def cases() -> dict[str, Callable[[], Problem]]:
    named: dict[str, Callable[[], Problem]] = {
        "llama8b_1d": lambda: oracle("llama8b_1d")[0],
        "llama8b_2d": lambda: oracle("llama8b_2d")[0],
    }
    for layers in (4, 16):
        named[f"layered {layers}, no rows"] = lambda n=layers: layered(n, 0, memory=None, hinges=0)
        named[f"layered {layers}, memory"] = lambda n=layers: layered(n, 0, memory=0.3, hinges=0)
        named[f"layered {layers}, memory + 6 hinges"] = lambda n=layers: layered(n, 0, memory=0.3, hinges=6)
    return named


def measure(make: Callable[[], Problem], repeat: int) -> tuple[float, float, Problem, Solution]:
    """Median CPU seconds of build and of solve, and the last problem and solution."""
    builds, solves = [], []
    for _ in range(repeat):
        start = time.process_time()
        problem = make()
        built = time.process_time()
        found = solve(problem, time_limit_s=300)
        builds.append(built - start)
        solves.append(time.process_time() - built)
    return statistics.median(builds), statistics.median(solves), problem, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, python {platform.python_version()}")
    print(f"{'problem':<34}{'nodes':>6}{'states':>8}{'build s':>9}{'solve s':>9}{'best known':>11}  status, method")
    for name, make in cases().items():
        build_s, solve_s, problem, found = measure(make, repeat)
        known = f"{BEST_KNOWN_S[name]:.2f}" if name in BEST_KNOWN_S else ""
        print(
            f"{name:<34}{len(problem):>6}{sum(problem.sizes):>8}{build_s:>9.3f}{solve_s:>9.3f}{known:>11}"
            f"  {found.status}, {found.method}"
        )


if __name__ == "__main__":
    main()
