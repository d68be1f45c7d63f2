"""The inner problem as arrays: one state per node, and everything that the states cost together.

`Problem.evaluate` is the definition. Whatever the solver does (presolve, elimination, integer program) is tested
against it. Nothing here knows what a node is: to the strategy room a node is an op, a value or a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpsearch.errors import InternalError

Reals = NDArray[np.float64]
Indices = NDArray[np.intp]

ROW_TOLERANCE = 1e-9
"""A row counts as kept up to this fraction of its limit (sums of bytes in float64 are not exact)."""


@dataclass(frozen=True, eq=False)
class Flow:
    """A value made by one node and read by several.

    Costs `weight` times the sum of `price[p, l]` over the *distinct* layouts `l` its consumers use, `p` being the
    layout it is made in: a redistribution is paid once per layout, however many consumers share it.
    """

    name: str
    producer: int
    producer_class: Indices
    """[states of the producer] -> layout index p in 0..P-1."""
    consumers: tuple[tuple[int, Indices], ...]
    """(node, [states of the node] -> layout index l in 0..L-1) each; a node may occur twice."""
    price: Reals
    """[P, L], >= 0; inf = this redistribution is impossible."""
    weight: float = 1.0
    """How many times the value occurs; > 0."""


@dataclass(frozen=True, eq=False)
class Row:
    """A coupling limit: sum of `coefficients[n][state of n]` over its nodes <= limit. Memory in bytes, usually."""

    name: str
    coefficients: dict[int, Reals]
    limit: float

    def total(self, choice: Sequence[int]) -> float:
        return float(sum(float(c[choice[n]]) for n, c in self.coefficients.items()))

    @property
    def slack(self) -> float:
        """How far above the limit a sum may lie and still count as equal to it."""
        return ROW_TOLERANCE * abs(self.limit)


@dataclass(frozen=True, eq=False)
class Hinge:
    """An overlap term: costs weight * max(0, sum of `coefficients[n][state of n]` + offset)."""

    name: str
    coefficients: dict[int, Reals]
    offset: float
    weight: float = 1.0

    def cost(self, choice: Sequence[int]) -> float:
        total = self.offset + sum(float(c[choice[n]]) for n, c in self.coefficients.items())
        return self.weight * max(0.0, total)


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one state per node: minimise unary + flows + hinges + offset, within every row.

    Raises InternalError when an array has the wrong shape or holds a number that cannot be a cost.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    unary: tuple[Reals, ...]
    """[states] each; inf = forbidden state."""
    flows: tuple[Flow, ...] = ()
    rows: tuple[Row, ...] = ()
    hinges: tuple[Hinge, ...] = ()
    offset: float = 0.0

    def __post_init__(self) -> None:
        check(self)

    def __len__(self) -> int:
        return len(self.sizes)

    def evaluate(self, choice: Sequence[int]) -> float:
        """Cost of one state per node; inf when a state or redistribution is impossible or a row is broken."""
        if any(row.total(choice) > row.limit + row.slack for row in self.rows):
            return float("inf")
        cost = self.offset + sum(float(u[s]) for u, s in zip(self.unary, choice, strict=True))
        cost += sum(flow_cost(flow, choice) for flow in self.flows)
        return cost + sum(hinge.cost(choice) for hinge in self.hinges)


def flow_cost(flow: Flow, choice: Sequence[int]) -> float:
    """What one flow costs: every distinct layout its consumers use, once."""
    made = flow.producer_class[choice[flow.producer]]
    used = sorted({int(classes[choice[node]]) for node, classes in flow.consumers})
    return flow.weight * sum(float(flow.price[made, layout]) for layout in used)


@dataclass(frozen=True)
class Solution:
    """What `solve` found, with its proof: no choice costs less than `bound`."""

    choice: tuple[int, ...] | None
    objective: float
    """`Problem.evaluate(choice)`; inf without a choice."""
    bound: float
    """Proven: every choice costs at least this. inf when infeasible."""
    gap: float
    """(objective - bound) / |objective|; 0 when optimal or proven infeasible, inf without a choice otherwise."""
    status: str
    """optimal, feasible (time limit), stopped (time limit before any choice was found), infeasible, or cut off (every
    choice costs more than the upper bound given)."""
    method: str
    """Which steps settled it, e.g. `presolve+elimination`, `presolve+lp`, `presolve+mip`."""
    stats: dict[str, float] = field(default_factory=dict)


def check(problem: Problem) -> None:
    """Refuse arrays of the wrong shape, and numbers that are no costs, naming the place."""
    count = len(problem.sizes)
    if len(problem.names) != count or len(problem.unary) != count:
        refuse("Problem", f"{count} sizes but {len(problem.names)} names and {len(problem.unary)} unary arrays")
    for name, size, unary in zip(problem.names, problem.sizes, problem.unary, strict=True):
        if size < 1 or unary.shape != (size,):
            refuse(f"node {name}", f"expected unary of shape ({size},) with size >= 1, but found {unary.shape}")
        if not (unary > -np.inf).all():
            refuse(f"node {name}", "unary costs must be numbers above -inf, but found nan or -inf")
    for flow in problem.flows:
        check_flow(problem, flow)
    terms: list[Row | Hinge] = [*problem.rows, *problem.hinges]
    for term in terms:
        for node, coefficients in term.coefficients.items():
            if not 0 <= node < count or coefficients.shape != (problem.sizes[node],):
                refuse(term.name, f"coefficients of node {node} do not match its states: {coefficients.shape}")
            if not np.isfinite(coefficients).all():
                refuse(term.name, f"coefficients of node {problem.names[node]} are not finite")
    for hinge in problem.hinges:
        if not (hinge.weight >= 0 and np.isfinite(hinge.weight) and np.isfinite(hinge.offset)):
            refuse(hinge.name, f"expected a finite weight >= 0 and offset, but found {hinge.weight}, {hinge.offset}")


def check_flow(problem: Problem, flow: Flow) -> None:
    if flow.price.ndim != 2 or not (flow.price >= 0).all() or not (0 < flow.weight < np.inf):
        refuse(f"flow {flow.name}", f"expected prices [P, L] >= 0 and a weight > 0, found weight {flow.weight}")
    sides = ((flow.producer, flow.producer_class, 0), *((n, c, 1) for n, c in flow.consumers))
    for node, classes, side in sides:
        if not 0 <= node < len(problem.sizes) or classes.shape != (problem.sizes[node],):
            refuse(f"flow {flow.name}", f"classes of node {node} do not match its states: {classes.shape}")
        if int(classes.min()) < 0 or int(classes.max()) >= flow.price.shape[side]:
            refuse(f"flow {flow.name}", f"a layout index of node {problem.names[node]} is outside {flow.price.shape}")


def refuse(subject: str, problem: str) -> None:
    raise InternalError(subject, problem, "The problem was built wrongly; please report this.")
