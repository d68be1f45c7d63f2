"""What changed between two plans, the decisions before the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.text import Text

from hpsearch.plan import tables, units
from hpsearch.plan.plan import Plan
from hpsearch.plan.schema import CollectiveEntry

Row = tuple[str, str, str]
"""Field, this plan, the other plan."""
ABSENT = "-"


def diff(plan: Plan, other: Plan) -> Group:
    """`--diff G`: two columns, only what differs."""
    if plan == other:
        return Group(Text("The two plans are equal, byte for byte."))
    parts: list[RenderableType] = []
    sections = (
        ("Model, cluster and job", head_rows(plan, other)),
        ("Pipeline", _keyed(pipeline_fields(plan), pipeline_fields(other))),
        ("Parameters", parameter_rows(plan, other)),
        ("Operations", placement_rows(plan, other)),
        ("Collectives of one step on one rank", collective_rows(plan, other)),
        ("Predicted", predicted_rows(plan, other)),
    )
    for title, rows in sections:
        found = list(rows)
        if found:
            table = tables.table(title, "field", "this plan", "other plan")
            for row in found:
                table.add_row(*row)
            parts.append(table)
    if not parts:
        parts.append(Text("The decisions and predictions agree; only the certificate or the versions differ."))
    return Group(*parts)


def head_rows(plan: Plan, other: Plan) -> Iterator[Row]:
    if plan.layout_text != other.layout_text or plan.mesh != other.mesh:
        yield "mesh", plan.layout_text, other.layout_text
    for name in ("model", "cluster", "job"):
        yield from _fields(name, getattr(plan.file, name), getattr(other.file, name))
    yield from _keyed(
        {f"input {i.name}": f"{list(i.shape)} {i.layout}" for i in plan.file.inputs},
        {f"input {i.name}": f"{list(i.shape)} {i.layout}" for i in other.file.inputs},
    )


def pipeline_fields(plan: Plan) -> dict[str, str]:
    """Kind, actions and stages; nothing without a pipeline."""
    entry = plan.file.pipeline
    if entry is None:
        return {}
    found = {"schedule": entry.kind}
    found |= {f"actions of rank {rank}": text for rank, text in enumerate(entry.actions)}
    found |= {f"blocks of stage {n}": f"{len(s.blocks)}: {', '.join(s.blocks)}" for n, s in enumerate(entry.stages)}
    return found


def parameter_rows(plan: Plan, other: Plan) -> Iterator[Row]:
    ours = {p.pattern: p for p in plan.file.parameters}
    theirs = {p.pattern: p for p in other.file.parameters}
    for pattern in _both(list(ours), list(theirs)):
        a, b = ours.get(pattern), theirs.get(pattern)
        if a is None or b is None:
            yield pattern, ABSENT if a is None else a.stored, ABSENT if b is None else b.stored
        else:
            yield from _fields(pattern, a, b)


def placement_rows(plan: Plan, other: Plan) -> Iterator[Row]:
    def flat(of: Plan) -> dict[str, str]:
        return {
            f"{graph}/{step} {axis}": rule
            for graph, steps in of.file.placements.items()
            for step, rules in steps.items()
            for axis, rule in rules.items()
        }

    yield from _keyed(flat(plan), flat(other))


def collective_rows(plan: Plan, other: Plan) -> Iterator[Row]:
    def total(entries: Sequence[CollectiveEntry]) -> dict[str, str]:
        sums: dict[str, tuple[int, int]] = {}
        for e in entries:
            calls, nbytes = sums.get(key := f"{e.phase} {e.kind} over {e.axis}", (0, 0))
            sums[key] = (calls + e.calls, nbytes + e.calls * e.nbytes)
        return {key: f"{calls} calls, {units.size(nbytes)}" for key, (calls, nbytes) in sums.items()}

    yield from _keyed(total(plan.file.collectives), total(other.file.collectives))


def predicted_rows(plan: Plan, other: Plan) -> Iterator[Row]:
    ours, theirs = plan.file.predicted, other.file.predicted
    for name in ("step_s", "compute_s", "communication_s", "exposed_s"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            yield name.removesuffix("_s"), units.seconds(a), f"{units.seconds(b)}{_ratio(a, b)}"
    for name in _both(list(ours.bytes), list(theirs.bytes)):
        a, b = ours.bytes.get(name, 0), theirs.bytes.get(name, 0)
        if a != b:
            yield f"{name} bytes", units.size(a), f"{units.size(b)}{_ratio(a, b)}"
    if ours.peak_bytes != theirs.peak_bytes:
        ratio = _ratio(ours.peak_bytes, theirs.peak_bytes)
        yield "peak bytes", units.size(ours.peak_bytes), f"{units.size(theirs.peak_bytes)}{ratio}"


def _ratio(ours: float, theirs: float) -> str:
    return f" (x {theirs / ours:.3g})" if ours else ""


def _fields(prefix: str, ours: BaseModel, theirs: BaseModel) -> Iterator[Row]:
    for name in type(ours).model_fields:
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            yield f"{prefix}.{name}", str(a), str(b)


def _keyed(ours: dict[str, str], theirs: dict[str, str]) -> Iterator[Row]:
    for key in _both(list(ours), list(theirs)):
        a, b = ours.get(key, ABSENT), theirs.get(key, ABSENT)
        if a != b:
            yield key, a, b


def _both(ours: list[str], theirs: list[str]) -> list[str]:
    return list(dict.fromkeys([*ours, *theirs]))
