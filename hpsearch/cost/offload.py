"""Activations that wait in host memory: which values of a block class move, and how many of its calls move theirs.

A tensor leaves the device only if nobody else needs it there: what several calls read (rotary tables, masks), or what
other steps read, stays. At most two calls have theirs on the device: one runs forward while those of the one before it
are on their way out, one runs backward while those of the next are on their way back. So the last two calls of a
micro-batch, which run backward first, need not move at all, unless other micro-batches come in between (a pipeline).
"""

from __future__ import annotations

from hpsearch.cost.job import Job
from hpsearch.graph import Call, ModelGraph, OpGraph
from hpsearch.graph.routed import ROUTE

STAGED = 2
"""Calls of a class whose activations may be on the device at once."""


def moved(model: ModelGraph, block: OpGraph, *, recompute: bool) -> frozenset[str]:
    """Values of `block` that own the memory of what moves: what its forward keeps, or its inputs under recompute."""
    kept = set(block.inputs) if recompute else {block.storage(v) for v in block.saved}
    alone = _read_once(model, block.name)
    inputs = {name for slot, name in enumerate(block.inputs) if slot not in alone}
    ways = {op.outputs[0] for op in block.ops if op.target == ROUTE}  # of tokens to experts: no tensors, and small
    return frozenset(kept - inputs - ways - set(block.params.values()) - set(block.buffers.values()))


def _read_once(model: ModelGraph, block: str) -> set[int]:
    """Slots of a block's inputs that get a tensor of its own in every call, which nothing else reads."""
    outer = model.outer
    readers: dict[str, int] = {}
    for step in outer.steps:
        for value in step.inputs:
            readers[outer.storage(value)] = readers.get(outer.storage(value), 0) + 1
    given = {outer.storage(v) for v in (*outer.inputs, *outer.outputs, *outer.params.values(), *outer.buffers.values())}
    calls = [s for s in outer.steps if isinstance(s, Call) and s.block == block and s.phase == "forward"]
    slots = range(len(model.blocks[block].inputs)) if calls else range(0)
    return {
        slot
        for slot in slots
        if all(
            readers[outer.storage(c.inputs[slot])] == 1 and outer.storage(c.inputs[slot]) not in given for c in calls
        )
    }


def moving_calls(count: int, job: Job) -> int:
    """How many of the `count` calls of an offloaded class move their activations, in one micro-batch."""
    return count if job.pipelined else max(0, count - STAGED)
