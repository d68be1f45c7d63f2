"""Experts under a plan: which axes they are spread over, how tokens get to them, and what that sends.

own         tokens are the same on all ranks of the axis     a rank keeps the pairs of its own experts
exchanged   every rank has tokens of its own                 they travel there and back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from hpsearch.graph import ITEM_BYTES, Op
from hpsearch.graph.routed import ROUTE, TRAVELS, rows_of, weight_of
from hpsearch.layout import Collective, Mesh
from hpsearch.plan.decisions import GraphDecisions
from hpsearch.strategy import slot_messages, token_messages


def route_of(placed: GraphDecisions, op: Op) -> Op | None:
    """The op that routes the rows that `op` sends; None for ops that send none."""
    if op.target == ROUTE:
        return op
    if op.target not in TRAVELS:
        return None
    routes = {route.outputs[1]: route for route in placed.graph.ops if route.target == ROUTE}
    return next(routes[value] for value in op.inputs if value in routes)


def spread_over(placed: GraphDecisions, route: Op) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes over which the experts of a route are spread: (own, exchanged)."""
    index = placed.reads(route)[0].layout
    spread = [axis for axis, p in placed.made[route.outputs[1]] if p.is_shard]
    own = tuple(axis for axis in spread if not index[axis].is_shard)
    return own, tuple(axis for axis in spread if axis not in own)


def exchanges(
    placed: GraphDecisions, op: Op, shape_of: Callable[[str], tuple[int, ...]], mesh: Mesh
) -> Iterator[tuple[Collective, str]]:
    """What an op sends to experts and back where routing is even, or all slots of a capacity, each with its dtype;
    `shape_of` gives global shapes."""
    route = route_of(placed, op) if op.target in TRAVELS else None
    if route is None:
        return
    value = placed.graph.values[rows_of(op)]
    count = prod(placed.made[value.name].local_shape(shape_of(value.name), mesh.sizes))
    own, exchanged = spread_over(placed, route)
    experts, top_k = shape_of(route.outputs[1])[0], shape_of(route.inputs[0])[1]
    axes, nbytes = [mesh.axis(axis) for axis in exchanged], count * ITEM_BYTES[value.dtype]
    for c in token_messages(axes, nbytes, experts, top_k, prod(map(mesh.size, own))):
        yield c, value.dtype
    if placed.graph.slots:
        number = placed.graph.values[weight_of(op)]
        slots = placed.made[value.name].local_shape(shape_of(value.name), mesh.sizes)[0]
        for c in slot_messages(axes, op, slots * ITEM_BYTES[number.dtype]):
            yield c, number.dtype
