"""Is this value the number of valid targets in a tensor of the batch? Then a batch can be checked before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from hpsearch.graph import Op, OpGraph, Targets

IGNORE_INDEX = -100
"""Label of a target that does not count, torch's default in cross_entropy and Hugging Face's everywhere."""

_ALIKE = (
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.clone.default",
    "aten.alias.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.transpose.int", "aten.permute.default",
)  # fmt: skip
"""Ops that keep every element."""
_PLAIN = ("aten.clone.default", "aten.alias.default")
_END = 2**62


def counted_targets(graph: OpGraph, nodes: Mapping[str, fx.Node], value: str) -> Targets | None:
    """The leaf whose labels other than -100 `value` counts; None where it is anything else.

    Followed are casts, a sum over everything, `!= -100`, views, and labels shifted along the last dim.
    """
    step = _producer(graph, value)
    while step is not None and step.target == "aten._to_copy.default":
        step = _producer(graph, step.inputs[0])
    if step is None or step.target != "aten.sum.default":
        return None
    step = _producer(graph, step.inputs[0])
    if step is None or step.target != "aten.ne.Scalar" or nodes[step.name].args[1] != IGNORE_INDEX:
        return None
    name = step.inputs[0]
    while (step := _producer(graph, name)) is not None and step.target in _ALIKE:
        name = step.inputs[0]
    skipped = 0
    while (step := _producer(graph, name)) is not None:
        taken = _skips(graph, step, nodes[step.name])
        if taken is None or (taken and skipped):
            return None
        skipped, name = skipped + taken, step.inputs[0]
    leaf = graph.values[name]
    is_labels = leaf.role == "input" and leaf.batch_dims and "int" in leaf.dtype
    return Targets(name, skipped) if is_labels else None


def _producer(graph: OpGraph, value: str) -> Op | None:
    step = graph.producer.get(value)
    return step if isinstance(step, Op) else None


def _skips(graph: OpGraph, step: Op, node: fx.Node) -> int | None:
    """How many first labels of the last dim an op leaves out; 0 for one that adds ignored labels at the end."""
    args: Any = node.args
    source = graph.values[step.inputs[0]]
    rank = len(source.fixed)
    if step.target in _PLAIN:
        return 0
    if step.target == "aten.constant_pad_nd.default":
        is_at_end = len(args[1]) == 2 and args[1][0] == 0 and args[1][1] >= 0
        return 0 if is_at_end and args[2:] == (IGNORE_INDEX,) and not source.per_row[-1] else None
    if step.target == "aten.slice.Tensor":
        dim, start, end, pace = (*args[1:], *(0, 0, _END, 1)[len(args) - 1 :])
        is_tail = dim % rank == rank - 1 and end >= min(source.fixed[-1], _END) and pace == 1 and start >= 0
        return int(start) if is_tail and not source.per_row[-1] else None
    return None
