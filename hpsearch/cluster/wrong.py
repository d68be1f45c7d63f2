"""Schema errors in our own words: a missing field, an unknown one, a wrong type."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from hpsearch.cluster import schema
from hpsearch.cluster.units import Complaint

_TABLES: dict[tuple[str, ...], type[BaseModel]] = {
    (): schema.ClusterFile,
    ("device",): schema.DeviceEntry,
    ("device", "matmul"): schema.MatmulEntry,
    ("tiers",): schema.TierEntry,
    ("groups",): schema.GroupEntry,
    ("tiers", "collectives"): schema.CurveEntry,
    ("tiers", "protocols"): schema.ProtocolEntry,
    ("tiers", "switches"): schema.SwitchesEntry,
    ("tiers", "switch_tree"): schema.SwitchTreeEntry,
}
_NUMBER = 'a table { value = …, unit = "…", kind = "…", source = "…" }'


def complaints_of_schema(error: ValidationError) -> list[Complaint]:
    """One complaint for each error pydantic found."""
    return [_complaint(dict(item)) for item in error.errors(include_url=False)]


def _complaint(item: dict[str, Any]) -> Complaint:
    path = tuple(item["loc"])
    found, kind, allowed = item["input"], item["type"], item.get("ctx", {})
    if kind == "missing":
        return Complaint(path, "expected this field, but it is missing", _how_to_write(path))
    if kind == "extra_forbidden":
        return Complaint(path, "expected a known field, but found another name", _nearest(path))
    if path == ("device",) and isinstance(found, list):
        return Complaint(
            path, f"expected one [device], but found {len(found)} [[device]] tables",
            "Describe the best of them, and as [[groups]] the nodes that have less memory or speed.",
        )  # fmt: skip
    if kind == "model_type":
        return Complaint(
            path, f"expected {_NUMBER}, but found {found!r}", "Every number states its unit and its source."
        )
    if kind == "literal_error":
        return Complaint(path, f"expected {allowed['expected']}, but found {found!r}", "Write one of these.")
    if kind == "greater_than_equal":
        return Complaint(path, f"expected {allowed['ge']} or more, but found {found!r}", "Correct the number.")
    if kind == "too_short":
        return Complaint(path, "expected at least one [[tiers]] table, but found none", "Describe the links of a node.")
    return Complaint(path, f"{item['msg'][:1].lower()}{item['msg'][1:]}, but found {found!r}", "Correct its type.")


def _how_to_write(path: tuple[str | int, ...]) -> str:
    name = path[-1]
    if path == ("tiers",):
        return "Describe each level of links, inner first, as a [[tiers]] table."
    if name in ("value", "unit", "kind", "source"):
        return f"Every number is {_NUMBER}."
    return f"Add {name} = …."


def _nearest(path: tuple[str | int, ...]) -> str:
    """What the unknown name may have meant."""
    table = tuple(part for part in path[:-1] if isinstance(part, str))
    model = _TABLES.get(table, schema.EfficiencyEntry if table[:1] == ("efficiency",) else schema.Number)
    known = list(model.model_fields)
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known here: {', '.join(known)}."
