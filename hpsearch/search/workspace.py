"""Peak bytes of what lives only for a moment: op results on their way, redistributed copies, gradients in flight.

Walks every graph in execution order under the chosen states and keeps a tally of what is alive; what backward needs is
counted elsewhere (`cost.saved_bytes`). A value is freed after its last reader in the phase, as the program does.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpsearch.cost import CostTable
from hpsearch.cost.op_time import local_elements
from hpsearch.graph import ITEM_BYTES, Op, OpGraph
from hpsearch.layout import REPLICATE, Placement


def workspace_bytes(table: CostTable, choice: Sequence[int]) -> int:
    """Bytes a device, the largest over graphs and phases."""
    state = {key: choice[i] for i, key in enumerate(table.keys)}
    return max(_peak(table, graph, phase, state) for graph, _ in table.space.model.pieces() for phase in _PHASES)


_PHASES = ("forward", "backward")


def _peak(table: CostTable, graph: OpGraph, phase: str, state: dict[tuple[str, str], int]) -> int:
    saved = {graph.storage(v) for v in graph.saved}
    last: dict[str, int] = {}
    ops = [op for op in graph.ops if op.phase == phase]
    for position, op in enumerate(ops):
        for value in (*op.inputs, *op.outputs):
            last[graph.storage(value)] = position
    alive: dict[str, int] = {}
    peak = 0
    for position, op in enumerate(ops):
        for slot, value in enumerate(op.outputs):
            if value not in graph.aliases and value not in saved:
                alive[value] = _bytes(table, graph, op, slot, state)
        copies = sum(_copy_bytes(table, graph, op, argument, state) for argument in range(len(op.inputs)))
        peak = max(peak, sum(alive.values()) + copies)
        for value in [v for v in alive if last[v] <= position]:
            del alive[value]
    return peak


def _bytes(table: CostTable, graph: OpGraph, op: Op, slot: int, state: dict[tuple[str, str], int]) -> int:
    node = table.space.nodes[graph.name, op.name]
    placement = Placement.parse(node.rules[state[node.key]][1][slot])
    return _local_bytes(table, graph, op.outputs[slot], placement)


def _copy_bytes(table: CostTable, graph: OpGraph, op: Op, argument: int, state: dict[tuple[str, str], int]) -> int:
    """Bytes of the redistributed copy an op reads; 0 when it reads the value as it was made."""
    node = table.space.nodes[graph.name, op.name]
    wanted = Placement.parse(node.rules[state[node.key]][0][argument])
    value = op.inputs[argument]
    step = graph.producer.get(value)
    maker = table.space.nodes.get((graph.name, step.name if step else value))
    if maker is None or maker.kind != "op" or step is None:
        return 0
    made = Placement.parse(maker.rules[state[maker.key]][1][step.outputs.index(value)])
    return 0 if made == wanted else _local_bytes(table, graph, value, wanted)


def _local_bytes(table: CostTable, graph: OpGraph, name: str, tp: Placement) -> int:
    value = graph.values[name]
    data = table.space.data[graph.name].values.get(name, REPLICATE)
    rows, ranks = table.job.local_rows(table.mesh), table.mesh.num_data_ranks
    return local_elements(value, rows, ranks, data, tp, table.space.tp) * ITEM_BYTES[value.dtype]
