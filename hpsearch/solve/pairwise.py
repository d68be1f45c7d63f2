"""A problem in pairwise form while presolve takes it apart: states, tables between two nodes, coupling terms.

Every flow with one consumer is a table between two nodes. A flow with several consumers becomes pairwise through a
*copies node*, whose states are the sets of layouts that the value is redistributed to: a table to the producer carries
the price of each set, a table to each consumer forbids the sets without its layout. Producer, copies and consumers
form a star, so the relaxation over it is the convex hull of the flow: nothing tighter exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hpsearch.solve.problem import Flow, Hinge, Indices, Problem, Reals, Row

LARGEST_COPIES = 20_000
"""Entries of (sets × layouts) up to which a flow gets a copies node; beyond, it stays a flow (`shared`)."""


@dataclass(frozen=True, eq=False)
class Removed:
    """One step back: a node that was minimised out, with all that its state depended on.

    Its best state is looked for only on the way back, where the neighbours' states are known: a sum of columns.
    """

    node: int
    unary: Reals
    labels: Indices
    near: tuple[tuple[int, Indices, Reals], ...]
    """(neighbour, its labels then, ascending; table [states, neighbour's states])"""

    def state(self, choice: dict[int, int]) -> int:
        """Label of the best state given the neighbours' labels, the lowest among equals."""
        cost = self.unary
        for other, labels, table in self.near:
            cost = cost + table[:, np.searchsorted(labels, choice[other])]
        return int(self.labels[np.argmin(cost)])


@dataclass(eq=False)
class Pairwise:
    """Mutable: nodes with unary costs, at most one table per pair, coefficients of coupling terms.

    A node's states carry `labels`: their index in the original problem. Keys of `tables` are ordered (a < b).
    """

    unary: dict[int, Reals]
    labels: dict[int, Indices]
    coupling: dict[int, Reals]
    """[terms, states] for each node that moves a row or hinge; rows first."""
    limits: Reals
    """[rows]: sum of coefficients <= limit."""
    offsets: Reals
    """[hinges]"""
    weights: Reals
    """[hinges]"""
    constant: float
    tables: dict[tuple[int, int], Reals] = field(default_factory=dict)
    near: dict[int, dict[int, None]] = field(default_factory=dict)
    shared: tuple[Flow, ...] = ()
    """Flows of several consumers that are too large for a copies node; their nodes are `held`."""
    held: frozenset[int] = frozenset()
    trail: list[Removed] = field(default_factory=list)
    seen: dict[tuple[int, int], Reals] = field(default_factory=dict)
    """Tables that presolve has looked at, as they were then."""

    def copy(self) -> Pairwise:
        """An independent form; arrays are shared, since no step writes into one."""
        return replace(
            self,
            unary=dict(self.unary),
            labels=dict(self.labels),
            coupling=dict(self.coupling),
            tables=dict(self.tables),
            near={node: dict(around) for node, around in self.near.items()},
            trail=list(self.trail),
            seen={},
        )

    def table(self, a: int, b: int) -> Reals:
        """The table between two neighbours, [states of a, states of b]."""
        return self.tables[a, b] if a < b else self.tables[b, a].T

    def unseen(self, node: int) -> list[int]:
        """Neighbours whose table with the node has changed since this was last asked."""
        changed = []
        for other in self.near[node]:
            key = (node, other) if node < other else (other, node)
            if self.seen.get(key) is not self.tables[key]:
                self.seen[key] = self.tables[key]
                changed.append(other)
        return changed

    def add_table(self, a: int, b: int, table: Reals) -> None:
        """Add costs between a and b; parallel tables sum."""
        key, table = ((a, b), table) if a < b else ((b, a), table.T)
        known = self.tables.get(key)
        self.tables[key] = table if known is None else known + table
        self.near[a][b] = self.near[b][a] = None

    def drop_table(self, a: int, b: int) -> None:
        del self.tables[min(a, b), max(a, b)]
        del self.near[a][b], self.near[b][a]

    def keep_states(self, node: int, keep: NDArray[np.bool_]) -> None:
        """Only these states of a node remain."""
        self.unary[node] = self.unary[node][keep]
        self.labels[node] = self.labels[node][keep]
        if node in self.coupling:
            self.coupling[node] = self.coupling[node][:, keep]
        for other in self.near[node]:
            if node < other:
                self.tables[node, other] = self.tables[node, other][keep]
            else:
                self.tables[other, node] = self.tables[other, node][:, keep]

    def drop_node(self, node: int) -> None:
        for other in tuple(self.near[node]):
            self.drop_table(node, other)
        del self.unary[node], self.labels[node], self.near[node]
        self.coupling.pop(node, None)

    def move_coupling(self, amounts: Reals) -> None:
        """Settle [terms] of rows and hinges for good."""
        rows = len(self.limits)
        self.limits = self.limits - amounts[:rows]
        self.offsets = self.offsets + amounts[rows:]

    def keep_terms(self, keep: NDArray[np.bool_]) -> None:
        """Only these rows and hinges remain: [terms] of bool."""
        rows = len(self.limits)
        self.limits = self.limits[keep[:rows]]
        self.offsets, self.weights = self.offsets[keep[rows:]], self.weights[keep[rows:]]
        self.coupling = {node: amounts[keep] for node, amounts in self.coupling.items()}

    def settle_constant(self, node: int) -> None:
        """A node whose states all give the same to every term no longer couples anything."""
        amounts = self.coupling[node]
        if (amounts == amounts[:, :1]).all():
            self.move_coupling(amounts[:, 0])
            del self.coupling[node]

    def remember(self, node: int) -> None:
        """Put a node on the trail, as it stands, before it goes."""
        near = tuple((other, self.labels[other], self.table(node, other)) for other in self.near[node])
        self.trail.append(Removed(node, self.unary[node], self.labels[node], near))

    def restore(self, positions: dict[int, int], count: int) -> tuple[int, ...]:
        """Original states of the first `count` nodes, given positions of the states of those that are left."""
        full = {node: int(self.labels[node][position]) for node, position in positions.items()}
        for removed in reversed(self.trail):
            full[removed.node] = removed.state(full)
        return tuple(full[n] for n in range(count))


def pairwise_form(problem: Problem) -> Pairwise:
    """The problem as nodes and tables; copies nodes are numbered after the problem's own."""
    terms: list[Row | Hinge] = [*problem.rows, *problem.hinges]
    form = Pairwise(
        unary={n: np.asarray(u, dtype=float) for n, u in enumerate(problem.unary)},
        labels={n: np.arange(size) for n, size in enumerate(problem.sizes)},
        coupling={},
        limits=np.array([row.limit + row.slack for row in problem.rows]),
        offsets=np.array([hinge.offset for hinge in problem.hinges]),
        weights=np.array([hinge.weight for hinge in problem.hinges]),
        constant=float(problem.offset),
        near={n: {} for n in range(len(problem))},
    )
    for position, term in enumerate(terms):
        for node, coefficients in term.coefficients.items():
            if node not in form.coupling:
                form.coupling[node] = np.zeros((len(terms), problem.sizes[node]))
            form.coupling[node][position] += coefficients
    large = [flow for flow in problem.flows if not add_flow(form, flow)]
    form.shared = tuple(large)
    form.held = frozenset(n for flow in large for n in (flow.producer, *(c for c, _ in flow.consumers)))
    return form


def add_flow(form: Pairwise, flow: Flow) -> bool:
    """Tables of one flow; False if it is too large for pairwise form and was left alone."""
    readers = distinct_readers(flow)
    price = np.asarray(flow.price, dtype=float) * flow.weight
    if not readers:
        return True
    if len(readers) == 1 and len(readers[0][1]) == 1:
        add_single(form, flow, readers[0][0], price[flow.producer_class][:, readers[0][1][0]])
        return True
    used = np.unique(np.concatenate([classes.ravel() for _, classes in readers]))
    most = sum(len(classes) for _, classes in readers)
    sets = layout_sets(len(used), most)
    if sets is None or sets.size > LARGEST_COPIES:
        return False
    copies = len(form.near) if not form.near else max(form.near) + 1
    form.unary[copies] = np.zeros(len(sets))
    form.labels[copies] = np.arange(len(sets))
    form.near[copies] = {}
    totals = np.where(sets[None], price[:, None, used], 0.0).sum(axis=2)
    form.add_table(flow.producer, copies, totals[flow.producer_class])
    for node, classes in readers:
        inside = np.logical_and.reduce([sets[:, np.searchsorted(used, c)] for c in classes])
        form.add_table(copies, node, np.where(inside, 0.0, np.inf))
    return True


def add_single(form: Pairwise, flow: Flow, reader: int, table: Reals) -> None:
    """A flow with one reader: a table, or a unary cost where producer and reader are the same node."""
    if reader == flow.producer:
        form.unary[reader] = form.unary[reader] + table.diagonal()
    else:
        form.add_table(flow.producer, reader, table)


def distinct_readers(flow: Flow) -> list[tuple[int, Indices]]:
    """(node, [reads, states] -> layout) with equal reads of a node written once."""
    reads: dict[int, list[Indices]] = {}
    for node, classes in flow.consumers:
        mine = reads.setdefault(node, [])
        if not any(np.array_equal(classes, other) for other in mine):
            mine.append(classes)
    return [(node, np.stack(mine)) for node, mine in reads.items()]


def layout_sets(layouts: int, most: int) -> np.ndarray | None:
    """[sets, layouts] of bool: every set of 1..most layouts, small sets first; None when there are too many."""
    most, count, total = min(most, layouts), 1, 0
    for size in range(1, most + 1):
        count = count * (layouts - size + 1) // size
        total += count
    if total * layouts > LARGEST_COPIES:
        return None
    rows = [members for size in range(1, most + 1) for members in combinations(range(layouts), size)]
    sets = np.zeros((len(rows), layouts), dtype=bool)
    for row, members in enumerate(rows):
        sets[row, list(members)] = True
    return sets
