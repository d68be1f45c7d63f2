"""Exact minimisation by eliminating one node after another, where the graph is narrow enough.

A node is replaced by the least it can cost its neighbours: a new table over all of them. Joint graphs of networks are
long and narrow, so with the few layouts of one mesh axis these tables stay small, and the optimum of hundreds of nodes
comes out of a few million additions. Nothing here knows rows or hinges: a form with coupling terms needs a program.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from hpsearch.solve.pairwise import Pairwise
from hpsearch.solve.problem import Reals

MOST_ENTRIES = 8_000_000
"""Table entries over a whole elimination up to which it is worth it: 64 MB, about as long as a small LP."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A cost over several nodes, in the order in which they will be eliminated."""

    nodes: tuple[int, ...]
    costs: Reals


@dataclass(frozen=True, eq=False)
class Clique:
    """A node as it stood when it was eliminated: all costs that touch it, over it (axis 0) and what was next to it."""

    nodes: tuple[int, ...]
    costs: Reals
    least: Reals
    """Minimum over axis 0: what the node hands on to the first of its neighbours."""


def eliminate(form: Pairwise) -> tuple[float, dict[int, int]] | None:
    """Least cost and the best position of every node that is left; None where the graph is too wide.

    Rows and hinges are not looked at.
    """
    cliques = sweep(form)
    if cliques is None:
        return None
    value = form.constant + sum(float(clique.least) for clique in cliques if clique.least.ndim == 0)
    return value, best_positions(cliques)


def best_positions(cliques: list[Clique]) -> dict[int, int]:
    """Of every node, last eliminated first; the lowest position among equals."""
    positions: dict[int, int] = {}
    for clique in reversed(cliques):
        node, *others = clique.nodes
        chosen: tuple[slice | int, ...] = (slice(None), *(positions[n] for n in others))
        positions[node] = int(np.argmin(clique.costs[chosen]))
    return positions


def sweep(form: Pairwise) -> list[Clique] | None:
    """Eliminate every node, in order; None where the graph is too wide."""
    order = elimination_order(form)
    if order is None:
        return None
    place = {node: position for position, node in enumerate(order)}
    bucket: dict[int, list[Factor]] = {node: [Factor((node,), form.unary[node])] for node in order}
    for a, b in form.tables:
        first, second = (a, b) if place[a] < place[b] else (b, a)
        bucket[first].append(Factor((first, second), form.table(first, second)))
    cliques = []
    for node in order:
        nodes = sorted({n for factor in bucket[node] for n in factor.nodes}, key=place.__getitem__)
        costs = add_up(bucket.pop(node), nodes)
        least = costs.min(axis=0)
        cliques.append(Clique(tuple(nodes), costs, least))
        if len(nodes) > 1:
            bucket[nodes[1]].append(Factor(tuple(nodes[1:]), least))
    return cliques


def add_up(factors: list[Factor], nodes: list[int]) -> Reals:
    """The sum of factors over `nodes`, small ones first."""
    total = np.zeros((1,) * len(nodes))
    for factor in sorted(factors, key=lambda f: f.costs.size):
        total = total + expand(factor, nodes)
    return total


def expand(factor: Factor, nodes: list[int] | tuple[int, ...]) -> Reals:
    """Its costs with an axis of length 1 for each of `nodes` that it lacks."""
    sizes = dict(zip(factor.nodes, factor.costs.shape, strict=True))
    return factor.costs.reshape([sizes.get(n, 1) for n in nodes])


def least_with(cliques: list[Clique]) -> dict[int, Reals]:
    """For every node, the least cost (without the form's constant) of all choices with each of its states.

    The way back through the cliques: each is told what lies beyond it, as the least over all else.
    """
    at = {clique.nodes[0]: position for position, clique in enumerate(cliques)}
    whole = sum(float(clique.least) for clique in cliques if clique.least.ndim == 0)
    everything: list[Reals] = [clique.costs for clique in cliques]
    result: dict[int, Reals] = {}
    for position in range(len(cliques) - 1, -1, -1):
        clique = cliques[position]
        if len(clique.nodes) == 1:
            beyond = np.asarray(whole - clique.least)
        else:
            parent = cliques[at[clique.nodes[1]]]
            outside = tuple(k for k, n in enumerate(parent.nodes) if n not in clique.nodes)
            with np.errstate(invalid="ignore"):
                beyond = everything[at[clique.nodes[1]]].min(axis=outside) - clique.least
            beyond[np.isnan(beyond)] = np.inf
        everything[position] = clique.costs + beyond
        result[clique.nodes[0]] = everything[position].min(axis=tuple(range(1, len(clique.nodes))))
    return result


def elimination_order(form: Pairwise) -> list[int] | None:
    """Smallest new table first, the lowest node among equals; None above MOST_ENTRIES in all."""
    near = {node: set(around) for node, around in form.near.items()}
    size = {node: len(unary) for node, unary in form.unary.items()}

    def entries(node: int) -> int:
        product = size[node]
        for other in near[node]:
            product *= size[other]
        return product

    queue = [(entries(node), node) for node in near]
    heapq.heapify(queue)
    order, total = [], 0
    while queue:
        count, node = heapq.heappop(queue)
        if node not in near or count != entries(node):
            continue  # an older estimate of this node; the newer one is in the queue
        total += count
        if total > MOST_ENTRIES:
            return None
        around = near.pop(node)
        for other in around:
            near[other] |= around
            near[other] -= {other, node}
        for other in around:
            heapq.heappush(queue, (entries(other), other))
        order.append(node)
    return order
