"""Seconds of a choice by walking the model unrolled, layer by layer: no folding, no classes, no matrices."""

from __future__ import annotations

from collections.abc import Sequence

from hpsearch.cost import CostTable
from hpsearch.graph import ITEM_BYTES, Call, Op, OpGraph
from hpsearch.layout import Layout, Placement, redistribute
from hpsearch.strategy import Node


class Walk:
    def __init__(self, table: CostTable, choice: Sequence[int]) -> None:
        self.table, self.model = table, table.space.model
        self.state = {key: choice[i] for i, key in enumerate(table.keys)}
        self.seconds = 0.0
        self.rows = table.job.micro_rows()

    def layout(self, graph: OpGraph, name: str, side: int, slot: int) -> Layout:
        """Layout of one side of a step or placeholder in the chosen state."""
        node = self.table.space.nodes[graph.name, name]
        if node.kind == "op":
            tp = node.rules[self.state[node.key]][side][slot]
        elif node.kind == "param":
            tp = str(self.table.storages[node.key][self.state[node.key]].used["tp"])
        else:
            tp = node.rules[self.state[node.key]][1][0]
        names = self.table.mesh.names
        pairs = [(a, Placement.parse(tp if a == "tp" else self.on(a, node, side, slot))) for a in names]
        return Layout(tuple(pairs))

    def on(self, axis: str, node: Node, side: int, slot: int) -> str:
        """What an operand or result of a node is on an axis that is not free."""
        if node.kind == "param":
            return "R"
        graph, name = node.key
        placed = self.table.space.on(axis, graph)
        return placed.rules[name][side][slot] if node.kind == "op" else str(placed.values[name])

    def move(self, graph: OpGraph, name: str, source: Layout, target: Layout) -> None:
        value = graph.values[name]
        for c in redistribute(value.shape(self.rows), ITEM_BYTES[value.dtype], source, target, self.table.mesh.sizes):
            axis = self.table.mesh.axis(c.axis)
            self.seconds += self.table.cluster.collective(c.kind, c.nbytes, axis.size, axis.stride).seconds

    def run(self, graph: OpGraph, phase: str, arriving: dict[str, Layout]) -> dict[str, Layout]:
        """One execution of a phase; returns the layout of every value made so far."""
        made = dict(arriving)
        copies: set[tuple[str, Layout]] = set()
        for step in graph.steps:
            if step.phase != phase:
                continue
            if isinstance(step, Call):
                self.call(graph, step, made, copies)
                continue
            for slot, value in enumerate(step.inputs):
                self.fetch(graph, value, made[value], self.layout(graph, step.name, 0, slot), copies)
            self.seconds += float(self.table.seconds[graph.name, step.name][self.state[graph.name, step.name]])
            made.update((out, self.layout(graph, step.name, 1, slot)) for slot, out in enumerate(step.outputs))
        return made

    def fetch(
        self, graph: OpGraph, value: str, source: Layout, target: Layout, copies: set[tuple[str, Layout]]
    ) -> None:
        if source != target and (value, target) not in copies:
            copies.add((value, target))
            self.move(graph, value, source, target)

    def placeholders(self, graph: OpGraph) -> dict[str, Layout]:
        return {n: self.layout(graph, n, 1, 0) for n, v in graph.values.items() if v.role != "op"}

    def call(self, graph: OpGraph, call: Call, made: dict[str, Layout], copies: set[tuple[str, Layout]]) -> None:
        block = self.model.blocks[call.block]
        entries = block.inputs if call.phase == "forward" else block.tangents
        for value, entry in zip(call.inputs, entries, strict=True):
            self.fetch(graph, value, made[value], self.layout(block, entry, 1, 0), copies)
        before = self.seconds
        inner = self.run(block, "forward", self.placeholders(block))
        if call.phase == "forward":
            given = block.outputs
        else:
            again = block.name in self.table.job.recompute
            self.seconds = self.seconds if again else before
            inner = self.run(block, "backward", inner)
            given = tuple(g for g in block.input_grads if g is not None)
        made.update((out, inner[name]) for out, name in zip(call.outputs, given, strict=True))


def naive_seconds(table: CostTable, choice: Sequence[int]) -> float:
    """Compute and on-path communication of one step, all micro-batches; parameters' traffic left out."""
    walk = Walk(table, choice)
    outer = table.space.model.outer
    forward = walk.run(outer, "forward", walk.placeholders(outer))
    walk.run(outer, "backward", forward)
    total = walk.seconds * table.job.micro_batches
    for graph, count in table.space.model.pieces():
        for local, grad in graph.param_grads.items():
            key = (graph.name, graph.params[local])
            storage = table.storages[key][walk.state[key]]
            total += count * table.update_s(storage)
            total += count * tp_reduce_s(table, walk, graph, grad, storage) if grad is not None else 0.0
    return total


def tp_reduce_s(table: CostTable, walk: Walk, graph: OpGraph, grad: str, storage: object) -> float:
    """Seconds a step that one gradient's reduction over tp takes."""
    step = graph.producer[grad]
    assert isinstance(step, Op)
    source = Layout((("tp", walk.layout(graph, step.name, 1, 0)["tp"]),))
    target = Layout((("tp", storage.used["tp"]),))  # type: ignore[attr-defined]
    sizes = {"tp": table.mesh.size("tp")}
    seconds = 0.0
    for c in redistribute(graph.values[grad].fixed, ITEM_BYTES[table.job.recipe.reduce], source, target, sizes):
        axis = table.mesh.axis("tp")
        seconds += table.cluster.collective(c.kind, c.nbytes, axis.size, axis.stride).seconds
    return seconds * storage.reductions_per_step(table.job)  # type: ignore[attr-defined]


def hideable_seconds(table: CostTable, choice: Sequence[int]) -> float:
    """Exposed part of gathers and data-axis reductions, by the formula in cost_table's docstring, term by term."""
    eta, job = table.cluster.device.overlap_efficiency, table.job
    state = {key: choice[i] for i, key in enumerate(table.keys)}
    total = 0.0
    for graph, count in table.space.model.pieces():
        again = graph.name in job.recompute
        for phase in ("forward", "backward"):
            compute = sum(
                float(table.seconds[graph.name, op.name][state[graph.name, op.name]])
                for op in graph.ops
                if op.phase == phase or (again and phase == "backward")
            )
            for micro_batch in range(job.micro_batches):
                hidden = 0.0
                for local in graph.params:
                    storage = table.storages[graph.name, graph.params[local]][state[graph.name, graph.params[local]]]
                    each = storage.residency == "micro_batch"
                    if not each and micro_batch < job.micro_batches - 1:
                        continue
                    passes = 2 if again else storage.passes
                    gathers = phase == "forward" or (each and passes == 2)
                    hidden += seconds_of(table, storage.gathers(job, table.mesh)) if gathers else 0.0
                    hidden += seconds_of(table, storage.reductions(job, table.mesh)) if phase == "backward" else 0.0
                total += count * ((1 - eta) * hidden + eta * max(0.0, hidden - compute))
    return total


def seconds_of(table: CostTable, collectives: Sequence[object]) -> float:
    found = 0.0
    for c in collectives:
        if c.axis == "tp":  # type: ignore[attr-defined]
            continue
        axis = table.mesh.axis(c.axis)  # type: ignore[attr-defined]
        found += table.cluster.collective(c.kind, c.nbytes, axis.size, axis.stride).seconds  # type: ignore[attr-defined]
    return found
