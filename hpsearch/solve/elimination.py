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


def eliminate(form: Pairwise) -> tuple[float, dict[int, int]] | None:
    """Least cost and the best position of every node that is left; None where the graph is too wide."""
    order = elimination_order(form)
    if order is None:
        return None
    place = {node: position for position, node in enumerate(order)}
    bucket: dict[int, list[Factor]] = {node: [Factor((node,), form.unary[node])] for node in order}
    for (a, b), table in form.tables.items():
        first, second = (a, b) if place[a] < place[b] else (b, a)
        bucket[first].append(Factor((first, second), form.table(first, second)))
    least = form.constant
    for node in order:
        rest = minimise_first(bucket[node], place)
        if rest.nodes:
            bucket[rest.nodes[0]].append(rest)
        else:
            least += float(rest.costs)
    positions: dict[int, int] = {}
    for node in reversed(order):
        cost = sum(f.costs[(slice(None), *(positions[n] for n in f.nodes[1:]))] for f in bucket[node])
        positions[node] = int(np.argmin(cost))
    return least, positions


def minimise_first(factors: list[Factor], place: dict[int, int]) -> Factor:
    """The sum of factors that share their first node, minimised over it."""
    nodes = sorted({n for factor in factors for n in factor.nodes}, key=place.__getitem__)
    total: Reals | float = 0.0
    for factor in sorted(factors, key=lambda f: f.costs.size):
        own = set(factor.nodes)
        sizes = iter(factor.costs.shape)
        total = total + factor.costs.reshape([next(sizes) if n in own else 1 for n in nodes])
    return Factor(tuple(nodes[1:]), np.min(total, axis=0))


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
