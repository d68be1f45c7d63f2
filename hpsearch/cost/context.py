"""Seconds that an attention over a cut sequence waits for other ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpsearch.cost.job import Job
from hpsearch.cost.op_time import Floats, NodeKey
from hpsearch.graph import Op
from hpsearch.layout import ROLES, Collective, Layout, Mesh, Placement
from hpsearch.strategy import SearchSpace, attention_messages, is_attention


def attention_layouts(space: SearchSpace, key: NodeKey, op: Op, mesh: Mesh, state: int) -> list[Layout]:
    """How the operands of an op lie in one of its states."""
    free = space.nodes[key].rules[state][0]

    def on(axis: str, operand: int) -> Placement:
        rule = free if axis == "tp" else space.followed[ROLES[axis]][key[0]].rules[op.name][0]
        return Placement.parse(rule[operand])

    return [Layout(tuple((axis, on(axis, i)) for axis in mesh.names)) for i in range(len(op.inputs))]


def exchanged_bytes(space: SearchSpace, key: NodeKey, mesh: Mesh, job: Job, state: int) -> int:
    """Bytes that an attention over a cut sequence holds beside its operands and results while it runs.

    Gathered and exchanged tensors all live until it ends. A ring has two blocks and, in backward, three sums of their
    gradients: its own, one that came and one that leaves.
    """
    op = space.graphs[key[0]].step(key[1])
    axis = next((a for a in mesh.axes if a.exchange), None)
    if axis is None or not isinstance(op, Op) or not is_attention(op):
        return 0
    layouts = attention_layouts(space, key, op, mesh, state)
    sizes = [c.nbytes for c, _ in attention_messages(space.graphs[key[0]], op, layouts, job.micro_rows(), mesh) or ()]
    if axis.exchange != "ring" or not sizes:
        return sum(sizes)
    return 2 * sizes[0] + (3 * sizes[-1] if op.phase == "backward" else 0)


def exchange_s(
    space: SearchSpace,
    key: NodeKey,
    compute_s: Floats,
    mesh: Mesh,
    job: Job,
    eta: float,
    on_path_s: Callable[[tuple[Collective, ...]], float],
) -> Floats | float:
    """Seconds of one run, by state; infinite where heads cannot be exchanged.

    A ring works at one block while the next is on its way, of `compute_s` all but the last block; `eta`: the share of
    what is covered that really is.
    """
    axis = next((a for a in mesh.axes if a.exchange), None)
    op = space.graphs[key[0]].step(key[1])
    if axis is None or not isinstance(op, Op) or not is_attention(op):
        return 0.0
    found = []
    for state in range(len(space.nodes[key].rules)):
        layouts = attention_layouts(space, key, op, mesh, state)
        messages = attention_messages(space.graphs[key[0]], op, layouts, job.micro_rows(), mesh)
        if messages is None:
            found.append(np.inf)
            continue
        seconds = on_path_s(tuple(collective for collective, _ in messages))
        if axis.exchange == "ring":
            seconds -= eta * min(seconds, float(compute_s[state]) * (axis.size - 1) / axis.size)
        found.append(seconds)
    return np.array(found)
