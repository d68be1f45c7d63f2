"""The intra-op integer program, in mathematics, with the function that adds each part.

Given nodes n with states S_n, flows f with producer p(f), consumers C(f), class maps κ (state -> layout), prices
c_f[p, l] and weights w_f, rows r, hinges h:

    x[n, s]      1 if node n is in state s                                   binary        `add_states`
    e[f, k, p, l]  1 if flow f is made in p and its k-th consumer reads l    continuous    `add_reads`
    z[f, p, l]   1 if flow f is redistributed from p to l at all             continuous    `add_copies`
    y[h]         exposed part of hinge h                                     continuous    `add_hinge`

    minimise   offset + Σ_n Σ_s u_n[s]·x[n, s] + Σ_f Σ_p,l w_f·c_f[p, l]·z[f, p, l] + Σ_h w_h·y[h]

    subject to
    (1)  Σ_s x[n, s] = 1                                    for all n         one state a node     `add_states`
         (a state with u_n[s] = inf has no variable)
    (2)  Σ_l e[f, k, p, l] = Σ_{s: κ_f(s) = p} x[p(f), s]    for all f, k, p   made as chosen       `add_reads`
    (3)  Σ_p e[f, k, p, l] = Σ_{s: κ_f,k(s) = l} x[k, s]     for all f, k, l   read as chosen       `add_reads`
         (a pair with c_f[p, l] = inf has no variable)
    (4)  z[f, p, l] >= e[f, k, p, l]                        for all f, k, p, l                     `add_copies`
         (a flow with one consumer has z = e)
    (5)  Σ_n Σ_s a_r,n[s]·x[n, s] <= b_r                    for all r         memory               `add_row`
    (6)  y[h] >= Σ_n Σ_s a_h,n[s]·x[n, s] + d_h, y[h] >= 0  for all h         overlap              `add_hinge`

The marginals (2) and (3) stand over *layouts*, not states: states that read and make the same layouts share their
edge variables, which is where most of the 757,656 variables of the strategy × strategy form go. Both are equalities:
with them the relaxation is the local polytope of a pairwise model, tight on the graphs of real networks, so that its
optimum usually is integral, and then is optimum and proof at once. Once x is integral so are e, z and y: only x need
be binary.

Scaling: costs are divided by the largest, rows and hinges by their largest spread, after each node's least
coefficient has gone to the right-hand side (allowed by (1)); bytes of 1e12 beside seconds of 1e-6 would otherwise eat
the tolerances.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hpsearch.solve.mathopt import LinearProgram
from hpsearch.solve.problem import Flow, Hinge, Indices, Problem, Reals, Row


@dataclass(eq=False)
class Draft:
    """A linear program while it is written: arrays by piece, joined at the end."""

    cost: list[Reals] = field(default_factory=list)
    upper: list[Reals] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    columns: int = 0
    row_lower: list[Reals] = field(default_factory=list)
    row_upper: list[Reals] = field(default_factory=list)
    row_of: list[Indices] = field(default_factory=list)
    column_of: list[Indices] = field(default_factory=list)
    value_of: list[Reals] = field(default_factory=list)
    rows: int = 0

    def variables(self, cost: Reals, *, upper: float = 1.0, integer: bool = False) -> Indices:
        """New variables in [0, upper] with these costs; their columns."""
        first, self.columns = self.columns, self.columns + len(cost)
        self.cost.append(cost)
        self.upper.append(np.full(len(cost), upper))
        self.integer.extend([integer] * len(cost))
        return np.arange(first, self.columns)

    def constraints(self, lower: Reals, upper: Reals) -> Indices:
        """New empty rows with these limits; their positions."""
        first, self.rows = self.rows, self.rows + len(lower)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        return np.arange(first, self.rows)

    def entries(self, rows: Indices, columns: Indices, values: Reals | float) -> None:
        self.row_of.append(rows)
        self.column_of.append(columns)
        self.value_of.append(np.broadcast_to(np.asarray(values, dtype=float), rows.shape))

    def finish(self) -> LinearProgram:
        row, column, value = join(self.row_of, np.intp), join(self.column_of, np.intp), join(self.value_of, float)
        order = np.lexsort((column, row))
        return LinearProgram(
            cost=join(self.cost, float),
            lower=np.zeros(self.columns),
            upper=join(self.upper, float),
            integer=np.asarray(self.integer, dtype=bool),
            row_lower=join(self.row_lower, float),
            row_upper=join(self.row_upper, float),
            entries=(row[order], column[order], value[order]),
        )


def join(pieces: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=dtype)


@dataclass(frozen=True, eq=False)
class IntraOpProgram:
    """The linear program of a problem and the way back: `column[n][s]` of x[n, s] (-1: forbidden), cost scale."""

    program: LinearProgram
    column: tuple[Indices, ...]
    scale: float
    """Program costs are problem costs (without offset) times this."""

    def choice(self, values: Reals) -> tuple[int, ...]:
        """The state with the largest x per node, the lowest index among equals."""
        padded = np.append(values, -1.0)
        return tuple(int(np.argmax(padded[column])) for column in self.column)

    def fractional(self, values: Reals) -> int:
        """How many x are not within 1e-6 of 0 or 1."""
        x = values[self.program.integer]
        return int(np.count_nonzero(np.abs(x - np.round(x)) > 1e-6))


def write(problem: Problem) -> IntraOpProgram:
    """The integer program of the docstring above, in arrays."""
    scale = 1.0 / largest_cost(problem)
    draft = Draft()
    column = add_states(draft, problem, scale)
    for flow in problem.flows:
        add_flow(draft, flow, column, scale)
    for row in problem.rows:
        add_row(draft, row, column)
    for hinge in problem.hinges:
        add_hinge(draft, hinge, column, scale)
    return IntraOpProgram(draft.finish(), column, scale)


def largest_cost(problem: Problem) -> float:
    """A power of two near the largest finite cost, so that scaling is exact; 1 if all are zero."""
    arrays = [*problem.unary, *(flow.weight * flow.price for flow in problem.flows)]
    finite = [float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in arrays]
    spread = [hinge.weight * spread_of(hinge.coefficients) for hinge in problem.hinges]
    return float(2.0 ** np.round(np.log2(max([*finite, *spread, 1e-300]) or 1.0)))


def spread_of(coefficients: dict[int, Reals]) -> float:
    """The largest difference that one node's state makes to a row."""
    return max((float(np.ptp(c)) for c in coefficients.values()), default=0.0)


def add_states(draft: Draft, problem: Problem, scale: float) -> tuple[Indices, ...]:
    """Binary x[n, s] for every allowed state, and (1); columns per node and state, -1 where forbidden."""
    columns = []
    for unary in problem.unary:
        allowed = np.isfinite(unary)
        column = np.full(len(unary), -1)
        column[allowed] = draft.variables(unary[allowed] * scale, integer=True)
        one = np.ones(1)
        draft.entries(np.repeat(draft.constraints(one, one), allowed.sum()), column[allowed], 1.0)
        columns.append(column)
    return tuple(columns)


def add_flow(draft: Draft, flow: Flow, column: tuple[Indices, ...], scale: float) -> None:
    """All that one flow needs: e alone for a single consumer, else an e per consumer under a shared z."""
    price = flow.price * (flow.weight * scale)
    if len(flow.consumers) == 1:
        add_reads(draft, flow, flow.consumers[0], column, price)
        return
    free = np.where(np.isfinite(price), 0.0, np.inf)
    reads = [add_reads(draft, flow, consumer, column, free) for consumer in flow.consumers]
    add_copies(draft, price, reads)


def add_reads(
    draft: Draft, flow: Flow, consumer: tuple[int, Indices], column: tuple[Indices, ...], price: Reals
) -> Indices:
    """e[p, l] of one consumer with the marginals (2) and (3); columns [P, L], -1 where impossible."""
    made, read = np.nonzero(np.isfinite(price))
    edge = np.full(price.shape, -1)
    edge[made, read] = draft.variables(price[made, read])
    node, classes = consumer
    sides = ((flow.producer, flow.producer_class, made, price.shape[0]), (node, classes, read, price.shape[1]))
    for owner, owner_classes, layout, count in sides:
        zero = np.zeros(count)
        rows = draft.constraints(zero, zero)
        draft.entries(rows[layout], edge[made, read], 1.0)
        allowed = column[owner] >= 0
        draft.entries(rows[owner_classes[allowed]], column[owner][allowed], -1.0)
    return edge


def add_copies(draft: Draft, price: Reals, reads: list[Indices]) -> None:
    """z[p, l], which carries the price once, and (4) for each consumer."""
    made, read = np.nonzero(np.isfinite(price))
    copies = draft.variables(price[made, read])
    for edge in reads:
        rows = draft.constraints(np.zeros(len(copies)), np.full(len(copies), np.inf))
        draft.entries(rows, copies, 1.0)
        draft.entries(rows, edge[made, read], -1.0)


def add_row(draft: Draft, row: Row, column: tuple[Indices, ...]) -> None:
    """(5), divided by its largest spread, least coefficients moved right."""
    unit = spread_of(row.coefficients) or 1.0
    least = sum(float(c.min()) for c in row.coefficients.values())
    limit = np.array([(row.limit + row.slack - least) / unit])
    position = draft.constraints(np.array([-np.inf]), limit)
    add_coefficients(draft, position, row.coefficients, column, 1.0 / unit)


def add_hinge(draft: Draft, hinge: Hinge, column: tuple[Indices, ...], scale: float) -> None:
    """y with its cost and (6), in the unit of its largest spread."""
    unit = spread_of(hinge.coefficients) or 1.0
    least = sum(float(c.min()) for c in hinge.coefficients.values())
    exposed = draft.variables(np.array([hinge.weight * unit * scale]), upper=np.inf)
    position = draft.constraints(np.array([(hinge.offset + least) / unit]), np.array([np.inf]))
    draft.entries(position, exposed, 1.0)
    add_coefficients(draft, position, hinge.coefficients, column, -1.0 / unit)


def add_coefficients(
    draft: Draft, position: Indices, coefficients: dict[int, Reals], column: tuple[Indices, ...], factor: float
) -> None:
    """Σ_n Σ_s (a_n[s] - min a_n)·factor·x[n, s] into the row at `position`."""
    for node, values in coefficients.items():
        shifted = (values - values.min()) * factor
        present = (column[node] >= 0) & (shifted != 0)
        draft.entries(np.repeat(position, present.sum()), column[node][present], shifted[present])
