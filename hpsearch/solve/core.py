"""What the relaxation proves about single states, and the core problem that is left.

Any vector of row duals gives a lower bound on the program, and reduced costs: a state whose bound lies above what is
already in hand is in no better choice. Both are recomputed here from the duals alone, in float64, so that the proof
does not rest on the solver's word: a wrong dual makes the bound weak, never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpsearch.solve.elimination import least_with, sweep
from hpsearch.solve.intra_op import IntraOpProgram
from hpsearch.solve.pairwise import Pairwise
from hpsearch.solve.problem import Reals


@dataclass(frozen=True, eq=False)
class Floor:
    """Lower bounds in the problem's unit: of every choice, and how much more with a given state (per node)."""

    bound: float
    extra: dict[int, Reals]


def floor_from_duals(written: IntraOpProgram, duals: Reals) -> Floor:
    """The bound that these row duals prove, and the extra cost that they prove for each state."""
    program = written.program
    duals = np.where(np.isinf(program.row_lower), np.minimum(duals, 0.0), duals)
    duals = np.where(np.isinf(program.row_upper), np.maximum(duals, 0.0), duals)
    row, column, value = program.entries
    reduced = program.cost - np.bincount(column, weights=value * duals[row], minlength=len(program.cost))
    limits = np.where(duals > 0, program.row_lower, program.row_upper)
    fixed = np.where(duals == 0, 0.0, np.where(np.isinf(limits), 0.0, limits) * duals)
    bound = float(fixed.sum() + (np.minimum(reduced, 0.0) * program.upper).sum())
    paid = np.maximum(reduced, 0.0)
    extra = {node: paid[columns] for node, columns in written.column.items()}
    for table in written.tables:
        pairs = np.full(table.shape, np.inf)
        pairs.ravel()[table.flat] = paid[table.edge]
        (a, b), (left, right) = table.ends, table.classes
        extra[a] = extra[a] + pairs.min(axis=1)[left]
        extra[b] = extra[b] + pairs.min(axis=0)[right]
    return Floor(written.cost(bound), {node: costs / written.scale for node, costs in extra.items()})


def floor_by_elimination(form: Pairwise, multipliers: Reals) -> Floor | None:
    """The bound and extra costs with rows and hinges priced, exact in all else; None where the graph is too wide.

    At the relaxation's own multipliers the bound is no weaker than its, and the extra costs are far stronger: on joint
    graphs two thirds of the states go that reduced costs keep.
    """
    if form.shared:
        return None
    relaxed = priced(form, multipliers)
    cliques = sweep(relaxed)
    if cliques is None:
        return None
    least = least_with(cliques)
    bound = max(float(costs.min()) for costs in least.values())
    return Floor(bound + relaxed.constant, {node: np.maximum(costs - bound, 0.0) for node, costs in least.items()})


def restrict(form: Pairwise, floor: Floor, allowance: float) -> Pairwise:
    """The core: a copy of the form with the states whose extra cost is at most `allowance`."""
    core = form.copy()
    for node, extra in floor.extra.items():
        keep = extra <= allowance + 1e-12 * abs(floor.bound)  # extra costs are differences of sums of that size
        if not keep.all():
            core.keep_states(node, keep)
    return core


def priced(form: Pairwise, multipliers: Reals) -> Pairwise:
    """The form with rows and hinges as prices: no choice within the rows costs less in it than it costs.

    A row's multiplier is any number >= 0; a hinge's lies in [0, weight].
    """
    rows = len(form.limits)
    prices = np.maximum(multipliers, 0.0)
    prices[rows:] = np.minimum(prices[rows:], form.weights)
    relaxed = form.copy()
    relaxed.constant += float(prices[rows:] @ form.offsets - prices[:rows] @ form.limits)
    for node, amounts in form.coupling.items():
        relaxed.unary[node] = form.unary[node] + (prices[:, None] * amounts).sum(axis=0)
    relaxed.coupling = {}
    return relaxed
