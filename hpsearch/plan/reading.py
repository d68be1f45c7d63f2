"""From the bytes of a plan file to a `PlanFile`, or one `PlanError` that names the place and the first fault.

Stricter than JSON readers usually are: no duplicate keys (the later would win silently), no NaN or Infinity, no
unknown keys, no numbers written as strings.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from pydantic import ValidationError

from hpsearch.errors import PlanError
from hpsearch.plan.schema import SCHEMA, PlanFile

REWRITE = "Write it again with `hpsearch plan`."


def read_plan(content: bytes, subject: str) -> PlanFile:
    """The plan in `content`; `subject` is the file's name for messages. Checks form, not sense (see legality.py)."""
    tree = _parse(content, subject)
    _check_schema(tree, subject)
    try:
        return PlanFile.model_validate_json(content)
    except ValidationError as error:
        raise _first_fault(error, subject) from None


def _parse(content: bytes, subject: str) -> object:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(subject, f"expected UTF-8 text, but byte {error.start} is none", REWRITE) from None
    if not text.strip():
        raise PlanError(subject, "expected a plan, but the file is empty", REWRITE)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise PlanError(subject, f"key {twice!r} stands twice in one object", "Delete one of the two.")
        return seen

    def finite(token: str) -> float:
        value = float(token)
        if value in (float("inf"), float("-inf")):
            raise PlanError(subject, f"expected finite numbers, but found {token} {_where(text, token)}", REWRITE)
        return value

    def refuse(token: str) -> NoReturn:
        raise PlanError(subject, f"expected finite numbers, but found {token} {_where(text, token)}", REWRITE)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=refuse)
    except json.JSONDecodeError as error:
        at = f"at line {error.lineno}, column {error.colno}"
        truncated = " (the file seems to be cut off)" if error.pos >= len(text.rstrip()) - 1 else ""
        raise PlanError(subject, f"expected JSON, but {_lower(error.msg)} {at}{truncated}", REWRITE) from None
    except (RecursionError, ValueError) as error:
        raise PlanError(subject, f"expected a plan, but the JSON cannot be read: {error}", REWRITE) from None


def _where(text: str, token: str) -> str:
    """Line and column of the first `token` that stands as a value of its own."""
    at = next((i for i in _occurrences(text, token) if text[i - 1 : i] in ' \t\n\r:,["'), -1)
    line = text.count("\n", 0, at) + 1
    return f"at line {line}, column {at - text.rfind(chr(10), 0, at)}"


def _occurrences(text: str, token: str) -> list[int]:
    found, at = [], text.find(token)
    while at >= 0:
        found.append(at)
        at = text.find(token, at + 1)
    return found


def _check_schema(tree: object, subject: str) -> None:
    if not isinstance(tree, dict):
        raise PlanError(subject, f"expected a JSON object, but found {_kind(tree)}", REWRITE)
    version = tree.get("schema_version")
    if version is None:
        raise PlanError(subject, f"expected key schema_version with {SCHEMA!r}, but it is missing", REWRITE)
    if version == SCHEMA:
        return
    name, _, number = str(version).rpartition("/")
    known = SCHEMA.rpartition("/")
    if name == known[0] and number.isdigit() and int(number) > int(known[2]):
        remedy = "Update hpsearch, or write the plan again with this version."
        raise PlanError(subject, f"expected schema {SCHEMA}, but found the newer {version}", remedy)
    if name == known[0] and number.isdigit():
        raise PlanError(subject, f"expected schema {SCHEMA}, but found the older {version}", REWRITE)
    raise PlanError(subject, f"expected schema {SCHEMA}, but found {version!r}", "Is this a plan file?")


def _first_fault(error: ValidationError, subject: str) -> PlanError:
    faults = error.errors(include_url=False)
    fault = faults[0]
    place = _place(fault["loc"])
    more = f" ({len(faults) - 1} more after this one)" if len(faults) > 1 else ""
    if fault["type"] == "extra_forbidden":
        return PlanError(subject, f"unknown key {place}{more}", f"Delete it; schema {SCHEMA} does not have it.")
    if fault["type"] == "missing":
        return PlanError(subject, f"key {place} is missing{more}", REWRITE)
    expected = _lower(fault["msg"].removeprefix("Input should be "))
    problem = f"{place}: expected {expected}, but found {_kind(fault['input'])}{more}"
    return PlanError(subject, problem, "Correct it there, or write the plan again with `hpsearch plan`.")


def _place(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    return repr(value)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
