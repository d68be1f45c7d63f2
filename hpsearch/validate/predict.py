"""A file of rows to predictions and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpsearch.errors import HpsearchError, PlanError
from hpsearch.estimate import estimate
from hpsearch.validate.entry import wrong
from hpsearch.validate.rows import Case, Row, case
from hpsearch.validate.score import Predicted
from hpsearch.validate.shapes import shapes_of_rows


def read_rows(path: Path) -> tuple[list[Row], dict[str, str]]:
    """The rows of a JSON-lines file, and for each line that is no such row its number and why.

    A row without an id, or with one that another row has, gets its line number in it. PlanError: no such file, no text,
    or no line in it.
    """
    if not path.is_file():
        raise PlanError(str(path), "expected a file of published rows, one JSON object a line, but found none", "")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(str(path), f"expected a text file of JSON objects, but {error}", "") from error
    rows: dict[str, Row] = {}
    refused: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row, why = _read(line)
        if why is not None:
            refused[f"line {number}"] = why
            continue
        name = str(row.get("id") or f"line {number}")
        name = f"{name} (line {number})" if name in rows else name
        rows[name] = row | {"id": name}
    if not rows and not refused:
        raise PlanError(str(path), "expected published rows, one JSON object a line, but the file is empty", "")
    return list(rows.values()), refused


def _read(line: str) -> tuple[dict[str, Any], str | None]:
    """One line: its row, or why it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"expected one JSON object, but {error}"
    why = wrong(row)
    return ({}, why) if why is not None else (row, None)


def cases(rows: Iterable[Row]) -> Iterator[tuple[Row, Case | str]]:
    """Each row as a case, its model captured; or one line that says why it cannot be predicted."""
    listed = list(rows)
    for row, shape in zip(listed, shapes_of_rows(listed), strict=True):
        yield row, case(row, shape)


def predict(rows: Iterable[Row]) -> tuple[Sequence[Predicted], dict[str, str]]:
    """Predictions, and for each row without one its id and why."""
    found, refused = [], {}
    for row, one in cases(rows):
        if isinstance(one, str):
            refused[str(row["id"])] = one
            continue
        try:
            found.append(Predicted(one, estimate(one.shape, one.layout, one.cluster)))
        except HpsearchError as error:
            refused[str(row["id"])] = str(error)
    return found, refused
