"""Bytes of what lives only for a moment: op results on their way, redistributed copies, gradients in flight.

Every graph is walked in execution order; what backward needs is counted elsewhere (`cost.saved_bytes`). A value is
freed after its last reader in the phase, as the program does. What is alive at a *moment* depends on the graph alone,
its bytes on the chosen states: so a moment is one more linear memory row, and the search adds the row of the moment
where its optimum does not fit (a cutting plane), until it fits or nothing can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpsearch.cost import CostTable
from hpsearch.cost.context import exchanged_bytes
from hpsearch.cost.op_time import Floats, local_elements
from hpsearch.graph import ITEM_BYTES, Op, OpGraph
from hpsearch.layout import Placement
from hpsearch.solve import Row


@dataclass(frozen=True)
class Moment:
    """One op of a graph with what is alive while it runs."""

    graph: OpGraph
    op: Op
    alive: tuple[tuple[str, int, str], ...]
    """(op that made it, which output, value name)."""


def moments(table: CostTable) -> Iterator[Moment]:
    """Every op of every graph, phase by phase."""
    for graph, _ in table.space.model.pieces():
        for phase in ("forward", "backward"):
            yield from _walk(graph, [op for op in graph.ops if op.phase == phase])


def _walk(graph: OpGraph, ops: list[Op]) -> Iterator[Moment]:
    saved = {graph.storage(v) for v in graph.saved}
    last: dict[str, int] = {}
    for position, op in enumerate(ops):
        last.update((graph.storage(value), position) for value in (*op.inputs, *op.outputs))
    alive: dict[str, tuple[str, int, str]] = {}
    for position, op in enumerate(ops):
        for slot, value in enumerate(op.outputs):
            if value not in graph.aliases and value not in saved:
                alive[value] = (op.name, slot, value)
        yield Moment(graph, op, tuple(alive.values()))
        for value in [v for v in alive if last[v] <= position]:
            del alive[value]


def peak(table: CostTable, choice: Sequence[int]) -> tuple[int, Moment]:
    """The largest workspace in bytes a device, and its moment."""
    state = {key: choice[i] for i, key in enumerate(table.keys)}
    sizes: dict[tuple[str, str], int] = {}

    def size(graph: OpGraph, name: str, slot: int, value: str) -> int:
        key = (graph.name, value)
        if key not in sizes:
            node = table.space.nodes[graph.name, name]
            sizes[key] = _bytes(table, graph, value, Placement.parse(node.rules[state[node.key]][1][slot]))
        return sizes[key]

    best, where = -1, None
    for moment in moments(table):
        total = sum(size(moment.graph, *made) for made in moment.alive) + _copies(table, moment, state)
        if total > best:
            best, where = total, moment
    assert where is not None  # every graph has a forward
    return best, where


def row(table: CostTable, moment: Moment, limit_bytes: float) -> Row:
    """The memory row of one moment: everything that stays, and what is alive then."""
    index = {key: i for i, key in enumerate(table.keys)}
    found: dict[int, Floats] = dict(table.problem.rows[0].coefficients)
    for name, slot, value in moment.alive:
        node = table.space.nodes[moment.graph.name, name]
        nbytes = np.array([_bytes(table, moment.graph, value, p) for p in node.given(slot)], dtype=np.float64)
        n = index[node.key]
        found[n] = found[n] + nbytes if n in found else nbytes
    return Row(f"memory at {moment.graph.name}/{moment.op.name}", found, limit_bytes)


def _copies(table: CostTable, moment: Moment, state: dict[tuple[str, str], int]) -> int:
    """Bytes of the redistributed copies that the op of a moment reads."""
    graph, op, total = moment.graph, moment.op, 0
    node = table.space.nodes[graph.name, op.name]
    for value, wanted in zip(op.inputs, node.rules[state[node.key]][0], strict=True):
        step = graph.producer.get(value)
        maker = table.space.nodes.get((graph.name, step.name)) if step is not None else None
        if step is None or maker is None:
            continue
        if maker.rules[state[maker.key]][1][step.outputs.index(value)] != wanted:
            total += _bytes(table, graph, value, Placement.parse(wanted))
    return total + exchanged_bytes(table.space, node.key, table.mesh, table.job, state[node.key])


def _bytes(table: CostTable, graph: OpGraph, name: str, tp: Placement) -> int:
    value = graph.values[name]
    cuts = (*table.space.cuts(graph.name, name, table.mesh), (table.space.tp, tp))
    return local_elements(value, table.job.micro_rows(), cuts) * ITEM_BYTES[value.dtype]
