"""What one micro-batch keeps for its backward, and what is there all the time without being trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpsearch.cost.job import Job
from hpsearch.cost.offload import STAGED, moved
from hpsearch.cost.op_time import Floats, NodeKey, local_elements
from hpsearch.graph import ITEM_BYTES, OpGraph
from hpsearch.layout import Mesh
from hpsearch.strategy import SearchSpace


@dataclass(frozen=True)
class _Kept:
    """A tensor that a call of a graph keeps for backward."""

    key: NodeKey
    nbytes: Floats
    """On a device, by the state of the node that makes it."""
    times: int
    """How many of them one micro-batch has on the device."""
    moves: bool
    """Whether it waits in host memory."""


def saved_bytes(space: SearchSpace, job: Job, mesh: Mesh) -> dict[NodeKey, Floats]:
    """Bytes that one micro-batch keeps for its backward, by the node that makes them and its state.

    A recomputed block keeps its inputs for every instance and everything else for one at a time; of what is offloaded
    two instances are on the device.
    """
    found: dict[NodeKey, Floats] = {}
    for kept in _kept(space, job, mesh):
        found[kept.key] = found.get(kept.key, np.zeros(len(kept.nbytes))) + kept.nbytes * kept.times
    return found


def staged_bytes(space: SearchSpace, job: Job, mesh: Mesh) -> dict[NodeKey, Floats]:
    """The part of `saved_bytes` that is on its way to host memory or back."""
    found: dict[NodeKey, Floats] = {}
    for kept in _kept(space, job, mesh):
        if kept.moves:
            found[kept.key] = found.get(kept.key, np.zeros(len(kept.nbytes))) + kept.nbytes * kept.times
    return found


def moved_bytes(space: SearchSpace, job: Job, mesh: Mesh) -> dict[NodeKey, Floats]:
    """Bytes that one call sends to host memory in forward, and gets back in backward, by the node that makes them."""
    found: dict[NodeKey, Floats] = {}
    for kept in _kept(space, job, mesh):
        if kept.moves:
            found[kept.key] = found.get(kept.key, np.zeros(len(kept.nbytes))) + kept.nbytes
    return found


def _kept(space: SearchSpace, job: Job, mesh: Mesh) -> Iterator[_Kept]:
    rows = job.micro_rows()
    for graph, count in space.model.pieces():
        inputs, again = set(graph.inputs), graph.name in job.recompute
        names = dict.fromkeys(graph.storage(v) for v in graph.saved)
        if again:
            names |= dict.fromkeys(graph.inputs)
        gone = moved(space.model, graph, recompute=again) if graph.name in job.offload else frozenset()
        params = set(graph.params.values())
        for name in names:
            if name in params:
                continue
            value = graph.values[name]
            step = graph.producer.get(name)
            node = space.nodes.get((graph.name, step.name if step else name))
            if node is None:  # made by a call: the block's own output, counted where it is the next block's input
                continue
            times = count if name in inputs or not again else 1
            if name in inputs and graph is not space.model.outer:
                times = _distinct_inputs(space, graph, name)
            cuts = space.cuts(graph.name, name, mesh)
            slot = step.outputs.index(name) if step else 0
            nbytes = [
                local_elements(value, rows, (*cuts, (space.tp, tp))) * ITEM_BYTES[value.dtype]
                for tp in node.given(slot)
            ]
            moves = name in gone
            times = min(STAGED, times) if moves else times
            yield _Kept(node.key, np.array(nbytes, dtype=np.float64), times, moves)


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
