"""Experts with a capacity: a graph whose experts have a fixed number of rows each, whatever the router says.

Of each row of the batch (a sequence) an expert takes the first `slots` tokens that chose it, in the order of their
positions; what comes later gets nothing from it. With S tokens a row, k experts a token and E experts

    slots = min(S, ceil(factor · S · k / E))

(https://arxiv.org/abs/2006.16668, a group being one row; https://arxiv.org/abs/2101.03961). What is dropped depends on
one row of the batch alone, so no layout, micro-batch or neighbour changes it, and no later token changes what an
earlier one gets.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

from hpsearch.errors import LegalityError
from hpsearch.graph.model_graph import Call, ModelGraph, Op, OpGraph, Value
from hpsearch.graph.routed import ROUTE


def with_capacity(model: ModelGraph, factor: float | None) -> ModelGraph:
    """`model` with rows of experts as many as their slots; `model` itself for None.

    Raises LegalityError where there are no experts, or their tokens are not a fixed number for each row of the batch.
    """
    if factor is None:
        return model
    if not any(op.target == ROUTE for graph, _ in model.pieces() for op in graph.ops):
        raise LegalityError(
            f"capacity={factor:g}", f"expected a model with experts, but {model.name} has none", "Leave capacity out.",
        )  # fmt: skip
    outer = _padded(model.outer, factor)
    blocks = {name: _padded(block, factor) for name, block in model.blocks.items()}
    return replace(model, outer=outer, blocks=blocks, traced=model.traced or model)


def slots_of(model: ModelGraph) -> dict[str, int]:
    """Graph → rows that each of its experts has for a row of the batch, of graphs with a capacity."""
    return {graph.name: graph.slots for graph, _ in model.pieces() if graph.slots}


def _padded(graph: OpGraph, factor: float) -> OpGraph:
    routes = [op for op in graph.ops if op.target == ROUTE]
    if not routes:
        return graph
    found = sorted({_slots(graph, route, factor) for route in routes})
    if len(found) > 1:
        raise LegalityError(
            f"capacity={factor:g}",
            f"expected layers of experts that are alike in {graph.name}, but they would have {found} slots",
            "Leave capacity out.",
        )
    slots, experts, pairs = found[0]
    new = slots * experts
    padded = {
        name: replace(value, per_row=(new, *value.per_row[1:]))
        for name, value in graph.values.items()
        if name in graph.routed and value.fixed[:1] == (0,) and value.per_row[:1] == (pairs,)
    }
    steps = tuple(_step(step, padded, new, pairs) for step in graph.steps)
    return replace(graph, values=graph.values | padded, steps=steps, slots=slots)


def _slots(graph: OpGraph, route: Op, factor: float) -> tuple[int, int, int]:
    """(slots, experts, pairs of a token and an expert in a row of the batch) of one layer."""
    index = graph.values[route.inputs[0]]
    if index.fixed[0] or not index.per_row[0] or index.per_row[1]:
        shape = " x ".join(f"{f} + {p} a row" for f, p in zip(index.fixed, index.per_row, strict=True))
        raise LegalityError(
            f"capacity={factor:g}",
            f"expected as many tokens for each row of the batch, but {route.source or route.name} routes {shape}",
            "Leave capacity out.",
        )
    tokens, top_k = index.per_row[0], index.fixed[1]
    experts = graph.values[route.outputs[1]].fixed[0]
    slots = ceil(Fraction(repr(factor)) * tokens * top_k / experts)
    return min(slots, tokens), experts, tokens * top_k


def _step(step: Op | Call, padded: dict[str, Value], new: int, pairs: int) -> Op | Call:
    """With the FLOPs of as many rows."""
    if isinstance(step, Call) or padded.keys().isdisjoint((*step.inputs, *step.outputs)):
        return step
    return replace(step, flops=(step.flops[0], step.flops[1] * new // pairs))
