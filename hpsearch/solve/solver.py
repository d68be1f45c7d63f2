"""`solve`: the exact optimum of a `Problem`, or an honest gap."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from hpsearch.errors import InternalError
from hpsearch.solve import intra_op, mathopt
from hpsearch.solve.pairwise import Pairwise, pairwise_form
from hpsearch.solve.presolve import presolve
from hpsearch.solve.problem import Problem, Row, Solution

INF = float("inf")


def solve(problem: Problem, *, time_limit_s: float = 60.0, upper_bound: float = INF) -> Solution:
    """The cheapest choice with proof; may stop as soon as every choice is known to cost more than `upper_bound`."""
    deadline = time.monotonic() + time_limit_s
    form = pairwise_form(problem)
    if not presolve(form):
        return Solution(None, INF, INF, 0.0, "infeasible", "presolve")
    written = intra_op.write(form)
    relaxed = mathopt.minimise(written.program, integral=False, time_limit_s=time_limit_s)
    if relaxed.status == "infeasible":
        return Solution(None, INF, INF, 0.0, "infeasible", "presolve+lp")
    bound = written.cost(relaxed.bound)
    if bound > upper_bound:
        return Solution(None, INF, bound, INF, "cut off", "presolve+lp")
    if relaxed.status == "optimal" and relaxed.values is not None and not written.fractional(relaxed.values):
        choice = form.restore(written.positions(relaxed.values), len(problem))
        objective = problem.evaluate(choice)
        if np.isfinite(objective):
            return Solution(choice, objective, min(bound, objective), 0.0, "optimal", "presolve+lp")
    left = max(deadline - time.monotonic(), 0.01)
    answer = mathopt.minimise(written.program, integral=True, time_limit_s=left)
    return finish(problem, form, written, answer, upper_bound)


def finish(
    problem: Problem, form: Pairwise, written: intra_op.IntraOpProgram, answer: mathopt.Answer, upper_bound: float
) -> Solution:
    """The integer answer as a solution, priced by the definition."""
    if answer.status == "infeasible":
        return Solution(None, INF, INF, 0.0, "infeasible", "presolve+mip")
    bound = written.cost(answer.bound)
    choice = form.restore(written.positions(answer.values), len(problem)) if answer.values is not None else None
    objective = problem.evaluate(choice) if choice is not None else INF
    bound = min(bound, objective)
    if bound > upper_bound:
        return Solution(None, INF, bound, INF, "cut off", "presolve+mip")
    if answer.status == "optimal" and np.isfinite(objective):
        return Solution(choice, objective, bound, 0.0, "optimal", "presolve+mip")
    gap = (objective - bound) / abs(objective) if np.isfinite(objective) and objective else INF
    return Solution(choice if np.isfinite(objective) else None, objective, bound, gap, "feasible", "presolve+mip")


def least(problem: Problem, row_name: str) -> Solution:
    """The choice with the least value of one row, its limit ignored; `objective` is that value (bytes).

    Raises InternalError when no row has that name.
    """
    row = next((r for r in problem.rows if r.name == row_name), None)
    if row is None:
        raise InternalError(f"row {row_name}", f"expected one of {[r.name for r in problem.rows]}", "Fix the caller.")
    return solve(only_row(problem, row))


def only_row(problem: Problem, row: Row) -> Problem:
    """The same states and impossibilities, with the row's value as the only cost."""
    unary = []
    for node, costs in enumerate(problem.unary):
        amounts = row.coefficients.get(node, np.zeros(len(costs)))
        unary.append(np.where(np.isfinite(costs), amounts, np.inf))
    flows = tuple(replace(f, price=np.where(np.isfinite(f.price), 0.0, np.inf)) for f in problem.flows)
    others = tuple(r for r in problem.rows if r is not row)
    return replace(problem, unary=tuple(unary), flows=flows, rows=others, hinges=(), offset=0.0)
