"""Exact presolve: what can be decided without search, decided in numpy.

Each step keeps at least one optimum and leaves the way back on the form's trail:

    `settle`        a row or hinge that cannot bind goes, one that binds for certain is a cost, a state too large for
                    a row is dropped
    `support`       drop states that are forbidden or have no finite partner across a table (arc consistency)
    `fix`           a node with one state left becomes a constant of its neighbours, rows and hinges
    `separate`      a table a_i + b_j is two unary costs and no table
    `minimise_out`  a node that moves no row and no hinge and has at most two neighbours is minimised out
    `substitute`    a node whose state follows from a neighbour's is folded into it, rows and hinges included
    `dominate`      drop a state that another beats whatever the neighbours do, at no more of any row

Among equal states the lowest index is kept; nodes are visited in index order.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hpsearch.solve.pairwise import Pairwise
from hpsearch.solve.problem import Indices, Reals

SEPARABLE = 1e-13
"""A table counts as a_i + b_j when it is one up to this fraction of its largest cost (rounding of sums)."""


def presolve(form: Pairwise, *, dominance: bool = True) -> bool:
    """Apply every step until none changes anything; False when a node has no state left: infeasible."""
    shrinkable = doubtful = unsure = set(form.near)
    while True:
        lost = support(form, unsure)
        if lost is None:
            return False
        shrinkable = (shrinkable | lost) & form.near.keys()
        doubtful = doubtful | lost
        unsure = set()
        if shrinkable:
            for node in sorted(shrinkable):
                if node in form.near:
                    unsure |= shrink(form, node)
            shrinkable = unsure
            doubtful = doubtful | unsure
            continue
        settled = settle(form)
        if settled is None:
            return False
        if settled:
            shrinkable = unsure = settled
            continue
        for node in sorted(doubtful & form.near.keys()) if dominance else ():
            if dominate(form, node):
                unsure |= {node, *form.near[node]}
        if not unsure:
            return True
        shrinkable = doubtful = unsure


def settle(form: Pairwise) -> set[int] | None:
    """Decide the rows and hinges that bounds decide; the nodes that this touched, None when a row cannot be kept."""
    if not form.coupling:
        return set() if (form.limits >= 0).all() else None
    nodes, rows = list(form.coupling), len(form.limits)
    amounts = np.concatenate(list(form.coupling.values()), axis=1)
    counts = np.array([form.coupling[n].shape[1] for n in nodes])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    low, high = np.minimum.reduceat(amounts, starts, axis=1), np.maximum.reduceat(amounts, starts, axis=1)
    least, most = low.sum(axis=1), high.sum(axis=1)
    if (least[:rows] > form.limits).any():
        return None
    always = form.offsets + least[rows:] >= 0
    binding = np.concatenate([most[:rows] > form.limits, ~always & (form.offsets + most[rows:] > 0)])
    if not binding.all():
        add_certain(form, always)
        form.keep_terms(binding)
        for node in nodes:
            form.settle_constant(node)
        return set(nodes)
    spare = form.limits - least[:rows]
    large = ((amounts - np.repeat(low, counts, axis=1))[:rows] > spare[:, None]).any(axis=0)
    touched = [nodes[k] for k in np.flatnonzero(np.add.reduceat(large, starts))]
    for node in touched:
        at = starts[nodes.index(node)]
        fits = ~large[at : at + len(form.unary[node])]
        if not fits.any():
            return None
        form.keep_states(node, fits)
    idle = [node for node, same in zip(nodes, (low == high).all(axis=0), strict=True) if same]
    for node in idle:
        form.settle_constant(node)
    return {*touched, *idle}


def add_certain(form: Pairwise, always: NDArray[np.bool_]) -> None:
    """Hinges that are never below zero cost what they are: unary costs of their nodes."""
    rows = len(form.limits)
    weights = np.where(always, form.weights, 0.0)
    if not always.any():
        return
    form.constant += float(weights @ form.offsets)
    for node, amounts in form.coupling.items():
        form.unary[node] = form.unary[node] + (weights[:, None] * amounts[rows:]).sum(axis=0)


def support(form: Pairwise, unsure: Iterable[int]) -> set[int] | None:
    """Drop states without a finite partner, until all have one; the nodes that lost any, None if one lost all."""
    queue = sorted(unsure & form.near.keys())
    lost: set[int] = set()
    while queue:
        node = queue.pop()
        cheapest = form.unary[node]
        for other in form.near[node]:
            cheapest = cheapest + form.table(node, other).min(axis=1)
        keep = np.isfinite(cheapest)
        if keep.all():
            continue
        if not keep.any():
            return None
        form.keep_states(node, keep)
        lost.add(node)
        queue.extend(form.near[node])
    return lost


def shrink(form: Pairwise, node: int) -> set[int]:
    """Take the node away, or some of its tables, if that is possible; the nodes that it touched."""
    if node in form.held:
        return set()
    around = set(form.near[node])
    if len(form.unary[node]) == 1:
        fix(form, node)
        return around
    touched = separate(form, node)
    if node not in form.coupling and len(form.near[node]) <= 2:
        minimise_out(form, node)
        return around
    return around if substitute(form, node) else touched


def fix(form: Pairwise, node: int) -> None:
    """Fold a node with a single state into everything that it touches."""
    form.remember(node)
    form.constant += float(form.unary[node][0])
    for other in form.near[node]:
        form.unary[other] = form.unary[other] + form.table(node, other)[0]
    if node in form.coupling:
        form.move_coupling(form.coupling[node][:, 0])
    form.drop_node(node)


def separate(form: Pairwise, node: int) -> set[int]:
    """Turn tables a_i + b_j of this node into unary costs; the nodes that lost one."""
    touched: set[int] = set()
    for other in form.unseen(node):
        table = form.table(node, other)
        mine = table.min(axis=1)
        with np.errstate(invalid="ignore"):  # a state without a partner gives no number, and so no answer
            rest = table - mine[:, None]
            theirs = rest.min(axis=0)
            separable = (rest - theirs).max() <= SEPARABLE * mine.max()
        if separable:
            form.unary[node] = form.unary[node] + mine
            form.unary[other] = form.unary[other] + theirs
            form.drop_table(node, other)
            touched |= {node, other}
    return touched


def minimise_out(form: Pairwise, node: int) -> None:
    """Replace a node with at most two neighbours by the least it can cost them."""
    form.remember(node)
    unary, around = form.unary[node], tuple(form.near[node])
    if not around:
        form.constant += float(unary.min())
    elif len(around) == 1:
        (a,) = around
        form.unary[a] = form.unary[a] + (unary[:, None] + form.table(node, a)).min(axis=0)
    else:
        a, b = around
        left = unary[:, None] + form.table(node, a)
        both = (left[:, :, None] + form.table(node, b)[:, None, :]).min(axis=0)
        form.add_table(a, b, both)
    form.drop_node(node)


def substitute(form: Pairwise, node: int) -> bool:
    """Fold a node into a neighbour that leaves it one state for each of its own; True if one does."""
    for parent in form.near[node]:
        possible = np.isfinite(form.table(node, parent))
        if np.count_nonzero(possible) != possible.shape[1]:
            continue
        if (possible.sum(axis=0) == 1).all() and parent not in form.held:
            fold(form, node, parent, possible.argmax(axis=0))
            return True
    return False


def fold(form: Pairwise, node: int, parent: int, state: Indices) -> None:
    """The node takes `state[i]` when the parent is in i: add its costs, tables and coefficients to the parent."""
    form.remember(node)
    table = form.table(node, parent)
    form.unary[parent] = form.unary[parent] + form.unary[node][state] + table[state, np.arange(len(state))]
    for other in tuple(form.near[node]):
        if other != parent:
            form.add_table(parent, other, form.table(node, other)[state])
    if node in form.coupling:
        moved = form.coupling[node][:, state]
        form.coupling[parent] = form.coupling.get(parent, np.zeros_like(moved)) + moved
    form.drop_node(node)


def dominate(form: Pairwise, node: int) -> bool:
    """Drop states that another state beats or equals whatever the neighbours do; True if any went."""
    if node in form.held:
        return False
    worse = excess(form, node)
    beaten = (worse >= 0) & ~np.eye(len(worse), dtype=bool)
    if not beaten.any():
        return False
    keep = np.ones(len(worse), dtype=bool)
    for state in range(len(worse) - 1, -1, -1):
        keep[state] = not (beaten[state] & keep).any()
    form.keep_states(node, keep)
    return True


def excess(form: Pairwise, node: int) -> NDArray[np.float64]:
    """[s, t]: at least how much more state s costs than t, over all that neighbours, rows and hinges may do."""
    unary = form.unary[node]
    worse = unary[:, None] - unary[None, :]
    with np.errstate(invalid="ignore"):  # never and always: no number, so no dominance
        for other in form.near[node]:
            worse = worse + least_difference(form.table(node, other))
    if node in form.coupling:
        amounts = form.coupling[node]
        more = amounts[:, :, None] - amounts[:, None, :]
        rows = len(form.limits)
        worse = worse + (form.weights[:, None, None] * np.minimum(more[rows:], 0.0)).sum(axis=0)
        worse[(more[:rows] < 0).any(axis=0)] = -np.inf
    return worse


def least_difference(table: Reals) -> Reals:
    """[s, t]: the least of table[s, j] - table[t, j] over j; where both are impossible j does not count."""
    with np.errstate(invalid="ignore"):
        difference = table[:, None, :] - table[None, :, :]
    least: Reals = np.fmin.reduce(difference, axis=2)
    return least
