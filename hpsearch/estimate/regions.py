"""Parts of a graph that run as units whatever their ops: linears, attention cores, routed experts, scans."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hpsearch.graph import Op, OpGraph

FUSABLE = ("pointwise", "reduction", "view", "factory", "other")


@dataclass(frozen=True)
class Graph:
    """The forward of one piece, with what the readers ask again and again."""

    piece: OpGraph
    ops: tuple[Op, ...]
    """Forward ops in order; of an outer graph, those of one segment."""

    def elements(self, value: str) -> float:
        """Elements for one row; 0 for a value that does not depend on the batch."""
        found = self.piece.values[value]
        if not any(found.per_row):
            return 0.0
        return float(prod(p if p else f for f, p in zip(found.fixed, found.per_row, strict=True)))

    def param_of(self, value: str) -> str | None:
        """The parameter that `value` is, through views and casts; None for anything else."""
        while self.piece.values[value].role == "op":
            step = self.piece.producer[value]
            if not isinstance(step, Op) or len(step.inputs) != 1 or step.kind not in ("view", "pointwise"):
                return None
            value = step.inputs[0]
        return value if self.piece.values[value].role == "param" else None


def is_product(op: Op) -> bool:
    return op.kind in ("matmul", "conv")


@dataclass(frozen=True)
class CoreRegion:
    first: Op
    """The product of queries and keys, or the fused operator."""
    last: Op
    inside: frozenset[str]
    """Names of ops between, and of both ends."""

    @property
    def operands(self) -> tuple[str, str, str]:
        """Queries, keys, values."""
        if self.first is self.last:
            q, k, v = self.first.inputs[:3]
            return q, k, v
        q, k = self.first.inputs[:2]
        return q, k, self.last.inputs[1]

    @property
    def result(self) -> str:
        return self.last.outputs[0]


def cores(graph: Graph, skip: frozenset[str]) -> tuple[CoreRegion, ...]:
    """Fused attention, and products of two activations with a softmax between."""
    found = []
    for op in graph.ops:
        if op.name in skip:
            continue
        if op.kind == "attention" and "scaled_dot_product" in op.target:
            found.append(CoreRegion(op, op, frozenset({op.name})))
        elif op.kind == "matmul" and not _params(graph, op):
            region = _scores(graph, op)
            if region is not None:
                found.append(region)
    return tuple(found)


def _params(graph: Graph, op: Op) -> list[str]:
    return [value for value in op.inputs if graph.param_of(value) is not None]


def _scores(graph: Graph, first: Op) -> CoreRegion | None:
    """The region from a product of two activations through a softmax to the next product, if there is one."""
    made, inside, soft = set(first.outputs), {first.name}, False
    for op in graph.ops:
        if not made.intersection(op.inputs) or op.name in inside:
            continue
        if op.kind in FUSABLE:
            inside.add(op.name)
            made.update(op.outputs)
            soft = soft or "softmax" in op.target
        elif op.kind == "matmul" and soft and op.inputs[0] in made:
            return CoreRegion(first, op, frozenset(inside | {op.name}))
        else:
            return None
    return None


def copies(graph: Graph, value: str) -> float:
    """How often a value repeats what it was made from: keys expanded to the heads of the queries."""
    whole = graph.elements(value)
    while True:
        step = graph.piece.producer.get(value)
        if not isinstance(step, Op) or len(step.inputs) != 1 or step.kind not in ("view", "pointwise"):
            return 1.0
        value = step.inputs[0]
        if "expand" in step.target or "repeat" in step.target:
            return whole / graph.elements(value) if graph.elements(value) else 1.0


@dataclass(frozen=True)
class ExpertRegion:
    products: tuple[Op, ...]
    weights: tuple[str, ...]
    inside: frozenset[str]


def experts(graph: Graph) -> ExpertRegion | None:
    """Products with parameters that have an expert dim, and everything in their module."""
    products = [op for op in graph.ops if op.kind == "matmul" and any(_is_stacked(graph, v) for v in op.inputs)]
    if not products:
        return None
    scopes = {op.scope for op in products}
    inside = frozenset(op.name for op in graph.ops if any(_within(op.scope, scope) for scope in scopes))
    weights = tuple(v for op in products for v in op.inputs if _is_stacked(graph, v))
    return ExpertRegion(tuple(products), weights, inside | {op.name for op in products})


def _is_stacked(graph: Graph, value: str) -> bool:
    param = graph.param_of(value)
    return param is not None and len(graph.piece.values[param].fixed) == 3


def _within(scope: str, module: str) -> bool:
    return bool(module) and (scope == module or scope.startswith(module + "."))


@dataclass(frozen=True)
class ScanRegion:
    module: str
    entries: tuple[Op, ...]
    """Linears that read the stream."""
    end: Op
    inside: frozenset[str]
    """Ops between."""


def scan(graph: Graph) -> ScanRegion | None:
    """The mixer of a state-space or gated-delta layer, known by its decay parameter `A_log`."""
    mark = next((name for name in graph.piece.params if name.split(".")[-1] == "A_log"), None)
    if mark is None:
        return None
    module = mark.rpartition(".")[0]
    ours = [op for op in graph.ops if _within(op.scope, module)]
    linears = [op for op in ours if op.kind == "matmul" and _params(graph, op)]
    if len(linears) < 2:
        return None
    names = {op.name for op in linears}
    return ScanRegion(
        module, tuple(linears[:-1]), linears[-1], frozenset(op.name for op in ours if op.name not in names)
    )


def linear_sides(graph: Graph, op: Op) -> tuple[float, int, int] | None:
    """(rows, n, k) of a product of an activation with a parameter; None for another op."""
    weights = _params(graph, op)
    if not is_product(op) or not weights:
        return None
    weight = graph.piece.values[weights[0]].fixed
    made = graph.elements(op.outputs[0])
    flops = float(op.flops[0] + op.flops[1])
    if op.equation:
        left, right, out = op.equation.replace("->", ",").split(",")
        letters = right if op.inputs[1] == weights[0] else left
        n = prod(size for letter, size in zip(letters, weight, strict=True) if letter in out)
    else:
        n = weight[0] if op.kind == "conv" else graph.piece.values[op.outputs[0]].fixed[-1]
    rows = made / n
    return rows, n, max(round(flops / (2 * rows * n)), 1) if rows else 1
