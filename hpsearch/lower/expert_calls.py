"""What calls of expert ops say in an emitted program beside the traced arguments.

They are functions of `lower/experts.py` where experts are spread over ranks, and of `lower/padded.py` wherever these
have a capacity.
"""

from __future__ import annotations

from collections.abc import Callable

from hpsearch.errors import LoweringError
from hpsearch.graph import Op
from hpsearch.graph.routed import DISPATCH, OF_WEIGHTS, ROUTE, TRAVELS, WITH_WEIGHTS
from hpsearch.layout import Mesh
from hpsearch.lower.statement import Sent
from hpsearch.plan.decisions import GraphDecisions
from hpsearch.plan.spread import exchanges, route_of, rows_of, spread_over

TOKENS = {
    "hpsearch.dispatch.default": "input", "hpsearch.dispatch_backward.default": "output",
    "hpsearch.combine.default": "output", "hpsearch.combine_backward.default": "input",
}  # fmt: skip
"""Whether the first input or the first output of an op has a row for each token."""
FUNCTIONS = {target: target.split(".")[1] for target in (ROUTE, *TRAVELS)}
"""Ops that are functions of `lower/experts.py` where experts are spread over ranks."""
PADDED = {target: f"{target.split('.')[1]}_padded" for target in (ROUTE, *TRAVELS, *WITH_WEIGHTS, *OF_WEIGHTS)}
"""Ops that are functions of `lower/padded.py` where experts have a capacity."""


def function_of(placed: GraphDecisions, op: Op) -> str | None:
    """The function that an op calls where experts are spread over ranks or have a capacity; None where it runs as
    traced.

    Raises LoweringError for ways that no program has.
    """
    route, padded = route_of(placed, op), PADDED.get(op.target) if placed.graph.slots else None
    if route is None or not any(spread_over(placed, route)):
        return padded
    own, exchanged = spread_over(placed, route)
    if len(own) > 1 or len(exchanged) > 2 or (own and len(exchanged) > 1):
        axes = ", ".join((*own, *exchanged))
        raise LoweringError(
            f"{placed.graph.name}.{op.name}", f"experts can be spread over one axis of each kind, but found {axes}",
            "Place the experts' weights on fewer axes.",
        )  # fmt: skip
    if op.target != ROUTE:
        _check(placed, op, dict.fromkeys(exchanged, ("S0", "S0")) | dict.fromkeys(own, ("R", "P")))
    return padded or FUNCTIONS[op.target]


def _check(placed: GraphDecisions, op: Op, wanted: dict[str, tuple[str, str]]) -> None:
    """Tokens must be what they were when routed: a hand may have written another rule of the op."""
    inside = TOKENS[op.target] == "input"
    layout = placed.reads(op)[0].layout if inside else placed.made[op.outputs[0]]
    for axis, (taken, given) in wanted.items():
        expected = taken if inside else given
        if str(layout[axis]) != expected:
            raise LoweringError(
                f"{placed.graph.name}.{op.name}",
                f"expected its tokens {expected} on {axis}, as they were routed, but found {layout[axis]}",
                "Choose the rule that goes with the router's.",
            )


def spread_axes(placed: GraphDecisions) -> frozenset[str]:
    """Axes over which experts of a graph are spread without a capacity: their rows have no fixed number there."""
    routes = [op for op in placed.graph.ops if op.target == ROUTE and not placed.graph.slots]
    return frozenset(axis for op in routes for axes in spread_over(placed, op) for axis in axes)


def spreads_experts(code: str) -> bool:
    """Whether emitted functions route rows to experts on other ranks."""
    return f" = {FUNCTIONS[ROUTE]}(" in code


def where(placed: GraphDecisions, op: Op, shape_of: Callable[[str], tuple[int, ...]], mesh: Mesh) -> str:
    """What a call says of where experts are, as text behind the traced arguments; `shape_of` gives global shapes."""
    found = _padded_where(placed, op, shape_of, mesh) if placed.graph.slots else _where(placed, op, mesh)
    return "".join(f", {text}" for text in found)


def _where(placed: GraphDecisions, op: Op, mesh: Mesh) -> list[str]:
    """The route alone is told; its result says it to the others."""
    if op.target != ROUTE:
        return []
    own, exchanged = spread_over(placed, op)
    found = [f'own=(coordinate["{axis}"], {mesh.size(axis)})' for axis in own]
    hops = [f'groups["{hop.name}"]' for hop in mesh.hops if hop.name.partition("/")[0] in exchanged]
    if hops:
        return [*found, f"hops=({', '.join(hops)},)"]
    return found + [f'group=groups["{axis}"]' for axis in exchanged]


def _padded_where(placed: GraphDecisions, op: Op, shape_of: Callable[[str], tuple[int, ...]], mesh: Mesh) -> list[str]:
    route = route_of(placed, op)
    if route is None:
        return []
    own, exchanged = spread_over(placed, route)
    if op.target == ROUTE:
        tokens = placed.graph.values[op.inputs[0]].per_row[0]
        found = [f"slots={placed.graph.slots}", f"tokens={tokens}"]
        found += [f'own=(coordinate["{axis}"], {mesh.size(axis)})' for axis in own]
        return found + [f"ranks={mesh.size(axis)}" for axis in exchanged]
    rows = rows_of(op)
    here = placed.made[rows].local_shape(shape_of(rows), mesh.sizes)[0]
    found = [f"size={here}"] if op.target == DISPATCH else []
    return found + [f'group=groups["{axis}"], ranks={mesh.size(axis)}' for axis in exchanged]


def sent(placed: GraphDecisions, op: Op, shape_of: Callable[[str], tuple[int, ...]], mesh: Mesh) -> tuple[Sent, ...]:
    """What a call sends where routing is even."""
    if op.target not in TRAVELS:
        return ()
    what = f"{placed.graph.name}/{op.name}"
    return tuple(Sent(c.kind, c.axis, what, dtype, c.nbytes) for c, dtype in exchanges(placed, op, shape_of, mesh))
