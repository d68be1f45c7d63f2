"""`solve`: the exact optimum of a `Problem`, or an honest gap.

In this order, the first that settles it:

1. Without rows and hinges and narrow enough: elimination, exact.
2. Presolve; what it leaves without rows and hinges, again by elimination if narrow enough.
3. With rows but no hinges: the same without the rows; if its choice keeps them, it is the optimum.
4. The linear relaxation of the integer program (intra_op.py). Integral: optimum and proof.
5. The core: only states whose proven extra cost lies within an allowance above the bound, presolved again and solved
   as an integer program. Its optimum U settles the whole problem once U - bound <= allowance; else that difference is
   the next allowance, and the last.

Ties: elimination and presolve take the lowest state among equals, node by node in a fixed order; HiGHS runs one
thread with a fixed seed. The result is a function of the problem's arrays and their order alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from hpsearch.errors import InternalError
from hpsearch.solve import core, intra_op, mathopt
from hpsearch.solve.elimination import eliminate
from hpsearch.solve.pairwise import Pairwise, pairwise_form
from hpsearch.solve.presolve import presolve
from hpsearch.solve.problem import Problem, Row, Solution

INF = float("inf")
FIRST_ALLOWANCE = 1e-3
"""The first core holds states within this fraction of the bound: a few times the gaps seen on joint graphs."""

PROOF = 1e-9
"""An objective this close to its bound (relative) is optimal: what float64 sums over a thousand nodes can tell."""


@dataclass(eq=False)
class Attempt:
    """One call of `solve`: the question, the clock, and which steps were taken."""

    problem: Problem
    deadline: float
    upper_bound: float
    steps: list[str] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def infeasible(self) -> Solution:
        return Solution(None, INF, INF, 0.0, "infeasible", "+".join(self.steps), self.stats)

    def found(self, choice: tuple[int, ...] | None, bound: float, *, proven: bool) -> Solution:
        """A choice priced by the definition, with what is proven about it."""
        objective = self.problem.evaluate(choice) if choice is not None else INF
        bound = min(bound, objective)
        method = "+".join(self.steps)
        if bound > self.upper_bound:
            return Solution(None, INF, bound, INF, "cut off", method, self.stats)
        if proven and np.isfinite(objective):
            return Solution(choice, objective, bound, 0.0, "optimal", method, self.stats)
        if not np.isfinite(objective):
            return Solution(None, INF, bound, INF, "stopped", method, self.stats)
        gap = (objective - bound) / abs(objective) if objective else INF
        return Solution(choice, objective, bound, gap, "feasible", method, self.stats)


def solve(problem: Problem, *, time_limit_s: float = 60.0, upper_bound: float = INF) -> Solution:
    """The cheapest choice with proof; may stop as soon as every choice is known to cost more than `upper_bound`."""
    attempt = Attempt(problem, time.monotonic() + time_limit_s, upper_bound)
    form = pairwise_form(problem)
    direct = by_elimination(attempt, form)
    if direct is not None:
        return direct
    attempt.steps.append("presolve")
    if not presolve(form):
        return attempt.infeasible()
    attempt.stats |= {"nodes_left": len(form.near), "states_left": sum(map(len, form.unary.values()))}
    return by_elimination(attempt, form) or without_rows(attempt, form) or by_program(attempt, form)


def by_elimination(attempt: Attempt, form: Pairwise) -> Solution | None:
    """Steps 1 and 2; None when the form has rows or hinges or is too wide."""
    if form.coupling or form.shared:
        return None
    least = eliminate(form)
    if least is None:
        return None
    if form.near:
        attempt.steps.append("elimination")
    value, positions = least
    if not np.isfinite(value) or (form.limits < 0).any():
        return attempt.infeasible()
    choice = form.restore(positions, len(attempt.problem))
    return attempt.found(choice, INF, proven=True)


def without_rows(attempt: Attempt, form: Pairwise) -> Solution | None:
    """Step 3: the optimum without the rows, if it happens to keep them, or costs too much already."""
    if form.shared or len(form.weights):
        return None
    least = eliminate(form)
    if least is None:
        return None
    value, positions = least
    choice = form.restore(positions, len(attempt.problem)) if np.isfinite(value) else None
    kept = choice is not None and np.isfinite(attempt.problem.evaluate(choice))
    if not kept and value <= attempt.upper_bound and np.isfinite(value):
        return None
    attempt.steps.append("elimination")
    if choice is None:
        return attempt.infeasible()
    return attempt.found(choice if kept else None, INF if kept else value, proven=kept)


def by_program(attempt: Attempt, form: Pairwise) -> Solution:
    """Steps 4 and 5."""
    attempt.steps.append("lp")
    written = intra_op.write(form)
    attempt.stats |= {"variables": len(written.program.cost), "constraints": len(written.program.row_lower)}
    relaxed = mathopt.minimise(written.program, integral=False, time_limit_s=attempt.left_s())
    if relaxed.status == "infeasible":
        return attempt.infeasible()
    if relaxed.status != "optimal" or relaxed.values is None or relaxed.row_duals is None:
        return attempt.found(None, written.cost(0.0), proven=False)
    floor = core.floor_from_duals(written, relaxed.row_duals)
    attempt.stats |= {"lp_bound": floor.bound, "fractional": written.fractional(relaxed.values)}
    if floor.bound > attempt.upper_bound:
        return attempt.found(None, floor.bound, proven=False)
    if not written.fractional(relaxed.values):
        choice = form.restore(written.positions(relaxed.values), len(attempt.problem))
        cost = attempt.problem.evaluate(choice)
        if cost - floor.bound <= PROOF * max(abs(cost), abs(floor.bound)):
            return attempt.found(choice, floor.bound, proven=True)
    sharper = core.floor_by_elimination(form, written.multipliers(relaxed.row_duals))
    return by_core(attempt, form, sharper or floor)


def by_core(attempt: Attempt, form: Pairwise, floor: core.Floor) -> Solution:
    """Step 5: cores of growing allowance, each an integer program."""
    attempt.steps.append("mip")
    most = max(float(extra[np.isfinite(extra)].max(initial=0.0)) for extra in floor.extra.values())
    allowance = FIRST_ALLOWANCE * max(abs(floor.bound), most)
    best: tuple[int, ...] | None = None
    cost, bound = INF, floor.bound
    for attempt.stats["cores"] in range(1, 100):
        allowance = min(allowance, attempt.upper_bound - floor.bound)
        choice, core_bound, settled = solve_core(attempt, core.restrict(form, floor, allowance))
        outside = float(np.nextafter(floor.bound + allowance, INF)) if allowance < most else INF
        bound = max(bound, min(core_bound, outside))
        if choice is not None and attempt.problem.evaluate(choice) < cost:
            best, cost = choice, attempt.problem.evaluate(choice)
        if not settled:
            return attempt.found(best, bound, proven=False)
        if best is not None and cost <= outside:
            return attempt.found(best, cost, proven=True)
        if outside == INF:
            return attempt.infeasible()
        if outside > attempt.upper_bound:
            return attempt.found(None, outside, proven=False)
        allowance = cost - floor.bound if best is not None else 8 * allowance
    raise InternalError("solve", "expected the core to settle, but it did not", "Please report this problem.")


def solve_core(attempt: Attempt, form: Pairwise) -> tuple[tuple[int, ...] | None, float, bool]:
    """Best choice of a core, its bound, and whether that is final (False: out of time)."""
    if not presolve(form):
        return None, INF, True
    if not form.coupling and not form.shared:
        least = eliminate(form)
        if least is not None:
            return form.restore(least[1], len(attempt.problem)), least[0], True
    written = intra_op.write(form)
    attempt.stats["core_variables"] = len(written.program.cost)
    answer = mathopt.minimise(written.program, integral=True, time_limit_s=attempt.left_s())
    if answer.status == "infeasible":
        return None, INF, True
    choice = form.restore(written.positions(answer.values), len(attempt.problem)) if answer.values is not None else None
    kept = choice is None or attempt.problem.evaluate(choice) < INF  # else a row is broken by the solver's tolerance
    return choice if kept else None, written.cost(answer.bound), kept and answer.status == "optimal"


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
