"""What `solve` promises beside the optimum: cutoffs, limits, refusals, sameness."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpsearch.errors import InternalError
from hpsearch.solve import Flow, Hinge, Problem, Row, enumerate_all, least, solve
from tests.solve.problems import layered, oracle, random_problem

INF = float("inf")
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(20))
def test_cut_off_only_above_the_upper_bound(seed: int) -> None:
    problem = random_problem(seed)
    optimum = enumerate_all(problem).objective
    below = solve(problem, upper_bound=optimum - 0.01 * abs(optimum))
    assert below.status == "cut off"
    assert below.choice is None
    assert optimum - 0.01 * abs(optimum) < below.bound <= optimum + 1e-9
    above = solve(problem, upper_bound=optimum + 0.01 * abs(optimum))
    assert above.status == "optimal"
    assert above.objective == pytest.approx(optimum, rel=1e-9)


def test_a_large_problem_with_memory_and_overlap_is_solved_and_its_bound_holds() -> None:
    problem = layered(4, 0)
    found = solve(problem)
    assert found.status == "optimal"
    assert found.choice is not None
    free = solve(replace(problem, rows=()))
    assert free.choice is not None
    assert problem.evaluate(free.choice) == INF, "the memory row is active"
    assert free.objective < found.objective
    assert found.bound <= found.objective <= found.bound * (1 + 1e-9)


def test_out_of_time_says_so_and_stays_honest() -> None:
    problem, optimum = oracle("llama8b_2d")
    found = solve(problem, time_limit_s=0.05)
    assert found.status in ("feasible", "stopped")
    assert found.bound <= optimum + 1e-6
    assert found.gap > 0
    if found.choice is not None:
        assert found.objective == problem.evaluate(found.choice) >= optimum - 1e-6


@pytest.mark.parametrize("seed", range(12))
def test_least_memory_is_the_enumerated_least(seed: int) -> None:
    problem = random_problem(seed)
    row = problem.rows[0]
    problem = replace(problem, rows=(row,))
    tight = replace(problem, rows=(replace(row, limit=0.0),))
    found = least(tight, "memory")
    assert found.choice is not None
    feasible = replace(problem, rows=())
    amounts = [row.total(choice) for choice in np.ndindex(*problem.sizes) if feasible.evaluate(choice) < INF]
    assert found.objective == min(amounts) == row.total(found.choice)
    assert feasible.evaluate(found.choice) < INF


def test_infeasible_memory_is_a_status_not_an_error() -> None:
    problem = random_problem(7)
    tight = replace(problem, rows=(replace(problem.rows[0], limit=-1.0),))
    assert solve(tight).status == "infeasible"


def test_least_of_an_unknown_row_is_refused() -> None:
    with pytest.raises(InternalError, match="row host"):
        least(random_problem(1), "host")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unary": (np.zeros(3), np.zeros(2))}, r"node a: expected unary of shape \(2,\)"),
        ({"unary": (np.array([0.0, np.nan]), np.zeros(2))}, "node a: .*nan"),
        ({"names": ("a",)}, "2 sizes but 1 names"),
        (
            {"flows": (Flow("f", 0, np.arange(2), ((1, np.array([0, 2])),), np.zeros((2, 2))),)},
            "layout index of node b",
        ),
        ({"flows": (Flow("f", 0, np.arange(2), ((1, np.arange(2)),), -np.ones((2, 2))),)}, "flow f: expected prices"),
        ({"flows": (Flow("f", 5, np.arange(2), ((1, np.arange(2)),), np.zeros((2, 2))),)}, "flow f: classes of node 5"),
        ({"rows": (Row("m", {0: np.zeros(3)}, 1.0),)}, "m: coefficients of node 0"),
        ({"hinges": (Hinge("h", {0: np.array([0.0, INF])}, 1.0),)}, "h: coefficients of node a are not finite"),
        ({"hinges": (Hinge("h", {0: np.zeros(2)}, 0.0, -1.0),)}, "h: expected a finite weight"),
    ],
)
def test_arrays_that_are_no_problem_are_refused(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"sizes": (2, 2), "names": ("a", "b"), "unary": (np.zeros(2), np.zeros(2))}
    with pytest.raises(InternalError, match=message):
        Problem(**(good | change))  # type: ignore[arg-type]


SAMENESS = """
from tests.solve.problems import layered, random_problem
from hpsearch.solve import solve
print([solve(p).choice for p in (layered(2, 3), *(random_problem(seed) for seed in range(0, 12, 3)))])
"""


def test_the_choice_does_not_depend_on_the_hash_seed() -> None:
    printed = set()
    for seed in ("0", "1", "31337"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)}
        run = subprocess.run(
            [sys.executable, "-c", SAMENESS], env=environment, capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr
        printed.add(run.stdout)
    assert len(printed) == 1


def test_solving_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    solve(layered(2, 0))
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_solving_needs_no_torch() -> None:
    script = "import sys, hpsearch.solve; assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
