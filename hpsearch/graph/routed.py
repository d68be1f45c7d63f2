"""Which values of a graph are rows of experts, and which count experts, found from the ops that route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

ROUTE = "hpsearch.route.default"
DISPATCH = "hpsearch.dispatch.default"
AT_HOME = ("hpsearch.dispatch_backward.default", "hpsearch.combine.default")
"""Ops that bring rows back to their tokens."""
COMBINE_BACKWARD = "hpsearch.combine_backward.default"
TRAVELS = (DISPATCH, *AT_HOME, COMBINE_BACKWARD)
"""Ops whose rows cross the ranks that experts are spread over."""
OF_WEIGHTS = ("hpsearch.grouped_mm_weight.default", "hpsearch.grouped_sum.default")
"""Ops that sum rows into gradients of weights."""
WITH_WEIGHTS = ("hpsearch.grouped_mm.default", "hpsearch.grouped_add.default")
"""Ops whose second operand is a weight of each expert."""


class _Op(Protocol):
    @property
    def target(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


class _Value(Protocol):
    @property
    def fixed(self) -> tuple[int, ...]: ...
    @property
    def per_row(self) -> tuple[int, ...]: ...


def routed(ops: Sequence[_Op], values: Mapping[str, _Value]) -> frozenset[str]:
    """Names of rows of experts, of the order they stand in, and of the counts of each expert."""
    found: set[str] = set()
    for op in ops:
        rows = [_first(values[name]) for name in op.inputs if name in found and values[name].per_row[:1] != (0,)]
        if op.target == ROUTE:
            found.update(op.outputs)
        elif op.target == COMBINE_BACKWARD:
            found.add(op.outputs[0])
        elif op.target not in (*AT_HOME, *OF_WEIGHTS):
            found.update(name for name in op.outputs if _first(values[name]) in rows)
            if op.target == DISPATCH:
                found.update(op.outputs)
    return frozenset(found)


def _first(value: _Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return value.fixed[:1], value.per_row[:1]


def by_expert(ops: Sequence[_Op], values: Mapping[str, _Value]) -> frozenset[str]:
    """Names of what has one slice for each expert, casts and transposes of the slices among them."""
    found = {name for op in ops if op.target == ROUTE for name in op.outputs[1:]}
    found |= {op.inputs[1] for op in ops if op.target in WITH_WEIGHTS}
    for op in reversed(ops):
        if len(op.inputs) == 1 and found.intersection(op.outputs) and _alike(op, values):
            found.add(op.inputs[0])
    for op in ops:
        changed = len(op.inputs) == 1 and op.inputs[0] in found and _alike(op, values)
        if op.target in OF_WEIGHTS or changed:
            found.update(op.outputs)
    return frozenset(found)


def _alike(op: _Op, values: Mapping[str, _Value]) -> bool:
    """Whether a result has as many slices as the operand; both without rows of the batch."""
    return all(_first(values[a]) == _first(values[b]) and values[a].fixed for a in op.inputs for b in op.outputs)


def rows_of(op: _Op) -> str:
    """The rows that an op of TRAVELS sends or gets."""
    if op.target == DISPATCH:
        return op.outputs[0]
    return op.inputs[1] if op.target == COMBINE_BACKWARD else op.inputs[0]


def weight_of(op: _Op) -> str:
    """The weights of a token's experts in combine's backward; of other ops that send, what has the rows' dtype."""
    return op.inputs[2] if op.target == COMBINE_BACKWARD else rows_of(op)
