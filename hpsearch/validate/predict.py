"""A file of rows to predictions and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hpsearch.errors import HpsearchError, PlanError
from hpsearch.estimate import estimate
from hpsearch.validate.rows import Case, Row, case
from hpsearch.validate.score import Predicted
from hpsearch.validate.shapes import shapes_of_rows


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON-lines file. PlanError: no such file, or a line that is not a row."""
    if not path.is_file():
        raise PlanError(str(path), "expected a file of published rows, one JSON object a line, but found none", "")
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise PlanError(f"{path}, line {number}", f"expected one JSON object, but {error}", "") from error
    return rows


def cases(rows: Iterable[Row]) -> Iterator[tuple[Row, Case | str]]:
    """Each row as a case, its model captured; or one line that says why it cannot be predicted."""
    listed = list(rows)
    shapes = shapes_of_rows(listed)
    for row in listed:
        yield row, case(row, shapes[str(row["id"])])


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
