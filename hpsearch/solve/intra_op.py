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
    columns: int = 0
    row_lower: list[Reals] = field(default_factory=list)
    row_upper: list[Reals] = field(default_factory=list)
    rows: int = 0
    row_of: list[Indices] = field(default_factory=list)
    column_of: list[Indices] = field(default_factory=list)
    value_of: list[Reals] = field(default_factory=list)

    def variables(self, cost: Reals, upper: float = 1.0) -> Indices:
        """New variables in [0, upper] with these costs; their columns."""
        first, self.columns = self.columns, self.columns + len(cost)
        self.cost.append(cost)
        self.upper.append(np.full(len(cost), upper))
        return np.arange(first, self.columns)

    def constraints(self, count: int, lower: float, upper: float) -> int:
        """New empty rows with these limits; the position of the first."""
        first, self.rows = self.rows, self.rows + count
        self.row_lower.append(np.full(count, lower))
        self.row_upper.append(np.full(count, upper))
        return first

    def entries(self, rows: Indices, columns: Indices, values: Reals) -> None:
        self.row_of.append(rows)
        self.column_of.append(columns)
        self.value_of.append(values)

    def ones(self, rows: Indices, columns: Indices, value: float) -> None:
        self.entries(rows, columns, np.full(len(rows), value))

    def finish(self, integers: int) -> LinearProgram:
        """The program; its first `integers` variables are the integer ones."""
        row, column, value = np.concatenate(self.row_of), np.concatenate(self.column_of), np.concatenate(self.value_of)
        order = np.lexsort((column, row))
        return LinearProgram(
            cost=np.concatenate(self.cost),
            lower=np.zeros(self.columns),
            upper=np.concatenate(self.upper),
            integer=np.arange(self.columns) < integers,
            row_lower=np.concatenate(self.row_lower),
            row_upper=np.concatenate(self.row_upper),
            entries=(row[order], column[order], value[order]),
        )


@dataclass(frozen=True, eq=False)
class WrittenTable:
    """Where a table stands in the program: classes of its ends, and the e of each pair of classes."""

    ends: tuple[int, int]
    classes: tuple[Indices, Indices]
    shape: tuple[int, int]
    flat: Indices
    """Position i * J + j of the pairs that are possible."""
    edge: Indices
    """Their columns."""


@dataclass(frozen=True, eq=False)
class IntraOpProgram:
    """The linear program of what presolve left, and the way back."""

    program: LinearProgram
    column: dict[int, Indices]
    """Of x[n, s], by node and position of the state."""
    tables: tuple[WrittenTable, ...]
    terms: Indices
    """Rows of the program that are rows and hinges of the form, in their order."""
    units: Reals
    """What each was divided by."""
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

    def multipliers(self, duals: Reals) -> Reals:
        """What the row duals say a unit of each row and hinge is worth, in the problem's units."""
        return np.abs(duals[self.terms]) / (self.units * self.scale)

    def cost(self, objective: float) -> float:
        """A program objective or bound in the problem's own unit."""
        return objective / self.scale + self.constant


def write(form: Pairwise) -> IntraOpProgram:
    """The integer program of the docstring above, in arrays."""
    scale = 1.0 / largest_cost(form)
    draft = Draft()
    column, constant = add_states(draft, form, scale)
    states = draft.columns
    tables = []
    for (a, b), table in form.tables.items():
        left, right, costs = merge_equal(table)
        tables.append(add_table(draft, column, (a, b), (left, right), costs * scale))
    for flow in form.shared:
        add_copies(draft, form, flow, column, scale)
    terms, units = add_coupling(draft, form, column, scale)
    return IntraOpProgram(draft.finish(states), column, tuple(tables), terms, units, scale, constant)


def largest_cost(form: Pairwise) -> float:
    """The largest cost or spread of costs that a single choice makes, up to a power of two: scaling is then exact."""
    largest = max((float(u.max() - u.min()) for u in form.unary.values()), default=0.0)
    for table in (*form.tables.values(), *(flow.weight * flow.price for flow in form.shared)):
        largest = max(largest, float(np.where(np.isinf(table), 0.0, table).max()))
    rows = len(form.limits)
    for amounts in form.coupling.values() if len(form.weights) else ():
        largest = max(largest, float((form.weights * np.ptp(amounts[rows:], axis=1)).max()))
    return float(2.0 ** np.ceil(np.log2(largest or 1.0)))


def merge_equal(table: Reals) -> tuple[Indices, Indices, Reals]:
    """Class of each row, class of each column, and the table over classes: equal rows and columns merged."""
    left, kept = classes_of(table)
    table = table if len(kept) == len(table) else table[kept]
    right, also = classes_of(table.T)
    return left, right, table if len(also) == table.shape[1] else table[:, also]


def classes_of(vectors: Reals) -> tuple[Indices, list[int]]:
    """Class of each vector (equal ones share it) and the first member of each class."""
    seen: dict[bytes, int] = {}
    text = vectors.tobytes()
    width = len(text) // len(vectors)
    classes = [seen.setdefault(text[at : at + width], len(seen)) for at in range(0, len(text), width)]
    kept = [classes.index(c) for c in range(len(seen))]
    return np.array(classes), kept


def add_states(draft: Draft, form: Pairwise, scale: float) -> tuple[dict[int, Indices], float]:
    """Binary x[n, s], and (1); columns by node, and the constant that was taken out of the costs."""
    columns, constant = {}, form.constant
    first = draft.constraints(len(form.unary), 1.0, 1.0)
    for row, (node, unary) in enumerate(form.unary.items()):
        least = float(unary.min())
        constant += least
        columns[node] = draft.variables((unary - least) * scale)
        draft.ones(np.full(len(unary), first + row), columns[node], 1.0)
    return columns, constant


def add_table(
    draft: Draft,
    column: dict[int, Indices],
    ends: tuple[int, int],
    classes: tuple[Indices, Indices],
    costs: Reals,
) -> WrittenTable:
    """e[i, j] with its costs and (2), (3); `classes` of the states at each end index the rows and columns of costs."""
    flat = np.flatnonzero(np.isfinite(costs))
    edge = draft.variables(costs.ravel()[flat])
    height, width = costs.shape
    made = draft.constraints(height + width, 0.0, 0.0)
    read = made + height
    i, j = np.divmod(flat, width)
    draft.ones(i + made, edge, 1.0)
    draft.ones(j + read, edge, 1.0)
    draft.ones(classes[0] + made, column[ends[0]], -1.0)
    draft.ones(classes[1] + read, column[ends[1]], -1.0)
    return WrittenTable(ends, classes, (height, width), flat, edge)


def add_copies(draft: Draft, form: Pairwise, flow: Flow, column: dict[int, Indices], scale: float) -> None:
    """z[p, l], which carries the price once, and (4) for each reader."""
    made = flow.producer_class[form.labels[flow.producer]]
    possible = np.isfinite(flow.price)
    copies = draft.variables(flow.price[possible] * (flow.weight * scale))
    free = np.where(possible, 0.0, np.inf)
    for node, classes in flow.consumers:
        written = add_table(draft, column, (flow.producer, node), (made, classes[form.labels[node]]), free)
        rows = draft.constraints(len(copies), 0.0, np.inf) + np.arange(len(copies))
        draft.ones(rows, copies, 1.0)
        draft.ones(rows, written.edge, -1.0)


def add_coupling(draft: Draft, form: Pairwise, column: dict[int, Indices], scale: float) -> tuple[Indices, Reals]:
    """All rows and hinges, each less the least that every node gives it: where they stand, and their units."""
    if not form.coupling:
        return np.zeros(0, dtype=np.intp), np.zeros(0)
    columns = np.concatenate([column[node] for node in form.coupling])
    least = sum(amounts.min(axis=1) for amounts in form.coupling.values())
    shifted = np.concatenate([a - a.min(axis=1, keepdims=True) for a in form.coupling.values()], axis=1)
    unit = shifted.max(axis=1)
    unit[unit == 0] = 1.0
    rows, terms = len(form.limits), []
    for position, amounts in enumerate(shifted / unit[:, None]):
        present = np.flatnonzero(amounts)
        if position < rows:
            limit = (form.limits[position] - least[position]) / unit[position]
            row = add_row(draft, float(limit))
        else:
            hinge = position - rows
            offset = (form.offsets[hinge] + least[position]) / unit[position]
            price = form.weights[hinge] * unit[position] * scale
            row = add_hinge(draft, float(offset), float(price), float(amounts.sum()))
            amounts = -amounts
        draft.entries(np.full(len(present), row), columns[present], amounts[present])
        terms.append(row)
    return np.array(terms), unit


def add_row(draft: Draft, limit: float) -> int:
    """(5), empty: the row's position."""
    return draft.constraints(1, -np.inf, limit)


def add_hinge(draft: Draft, offset: float, price: float, most: float) -> int:
    """y with its price, and (6) without the states: the row's position. y never exceeds `most` + offset."""
    exposed = draft.variables(np.array([price]), max(0.0, most + offset))
    row = draft.constraints(1, offset, np.inf)
    draft.ones(np.array([row]), exposed, 1.0)
    return row
