"""Calls of attention over cut sequences, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpsearch.graph import Op
from hpsearch.layout import EXCHANGES, Mesh, MeshAxis
from hpsearch.lower.render import render
from hpsearch.lower.statement import LocalValue, Sent
from hpsearch.plan.decisions import GraphDecisions
from hpsearch.strategy import attention_messages, is_attention

CONTEXT_FUNCTIONS = ("Context", *(f"{kind}_attention{half}" for kind in EXCHANGES for half in ("", "_backward")))
"""Names that such calls use."""


def context_axis(decisions: GraphDecisions, op: Op, mesh: Mesh) -> MeshAxis | None:
    """The axis that cuts the sequences of an attention; None for other ops, and where nothing does."""
    axis = next((a for a in mesh.axes if a.exchange), None)
    if axis is None or not is_attention(op):
        return None
    return axis if decisions.reads(op)[0].layout[axis.name].is_shard else None


def context_call(axis: MeshAxis, op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh) -> str:
    """`ring_attention(q, k, v, 0.0, True, context=Context(groups["cp"], coordinate["cp"], 2, True), scale=0.5)`."""
    place = f'Context(groups["{axis.name}"], coordinate["{axis.name}"], {axis.size}, {mesh.head_tail})'
    words = [*map(render, args), f"context={place}", *(f"{key}={render(value)}" for key, value in kwargs.items())]
    half = "" if op.phase == "forward" else "_backward"
    return f"{axis.exchange}_attention{half}({', '.join(words)})"


def context_sent(decisions: GraphDecisions, op: Op, query: LocalValue, mesh: Mesh) -> tuple[Sent, ...]:
    """What the call sends; `query` tells the rows of the batch."""
    value = decisions.graph.values[op.inputs[0]]
    rows = next(((s - f) // p for s, f, p in zip(query.shape, value.fixed, value.per_row, strict=True) if p), 0)
    layouts = [read.layout for read in decisions.reads(op)]
    what = f"{decisions.graph.name}/{op.name}"
    messages = attention_messages(decisions.graph, op, layouts, rows, mesh) or ()
    return tuple(Sent(c.kind, c.axis, what, dtype, c.nbytes) for c, dtype in messages)
