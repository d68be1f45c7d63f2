"""The intra-op integer program, in mathematics, with the function that adds each part.

Given are nodes n with allowed states S_n and costs u_n; flows f, made by p(f) in layout κ_f(state), read by the nodes
k of C(f) in layout λ_f,k(state), at price c_f[p, l] a redistribution and weight w_f; rows r; hinges h:

    x[n, s]        1 if node n is in state s                              binary        `add_states`
    e[t, i, j]     1 if the ends of table t are in classes i and j        continuous    `add_table`
    z[f, p, l]     1 if flow f is redistributed from p to l at all        continuous    `add_copies`
    y[h]           exposed part of hinge h                                continuous    `add_hinge`

    minimise   offset + Σ_n Σ_s u_n[s]·x[n, s] + Σ_t Σ_i,j c_t[i, j]·e[t, i, j]
                      + Σ_f Σ_p,l w_f·c_f[p, l]·z[f, p, l] + Σ_h w_h·y[h]

    subject to
    (1)  Σ_s x[n, s] = 1                                 for all n          one state a node      `add_states`
    (2)  Σ_j e[t, i, j] = Σ_{s in class i} x[a(t), s]    for all t, i       one end as chosen     `add_table`
    (3)  Σ_i e[t, i, j] = Σ_{s in class j} x[b(t), s]    for all t, j       the other as chosen   `add_table`
         (a pair of infinite cost has no variable)
    (4)  z[f, p, l] >= e[f, k, p, l]                     for all f, k, p, l paid once a layout    `add_copies`
         (e[f, k, ·, ·]: (2) and (3) between p(f) and reader k at no cost)
    (5)  Σ_n Σ_s a_r,n[s]·x[n, s] <= b_r                 for all r          memory                `add_row`
    (6)  y[h] >= Σ_n Σ_s a_h,n[s]·x[n, s] + d_h          for all h          overlap, y[h] >= 0    `add_hinge`

A flow with one reader is a table, c_t[i, j] = w_f·c_f[i, j]. A flow with several readers becomes tables too, through a
copies node whose states are the sets of layouts the value is redistributed to (pairwise.py): the price of the set
between producer and copies, membership between copies and reader. Over such a star (1)-(3) describe the convex hull,
so this is stronger than (4); only a flow with too many layouts for that is written as z and (4).

Tables stand over *classes*: states of a node with equal costs throughout a table share its variables, and that is
where most of the 757,656 variables of the strategy × strategy form go. Both marginals are equalities: the relaxation
is then the local polytope of a pairwise model, tight on the graphs of real networks, so that without an active row
its optimum usually is integral, which is optimum and proof at once. Once x is integral so are e and z: only x need be
binary. What presolve leaves of a problem is written, not the problem itself.

Scaling: costs are divided by the largest, rows and hinges by their largest spread, after each node's least
coefficient has gone to the right-hand side (allowed by (1)); bytes of 1e12 beside seconds of 1e-6 would otherwise eat
the tolerances.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hpsearch.solve.mathopt import LinearProgram
from hpsearch.solve.pairwise import Pairwise
from hpsearch.solve.problem import Flow, Indices, Reals


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
    """The linear program of what presolve left, and the way back."""

    program: LinearProgram
    column: dict[int, Indices]
    """Of x[n, s], by node and position of the state."""
    scale: float
    """Program costs are problem costs times this, without `constant`."""
    constant: float

    def positions(self, values: Reals) -> dict[int, int]:
        """Per node the position of the state with the largest x, the lowest among equals."""
        return {node: int(np.argmax(values[column])) for node, column in self.column.items()}

    def fractional(self, values: Reals) -> int:
        """How many x are not within 1e-6 of 0 or 1."""
        x = values[self.program.integer]
        return int(np.count_nonzero(np.abs(x - np.round(x)) > 1e-6))

    def cost(self, objective: float) -> float:
        """A program objective or bound in the problem's own unit."""
        return objective / self.scale + self.constant


def write(form: Pairwise) -> IntraOpProgram:
    """The integer program of the docstring above, in arrays."""
    scale = 1.0 / largest_cost(form)
    draft = Draft()
    column, constant = add_states(draft, form, scale)
    for (a, b), table in form.tables.items():
        left, right, classes = merge_equal(table)
        add_table(draft, (column[a], left), (column[b], right), classes * scale)
    for flow in form.shared:
        add_copies(draft, form, flow, column, scale)
    for position, limit in enumerate(form.limits):
        add_row(draft, form, column, position, float(limit))
    for position in range(len(form.weights)):
        add_hinge(draft, form, column, position, scale)
    return IntraOpProgram(draft.finish(), column, scale, constant)


def largest_cost(form: Pairwise) -> float:
    """The largest spread of any cost that a single choice makes, to a power of two so that scaling is exact."""
    tables = [*form.tables.values(), *(flow.weight * flow.price for flow in form.shared)]
    spread = [float(u.max() - u.min()) for u in form.unary.values()]
    spread += [float(t[np.isfinite(t)].max(initial=0.0)) for t in tables]
    rows = len(form.limits)
    spread += [float((form.weights * np.ptp(c[rows:], axis=1)).max(initial=0.0)) for c in form.coupling.values()]
    return float(2.0 ** np.ceil(np.log2(max([*spread, 0.0]) or 1.0)))


def merge_equal(table: Reals) -> tuple[Indices, Indices, Reals]:
    """Class of each row, class of each column, and the table over classes: equal rows and columns merged."""
    left, kept = classes_of(table)
    right, also = classes_of(table.T[:, kept])
    return left, right, table[np.ix_(kept, also)]


def classes_of(vectors: Reals) -> tuple[Indices, list[int]]:
    """Class of each vector (equal ones share it) and the first member of each class."""
    seen: dict[bytes, int] = {}
    kept: list[int] = []
    classes = np.empty(len(vectors), dtype=np.intp)
    for position, vector in enumerate(np.ascontiguousarray(vectors)):
        classes[position] = seen.setdefault(vector.tobytes(), len(kept))
        if classes[position] == len(kept):
            kept.append(position)
    return classes, kept


def add_states(draft: Draft, form: Pairwise, scale: float) -> tuple[dict[int, Indices], float]:
    """Binary x[n, s], and (1); columns by node, and the constant that was taken out of the costs."""
    columns, constant = {}, form.constant
    for node, unary in form.unary.items():
        least = float(unary.min())
        constant += least
        columns[node] = draft.variables((unary - least) * scale, integer=True)
        one = np.ones(1)
        draft.entries(np.repeat(draft.constraints(one, one), len(unary)), columns[node], 1.0)
    return columns, constant


def add_table(draft: Draft, a: tuple[Indices, Indices], b: tuple[Indices, Indices], costs: Reals) -> Indices:
    """e[i, j] with its costs and (2), (3); an end is (columns of its states, their classes). Columns; -1: impossible."""
    where = np.nonzero(np.isfinite(costs))
    edge = np.full(costs.shape, -1)
    edge[where] = draft.variables(costs[where])
    for (column, classes), layout, count in zip((a, b), where, costs.shape, strict=True):
        zero = np.zeros(count)
        rows = draft.constraints(zero, zero)
        draft.entries(rows[layout], edge[where], 1.0)
        draft.entries(rows[classes], column, -1.0)
    return edge


def add_copies(draft: Draft, form: Pairwise, flow: Flow, column: dict[int, Indices], scale: float) -> None:
    """z[p, l], which carries the price once, and (4) for each reader."""
    made = flow.producer_class[form.labels[flow.producer]]
    where = np.nonzero(np.isfinite(flow.price))
    copies = draft.variables(flow.price[where] * (flow.weight * scale))
    free = np.where(np.isfinite(flow.price), 0.0, np.inf)
    for node, classes in flow.consumers:
        edge = add_table(draft, (column[flow.producer], made), (column[node], classes[form.labels[node]]), free)
        rows = draft.constraints(np.zeros(len(copies)), np.full(len(copies), np.inf))
        draft.entries(rows, copies, 1.0)
        draft.entries(rows, edge[where], -1.0)


def add_row(draft: Draft, form: Pairwise, column: dict[int, Indices], position: int, limit: float) -> None:
    """(5), divided by its largest spread, least coefficients moved right."""
    unit, least = unit_and_least(form, position)
    row = draft.constraints(np.array([-np.inf]), np.array([(limit - least) / unit]))
    add_coefficients(draft, form, column, position, row, 1.0 / unit)


def add_hinge(draft: Draft, form: Pairwise, column: dict[int, Indices], hinge: int, scale: float) -> None:
    """y with its cost and (6), in the unit of its largest spread."""
    position = len(form.limits) + hinge
    unit, least = unit_and_least(form, position)
    exposed = draft.variables(np.array([form.weights[hinge] * unit * scale]), upper=np.inf)
    row = draft.constraints(np.array([(form.offsets[hinge] + least) / unit]), np.array([np.inf]))
    draft.entries(row, exposed, 1.0)
    add_coefficients(draft, form, column, position, row, -1.0 / unit)


def unit_and_least(form: Pairwise, position: int) -> tuple[float, float]:
    """The largest difference that one node makes to a coupling term, and the least that all nodes give it."""
    amounts: Iterable[Reals] = [coefficients[position] for coefficients in form.coupling.values()]
    unit = max((float(np.ptp(a)) for a in amounts), default=0.0)
    return unit or 1.0, sum(float(a.min()) for a in amounts)


def add_coefficients(
    draft: Draft, form: Pairwise, column: dict[int, Indices], position: int, row: Indices, factor: float
) -> None:
    """Σ_n Σ_s (a_n[s] - min a_n)·factor·x[n, s] into one row."""
    for node, coefficients in form.coupling.items():
        shifted = (coefficients[position] - coefficients[position].min()) * factor
        present = np.flatnonzero(shifted)
        draft.entries(np.repeat(row, len(present)), column[node][present], shifted[present])
