"""What calls of expert ops say in an emitted program beside the traced arguments; see `lower/experts.py`."""

from __future__ import annotations

from collections.abc import Callable

from hpsearch.errors import LoweringError
from hpsearch.graph import Op
from hpsearch.graph.routed import ROUTE, TRAVELS
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


def function_of(placed: GraphDecisions, op: Op) -> str | None:
    """The function that an op calls where experts are spread over ranks; None where it runs as traced.

    Raises LoweringError for ways that no program has.
    """
    route = route_of(placed, op)
    if route is None or not any(spread_over(placed, route)):
        return None
    own, exchanged = spread_over(placed, route)
    if len(own) > 1 or len(exchanged) > 1:
        axes = ", ".join(own if len(own) > 1 else exchanged)
        raise LoweringError(
            f"{placed.graph.name}.{op.name}", f"experts can be spread over one axis of each kind, but found {axes}",
            "Place the experts' weights on fewer axes.",
        )  # fmt: skip
    if op.target != ROUTE:
        _check(placed, op, dict.fromkeys(exchanged, ("S0", "S0")) | dict.fromkeys(own, ("R", "P")))
    return FUNCTIONS[op.target]


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
    """Axes over which experts of a graph are spread: rows of experts have no fixed number there."""
    routes = [op for op in placed.graph.ops if op.target == ROUTE]
    return frozenset(axis for op in routes for axes in spread_over(placed, op) for axis in axes)


def spreads_experts(code: str) -> bool:
    """Whether emitted functions route rows to experts on other ranks."""
    return f" = {FUNCTIONS[ROUTE]}(" in code


def where(placed: GraphDecisions, op: Op, mesh: Mesh) -> str:
    """The arguments of a route that say where experts are, as text behind the traced ones."""
    own, exchanged = spread_over(placed, op)
    found = [f'own=(coordinate["{axis}"], {mesh.size(axis)})' for axis in own]
    found += [f'group=groups["{axis}"]' for axis in exchanged]
    hops = [f'groups["{hop.name}"]' for hop in mesh.hops if hop.name.partition("/")[0] in exchanged]
    found += [f"hops=({', '.join(hops)},)"] if hops else []
    return "".join(f", {text}" for text in found)


def sent(placed: GraphDecisions, op: Op, shape_of: Callable[[str], tuple[int, ...]], mesh: Mesh) -> tuple[Sent, ...]:
    """What a call sends where routing is even."""
    if op.target not in TRAVELS:
        return ()
    value = rows_of(op)
    dtype, what = placed.graph.values[value].dtype, f"{placed.graph.name}/{op.name}"
    return tuple(Sent(c.kind, c.axis, what, dtype, c.nbytes) for c in exchanges(placed, op, shape_of, mesh))
