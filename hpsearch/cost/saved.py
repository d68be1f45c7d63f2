"""What one micro-batch keeps for its backward, and what is there all the time without being trained."""

from __future__ import annotations

import numpy as np

from hpsearch.cost.job import Job
from hpsearch.cost.op_time import Floats, NodeKey, local_elements
from hpsearch.graph import ITEM_BYTES, OpGraph
from hpsearch.layout import Mesh
from hpsearch.strategy import SearchSpace


def saved_bytes(space: SearchSpace, job: Job, mesh: Mesh) -> dict[NodeKey, Floats]:
    """Bytes that one micro-batch keeps for its backward, by the node that makes them and its state.

    A recomputed block keeps its inputs for every instance and everything else for one at a time.
    """
    rows = job.micro_rows()
    found: dict[NodeKey, Floats] = {}
    for graph, count in space.model.pieces():
        inputs = set(graph.inputs)
        kept = dict.fromkeys(graph.storage(v) for v in graph.saved)
        if graph.name in job.recompute:
            kept |= dict.fromkeys(graph.inputs)
        params = set(graph.params.values())
        for name in kept:
            if name in params:
                continue
            value = graph.values[name]
            step = graph.producer.get(name)
            node = space.nodes.get((graph.name, step.name if step else name))
            if node is None:  # made by a call: the block's own output, counted where it is the next block's input
                continue
            times = count if name in inputs or graph.name not in job.recompute else 1
            if name in inputs and graph is not space.model.outer:
                times = _distinct_inputs(space, graph, name)
            cuts = space.cuts(graph.name, name, mesh)
            slot = step.outputs.index(name) if step else 0
            nbytes = [
                local_elements(value, rows, (*cuts, (space.tp, tp))) * ITEM_BYTES[value.dtype] * times
                for tp in node.given(slot)
            ]
            found[node.key] = found.get(node.key, np.zeros(len(nbytes))) + np.array(nbytes, dtype=np.float64)
    return found


def buffer_bytes(space: SearchSpace) -> dict[NodeKey, int]:
    """Bytes of buffers, persistent or not: whole on every device, one for each instance of a block."""
    found: dict[NodeKey, int] = {}
    for graph, count in space.model.pieces():
        for name in graph.buffers.values():
            node = space.nodes.get((graph.name, name))
            if node is not None and node.kind == "buffer":
                found[node.key] = graph.values[name].nbytes(0) * count
    return found


def _distinct_inputs(space: SearchSpace, block: OpGraph, name: str) -> int:
    """How many different tensors the calls of a class pass as one input: rotary tables are one for all layers."""
    slot = block.inputs.index(name)
    calls = [c for c in space.model.outer.calls if c.block == block.name and c.phase == "forward"]
    return len({c.inputs[slot] for c in calls})
