"""Seconds that experts on other ranks are waited for, and results that come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import numpy as np

from hpsearch.cost.job import Job
from hpsearch.cost.op_time import Floats, NodeKey, local_elements
from hpsearch.graph import ITEM_BYTES, Op, Value
from hpsearch.graph.routed import ROUTE, TRAVELS, rows_of, weight_of
from hpsearch.layout import Collective, Mesh, Placement
from hpsearch.strategy import SearchSpace, slot_messages, token_messages


def tokens_s(
    space: SearchSpace,
    key: NodeKey,
    mesh: Mesh,
    job: Job,
    on_path_s: Callable[[tuple[Collective, ...]], float],
) -> Floats | float:
    """Seconds of one run of an op that sends tokens, by state; 0 for all others and on meshes without such an axis.

    Where tp cuts the rows, its ranks have the same tokens and send a part of the copies each.
    """
    axes = mesh.expert_axes
    graph = space.graphs[key[0]]
    op = graph.step(key[1])
    if not axes or not isinstance(op, Op) or op.target not in TRAVELS:
        return 0.0
    routes = {route.outputs[1]: route for route in graph.ops if route.target == ROUTE}
    route = next(routes[name] for name in op.inputs if name in routes)
    rows = graph.values[rows_of(op)]
    at = (*op.inputs, *op.outputs).index(rows.name)
    experts = graph.values[route.outputs[1]].shape(job.micro_rows())[0]
    top_k = graph.values[route.inputs[0]].shape(job.micro_rows())[1]
    followed = [(n, space.followed[role][graph.name].rules[op.name]) for role, n in mesh.followed.items()]
    found = []
    for free in space.nodes[key].rules:
        cuts = [(n, Placement.parse((rule[0] + rule[1])[at])) for n, rule in [*followed, (space.tp, free)]]
        nbytes = local_elements(rows, job.micro_rows(), cuts) * ITEM_BYTES[rows.dtype]
        own = space.tp if cuts[-1][1] == Placement.parse("S0") else 1
        messages = token_messages(axes, nbytes, experts, top_k, own)
        if graph.slots:
            number = ITEM_BYTES[graph.values[weight_of(op)].dtype]
            messages += slot_messages(axes, op, _slots(rows, job.micro_rows(), cuts) * number)
        found.append(on_path_s(messages))
    return np.array(found)


def _slots(rows: Value, micro_rows: int, cuts: Iterable[tuple[int, Placement]]) -> int:
    """Rows that a rank has."""
    pieces = prod(size for size, placement in cuts if placement == Placement.parse("S0"))
    return rows.shape(micro_rows)[0] // pieces
