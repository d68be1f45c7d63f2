"""`SearchSpace`: for one degree of tp, every legal state of every op, parameter and boundary, and who reads whom.

Nodes are ops, and the placeholders of a graph (batch inputs, block inputs, parameters, buffers, tangents). A state of
an op is a rule; a state of a placeholder is one placement; parameters carry a storage choice besides (cost/).
Block classes appear once: an edge between two calls of one class is an edge from the class's output to its input,
with the number of calls as weight. Nothing here has a price.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from hpsearch.graph import Call, ModelGraph, Op, OpGraph, Rule, Value
from hpsearch.graph.scaled import scaled_products
from hpsearch.layout import REPLICATE, ROLES, Layout, Mesh, Placement, shard
from hpsearch.strategy.attention import is_attention
from hpsearch.strategy.data_axes import DataPlacements, Followed, propagate_all
from hpsearch.strategy.heads import check_degree

NodeKey = tuple[str, str]
"""(graph name, op or placeholder name)."""


@dataclass(frozen=True)
class Node:
    key: NodeKey
    kind: str
    """op, param, buffer, input or tangent."""
    rules: tuple[Rule, ...]
    """One for each state. Placeholders: ((), (placement,))."""
    count: int
    """How many instances share this node."""

    def given(self, output: int) -> tuple[Placement, ...]:
        """Placement of one output in each state."""
        return tuple(Placement.parse(rule[1][output]) for rule in self.rules)

    def needed(self, argument: int) -> tuple[Placement, ...]:
        """Placement required of one argument in each state; a placeholder requires what it holds."""
        if self.kind != "op":
            return self.given(0)
        return tuple(Placement.parse(rule[0][argument]) for rule in self.rules)


@dataclass(frozen=True)
class Reader:
    node: NodeKey
    argument: int


@dataclass(frozen=True)
class Edge:
    """A value with the readers of one phase: it is redistributed once for each distinct placement they need."""

    value: tuple[str, str]
    """(graph, value name) whose shape and dtype travel."""
    producer: NodeKey
    output: int
    readers: tuple[Reader, ...]
    phase: str
    """forward, backward, or reduce (a parameter's gradient on its way to the parameter)."""
    count: int


@dataclass(frozen=True)
class SearchSpace:
    """The noun of this room."""

    model: ModelGraph
    tp: int
    nodes: dict[NodeKey, Node]
    edges: tuple[Edge, ...]
    followed: Followed
    """What each value is on the axes that are not free."""
    graphs: dict[str, OpGraph] = field(default_factory=dict)
    ep: int = 1
    cp: int = 1

    def value(self, graph: str, name: str) -> Value:
        return self.graphs[graph].values[name]

    def on(self, axis: str, graph: str) -> DataPlacements:
        """What the values of a graph are on an axis that is not free."""
        return self.followed[ROLES[axis]][graph]

    def cuts(self, graph: str, name: str, mesh: Mesh) -> tuple[tuple[int, Placement], ...]:
        """Of a value: (pieces, placement) for each role of the mesh's axes that are not free."""
        return tuple((size, self.followed[role][graph].values[name]) for role, size in mesh.followed.items())

    def layout(self, graph: str, name: str, tp: Placement, mesh: Mesh) -> Layout:
        """The layout in which a value is made, given what it is on tp."""
        placed = ((axis, tp if axis == "tp" else self.on(axis, graph).values[name]) for axis in mesh.names)
        return Layout(tuple(placed))


def enumerate_space(
    model: ModelGraph, tp: int, followed: Followed | None = None, ep: int = 1, cp: int = 1
) -> SearchSpace:
    """The space of one tp degree, where `ep` ranks share out experts and `cp` ranks sequences, as `followed` knows.

    Raises LegalityError when tp is no divisor of the heads.
    """
    check_degree(model, tp)
    followed = followed or propagate_all(model, model.rows)
    data, sequence = followed["batch"], followed.get("sequence", {})
    graphs = {graph.name: graph for graph, _ in model.pieces()}
    nodes: dict[NodeKey, Node] = {}
    for graph, count in model.pieces():
        cutter = _Cutter(graph, tp, ep, cp, sequence.get(graph.name))
        for node in _nodes(graph, count, cutter, data[graph.name], scaled_products(model, graph)):
            nodes[node.key] = node
    return SearchSpace(model, tp, nodes, tuple(_edges(model, graphs)), followed, graphs, ep, cp)


@dataclass(frozen=True)
class _Cutter:
    """What tp may cut in a graph."""

    graph: OpGraph
    tp: int
    ep: int
    cp: int
    along: DataPlacements | None
    """What values are on cp."""

    def held(self, value: Value, data: Placement | None) -> tuple[Rule, ...]:
        """Placements that a placeholder may have: whole, or cut evenly along a dim that the data axes leave alone."""
        cut = self.along.values[value.name] if self.along else REPLICATE
        cuts = [shard(d) for d in range(len(value.fixed)) if self.cuts_evenly(value, d, cut) and shard(d) != data]
        return tuple(((), (str(p),)) for p in [REPLICATE, *cuts])

    def cuts_evenly(self, value: Value, dim: int, along: Placement) -> bool:
        """Whether tp pieces of a dim, of what cp leaves of it (`along`), are equal for any number of rows. Batch dims
        belong to the data axes; rows of experts are as many as the experts of a piece get."""
        if dim == 0 and value.per_row[0] and value.name in self.graph.routed:
            return True
        pieces = self.tp * self.ep if dim == 0 and value.name in self.graph.by_expert else self.tp
        pieces *= self.cp if along == shard(dim) else 1
        return value.per_row[dim] == 0 and value.fixed[dim] % pieces == 0 and value.fixed[dim] >= pieces

    def is_legal(self, op: Op, rule: Rule) -> bool:
        """Every cut is even; positions that cp keeps apart in an attention are not cut again, nor its experts."""
        beside = self.along.rules[op.name] if self.along else (("R",) * len(op.inputs), ("R",) * len(op.outputs))
        for name, text, cut in zip(op.inputs + op.outputs, rule[0] + rule[1], beside[0] + beside[1], strict=True):
            if text[0] != "S":
                continue
            value, placement = self.graph.values[name], Placement.parse(text)
            if self.tp == 1 or not self.cuts_evenly(value, placement.dim, Placement.parse(cut)):
                return False
            if text == cut and (is_attention(op) or name in self.graph.by_expert):
                return False
        return self.tp > 1 or all(text == "R" for text in rule[0] + rule[1])


def _nodes(
    graph: OpGraph, count: int, cutter: _Cutter, data: DataPlacements, scaled: Collection[str]
) -> Iterator[Node]:
    """`scaled`: products in 8 bits, whose operands are never addends: a sum is not rounded as its addends are."""
    inputs, tangents = set(graph.inputs), set(graph.tangents)
    outer = graph.name == "outer"
    param_values = set(graph.params.values())
    for name, value in graph.values.items():
        if name in param_values:
            yield Node((graph.name, name), "param", cutter.held(value, None), count)
        elif name in inputs:
            rules = _WHOLE if outer else cutter.held(value, data.values[name])
            yield Node((graph.name, name), "input", rules, count)
        elif name in tangents:
            rules = _WHOLE if outer else cutter.held(value, data.values[name])
            yield Node((graph.name, name), "tangent", rules, count)
        elif value.role != "op":
            yield Node((graph.name, name), "buffer", _WHOLE, count)
    for op in graph.ops:
        rules = tuple(rule for rule in graph.rules_of(op) if cutter.is_legal(op, rule))
        if op.name in scaled:
            rules = tuple(rule for rule in rules if "P" not in rule[0])
        yield Node((graph.name, op.name), "op", rules, count)


_WHOLE: tuple[Rule, ...] = (((), ("R",)),)


def _edges(model: ModelGraph, graphs: dict[str, OpGraph]) -> Iterator[Edge]:
    for graph, count in model.pieces():
        if graph is not model.outer:
            yield from _own_edges(graph, count)
    yield from _outer_edges(model, graphs)
    for graph, count in model.pieces():
        for local, grad in graph.param_grads.items():
            if grad is not None:
                node, output = _source(graph, grad)
                reader = Reader((graph.name, graph.params[local]), 0)
                yield Edge((graph.name, grad), node, output, (reader,), "reduce", count)


def _source(graph: OpGraph, value: str) -> tuple[NodeKey, int]:
    """The node that makes a value inside one graph, and which of its outputs it is."""
    step = graph.producer.get(value)
    if step is None:
        return (graph.name, value), 0
    return (graph.name, step.name), step.outputs.index(value)


def _own_edges(graph: OpGraph, count: int) -> Iterator[Edge]:
    """Edges inside a block class; what leaves and enters it is the outer graph's business."""
    for (value, phase), readers in _readers(graph).items():
        node, output = _source(graph, value)
        yield Edge((graph.name, value), node, output, tuple(readers), phase, count)


def _readers(graph: OpGraph) -> dict[tuple[str, str], list[Reader]]:
    found: dict[tuple[str, str], list[Reader]] = {}
    for op in graph.ops:
        for argument, value in enumerate(op.inputs):
            found.setdefault((value, op.phase), []).append(Reader((graph.name, op.name), argument))
    return found


def _outer_edges(model: ModelGraph, graphs: dict[str, OpGraph]) -> Iterator[Edge]:
    """Edges of the outer graph, seen through its calls; equal ones are merged and counted."""
    outer = model.outer
    readers = _readers(outer)
    for call in outer.calls:
        block = graphs[call.block]
        entries = block.inputs if call.phase == "forward" else block.tangents
        for value, entry in zip(call.inputs, entries, strict=True):
            readers.setdefault((value, call.phase), []).append(Reader((block.name, entry), 0))
    counted: Counter[Edge] = Counter()
    for (value, phase), found in readers.items():
        node, output, travels = _seen_through(outer, graphs, value)
        unique = tuple(dict.fromkeys(found))
        counted[Edge(travels, node, output, unique, phase, 1)] += 1
    for edge, times in counted.items():
        yield Edge(edge.value, edge.producer, edge.output, edge.readers, edge.phase, times)


def _seen_through(outer: OpGraph, graphs: dict[str, OpGraph], value: str) -> tuple[NodeKey, int, tuple[str, str]]:
    """The node behind an outer value (inside a block when a call gives it), and the value as that graph names it."""
    step = outer.producer.get(value)
    if not isinstance(step, Call):
        node, output = _source(outer, value)
        return node, output, (outer.name, value)
    block = graphs[step.block]
    given = block.outputs if step.phase == "forward" else [g for g in block.input_grads if g is not None]
    inner = given[step.outputs.index(value)]
    node, output = _source(block, inner)
    return node, output, (block.name, inner)
