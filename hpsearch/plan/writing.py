"""The canonical bytes of a plan: equal plans, equal bytes, and a text that people can read and compare line by line."""

from __future__ import annotations

import json

from hpsearch.errors import InternalError
from hpsearch.plan.schema import PlanFile

WIDTH = 120
"""A list or object that fits into so many columns stands on one line."""


def write_plan(plan: PlanFile) -> bytes:
    """JSON with sorted keys, floats as Python's shortest round-trip text, UTF-8, one newline at the end."""
    return (render(plan.model_dump(mode="json", exclude_none=True)) + "\n").encode("utf-8")


def render(tree: object, indent: str = "") -> str:
    """JSON of `tree`, nested only as deep as the line width asks for. Raises InternalError for NaN and Infinity."""
    try:
        flat = json.dumps(tree, sort_keys=True, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise InternalError("plan", f"a number in it is not finite ({error})", "Please report this.") from None
    if len(indent) + len(flat) <= WIDTH or not isinstance(tree, (dict, list)):
        return flat
    inner = indent + "  "
    if isinstance(tree, list):
        rows = [render(item, inner) for item in tree]
    else:
        rows = [f"{json.dumps(key, ensure_ascii=False)}: {render(tree[key], inner)}" for key in sorted(tree)]
    opening, closing = "[]" if isinstance(tree, list) else "{}"
    return opening + "\n" + ",\n".join(inner + row for row in rows) + "\n" + indent + closing
