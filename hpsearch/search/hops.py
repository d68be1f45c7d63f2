"""Expert parallelism among the meshes: the form in which tokens go to experts, by the prices of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpsearch.cluster import Cluster, Exchange, Routing
from hpsearch.graph import ITEM_BYTES, ModelGraph
from hpsearch.graph.routed import DISPATCH, ROUTE
from hpsearch.layout import ROLES, Mesh
from hpsearch.search.fix import Fix


def with_hops(mesh: Mesh, model: ModelGraph, cluster: Cluster, rows: int, fix: Fix) -> Mesh:
    """The mesh with the hops of its axis of experts: those of the form whose moves of tokens take the fewest seconds
    in all layers together, or of the pinned one. `rows`: of a micro-batch, on all ranks. Experts that are spread over
    cp too have a hop for each of the two.

    Raises LegalityError for a form that no program has, or that never pays.
    """
    if fix.over_cp:
        over = ("experts", "sequence")
        return Mesh(tuple(replace(a, hops=(a.size,)) if ROLES[a.name] in over else a for a in mesh.axes))
    axes = [axis for axis in mesh.axes if ROLES[axis.name] == "experts"]
    routings = list(_routings(model, mesh, rows)) if axes else []
    if not routings:
        return mesh
    (axis,) = axes

    def of(form: str) -> list[tuple[int, Exchange]]:
        return [(count, cluster.exchange(routing, axis.size, axis.stride, form)) for count, routing in routings]

    kind = "apart" if fix.capacity else fix.ep_kind
    forms = [of(form) for form in ((kind,) if kind else ("apart", "together"))]
    best = min(forms, key=lambda found: sum(count * each.price.seconds for count, each in found))
    hops = best[0][1].hops
    return Mesh(tuple(replace(a, hops=hops) if a == axis else a for a in mesh.axes))


def _routings(model: ModelGraph, mesh: Mesh, rows: int) -> Iterator[tuple[int, Routing]]:
    """(calls, what one rank sends) of every layer of experts."""
    ranks = mesh.num_data_ranks * mesh.followed.get("sequence", 1)
    for graph, count in model.pieces():
        routes = {op.outputs[1]: op for op in graph.ops if op.target == ROUTE}
        for op in graph.ops:
            route = next((routes[name] for name in op.inputs if name in routes), None)
            if op.target == DISPATCH and op.phase == "forward" and route is not None:
                index, tokens = graph.values[route.inputs[0]], graph.values[op.inputs[0]]
                count_of_tokens, width = tokens.shape(rows)
                experts = graph.values[route.outputs[1]].shape(rows)[0]
                token_bytes = width * ITEM_BYTES[tokens.dtype]
                yield count, Routing(count_of_tokens // ranks, token_bytes, index.shape(rows)[1], experts)
