"""Which products of a model run in 8 bits under the recipe `fp8`, and in which formats.

The linears of repeated blocks: their forward with both operands in E4M3, and the gradients of their inputs with the
incoming gradient in E5M2. Each slice of an operand along what is not summed has a scale of its own, from its largest
element now, so it is the same under every layout. Gradients of weights, whose sums are over tokens, which micro-batches
and data ranks cut, stay in the compute dtype; so do embeddings, heads, and whatever stands outside of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from hpsearch.graph.model_graph import ModelGraph, Op, OpGraph
from hpsearch.layout import Collective, Layout

RECIPE = "fp8"
FORWARD, BACKWARD = "float8_e4m3fn", "float8_e5m2"

Formats = tuple[str, str]
"""Of the two operands of a product."""


def scaled_products(model: ModelGraph, graph: OpGraph) -> dict[str, Formats]:
    """Op → formats of its operands; empty under other recipes."""
    if model.recipe != RECIPE or graph.name not in model.blocks:
        return {}
    weights = set(graph.params.values())
    found: dict[str, Formats] = {}
    for op in graph.ops:
        if op.kind != "matmul" or not op.equation:
            continue
        is_weight = [graph.storage(value) in weights for value in op.inputs]
        if sum(is_weight) == 1:
            other = FORWARD if op.phase == "forward" else BACKWARD
            found[op.name] = (FORWARD, other) if is_weight[0] else (other, FORWARD)
    return found


def letters(op: Op) -> tuple[str, str, str]:
    """Of the first operand, the second and the result of a product."""
    operands, _, out = op.equation.partition("->")
    left, _, right = operands.partition(",")
    return left, right, out


def summed_dims(op: Op, operand: int) -> tuple[int, ...]:
    """Dims of an operand that the product sums over."""
    sides = letters(op)
    return tuple(dim for dim, letter in enumerate(sides[operand]) if letter not in sides[2])


def scale_messages(
    graph: OpGraph, op: Op, layouts: Sequence[Layout], rows: int, sizes: Mapping[str, int]
) -> Iterator[tuple[int, Collective]]:
    """(operand, collective) by which the largest elements of its slices meet where axes cut what is summed over."""
    for operand, (name, layout) in enumerate(zip(op.inputs, layouts, strict=True)):
        dims = summed_dims(op, operand)
        local = layout.local_shape(graph.values[name].shape(rows), sizes)
        nbytes = 4 * prod(size for dim, size in enumerate(local) if dim not in dims)
        for axis, placement in layout:
            if placement.is_shard and placement.dim in dims:
                yield operand, Collective("all_reduce", axis, nbytes)
