"""The truth on small problems: every assignment, priced by the definition, in numpy."""

from __future__ import annotations

import numpy as np

from hpsearch.errors import InternalError
from hpsearch.solve.problem import Indices, Problem, Reals, Solution

LIMIT = 1_000_000


def enumerate_all(problem: Problem) -> Solution:
    """The optimum by pricing all assignments (at most 10^6); the first in lexicographic order among equals.

    Raises InternalError above 10^6 assignments.
    """
    count = int(np.prod([float(s) for s in problem.sizes]))
    if count > LIMIT:
        raise InternalError("enumerate_all", f"expected at most {LIMIT:,} assignments, but found {count:,}")
    grid = np.indices(problem.sizes).reshape(len(problem), -1) if len(problem) else np.zeros((0, 1), dtype=np.intp)
    cost = price_all(problem, grid)
    best = int(np.argmin(cost))
    choice = tuple(int(s) for s in grid[:, best])
    objective = problem.evaluate(choice)
    if not np.isfinite(objective):
        return Solution(None, float("inf"), float("inf"), 0.0, "infeasible", "enumeration", {"assignments": count})
    return Solution(choice, objective, objective, 0.0, "optimal", "enumeration", {"assignments": count})


def price_all(problem: Problem, grid: Indices) -> Reals:
    """Costs [A] of the assignments grid [nodes, A]; inf where infeasible."""
    cost = np.full(grid.shape[1], float(problem.offset))
    for unary, states in zip(problem.unary, grid, strict=True):
        cost += unary[states]
    for flow in problem.flows:
        made = flow.producer_class[grid[flow.producer]]
        for layout in range(flow.price.shape[1]):
            used = np.zeros(grid.shape[1], dtype=bool)
            for node, classes in flow.consumers:
                used |= classes[grid[node]] == layout
            cost += np.where(used, flow.weight * flow.price[made, layout], 0.0)
    for hinge in problem.hinges:
        total = np.full(grid.shape[1], float(hinge.offset))
        for node, coefficients in hinge.coefficients.items():
            total += coefficients[grid[node]]
        cost += hinge.weight * np.maximum(total, 0.0)
    for row in problem.rows:
        used_bytes = np.zeros(grid.shape[1])
        for node, coefficients in row.coefficients.items():
            used_bytes += coefficients[grid[node]]
        cost[used_bytes > row.limit + row.slack] = np.inf
    return cost
