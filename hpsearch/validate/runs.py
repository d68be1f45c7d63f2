"""Measured runs of one cluster, from a JSON-lines file: published rows, or a short form for one's own.

The short form: {"model": "config.json", "seq_len": 4096, "global_batch": 512, "devices": 64, "layout":
"tp=8,pp=2,micro_batch=1", "precision": "bf16", "step_s": 3.2, "name": "monday"}; precision and name may be left out,
the path of the config is relative to the file, and the layout has the names of `hpsearch estimate --fix`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import device_kind
from hpsearch.errors import HpsearchError, PlanError
from hpsearch.estimate import ModelShape, Priced, price, shape_of_graph
from hpsearch.estimate.pins import check_device, check_shape, layout_of
from hpsearch.graph import ModelGraph, store
from hpsearch.validate.entry import wrong
from hpsearch.validate.predict import cases
from hpsearch.validate.rows import Case, Row, step_seconds

RECIPE = "bf16"
"""Shapes do not depend on it."""
MARKS = ("parallel", "hardware")
"""Fields by which a line is a published row."""
FIELDS = (
    "id", "family", "source", "tier", "kind", "workload", "model", "parallel", "hardware", "precision", "seq_len",
    "result", "derived",
)  # fmt: skip
"""Of a published row: those that predicting it reads."""
Count = Annotated[int, Field(strict=True, ge=1)]


class RunEntry(BaseModel):
    """One line of the short form."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str
    seq_len: Count
    global_batch: Count
    devices: Count
    layout: str
    precision: str = "bf16"
    step_s: Annotated[float, Field(strict=True, gt=0, lt=float("inf"))]
    name: str = ""


@dataclass(frozen=True)
class Run:
    """One measured step, priced on the cluster."""

    name: str
    line: int
    priced: Priced
    seconds: float


@dataclass(frozen=True)
class Runs:
    used: tuple[Run, ...]
    left_out: tuple[tuple[int, str], ...]
    """Lines of published rows that say nothing about the cluster, and why."""


def read_runs(path: Path, cluster: str) -> Runs:
    """The runs of a file, priced on the cluster of that name or path.

    PlanError: no such file, none of its lines is of use, or a line that cannot be used, with its number. Published rows
    without a step time, of another device, or that cannot be predicted are left out with the reason.
    """
    used: list[Run] = []
    rows: list[tuple[int, Row]] = []
    left_out: list[tuple[int, str]] = []
    lines = _lines(path)
    published = [number for number, content in lines if all(mark in content for mark in MARKS)]
    device = Cluster.load(cluster, devices=1).device.name if published else ""
    for number, content in lines:
        if number not in published:
            used.append(_short(path, number, content, cluster))
        elif why := _unfit(path, number, content, device):
            left_out.append((number, why))
        else:
            rows.append((number, content))
    for (number, _), (_, case) in zip(rows, cases(row for _, row in rows), strict=True):
        found = _published(number, case, cluster)
        if isinstance(found, str):
            left_out.append((number, found))
        else:
            used.append(found)
    if not used:
        reasons = "; ".join(dict.fromkeys(why for _, why in left_out))
        raise PlanError(str(path), f"expected runs of {device}, but none of {len(left_out)} rows is: {reasons}", "")
    return Runs(tuple(sorted(used, key=lambda run: run.line)), tuple(sorted(left_out)))


def _lines(path: Path) -> list[tuple[int, Mapping[str, Any]]]:
    if not path.is_file():
        raise PlanError(str(path), "expected a file of measured runs, one JSON object a line, but found none", "")
    found: list[tuple[int, Mapping[str, Any]]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            raise PlanError(f"{path}, line {number}", f"expected one JSON object, but {error}", "") from error
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise PlanError(f"{path}, line {number}", f"expected a JSON object, but found a {kind}", "")
        found.append((number, content))
    if not found:
        raise PlanError(str(path), "expected measured runs, one JSON object a line, but the file is empty", "")
    return found


def _short(path: Path, number: int, content: Mapping[str, Any], cluster: str) -> Run:
    """A line of the short form, whose model is captured unless it was before."""
    at = f"{path}, line {number}"
    try:
        entry = RunEntry.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PlanError(f"{at}, {'.'.join(map(str, first['loc']))}", _complaint(dict(first)), "") from error
    pins: dict[str, str] = {}
    for word in (piece.strip() for piece in entry.layout.split(",") if piece.strip()):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or name in pins:
            raise PlanError(f"{at}, layout", f"expected name=value, each name once, but found {word!r}", "")
        pins[name] = value
    try:
        layout = layout_of(
            {"precision": entry.precision, **pins}, devices=entry.devices, global_batch=entry.global_batch,
            seq_len=entry.seq_len,
        ).layout  # fmt: skip
        shape = _shape(path.parent / entry.model, entry.seq_len)
        check_shape(shape, layout)
        machine = Cluster.load(cluster, devices=entry.devices)
        check_device(machine.device, layout)
        priced = price(shape, layout, machine)
    except HpsearchError as error:
        raise PlanError(at, str(error), "") from error
    return Run(entry.name or f"line {number}", number, priced, entry.step_s)


def _complaint(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return f"expected this field, but found only {', '.join(error['input'])}"
    if error["type"] == "extra_forbidden":
        return f"expected one of {', '.join(RunEntry.model_fields)}, but found another name"
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}, but found {error['input']!r}"


@cache
def _shape(config: Path, seq_len: int) -> ModelShape:
    graph = store.load_graph(store.config_key(store.read_config(config), seq_len, RECIPE))
    if graph is None:
        from hpsearch.capture import capture_config

        found: ModelGraph = capture_config(config, seq_len=seq_len, recipe=RECIPE).graph
        graph = found
    return shape_of_graph(graph)


def _unfit(path: Path, number: int, row: Row, device: str) -> str | None:
    """Why a published row says nothing about this device; PlanError for what is no such row."""
    missing = [name for name in FIELDS if name not in row]
    if missing:
        raise PlanError(f"{path}, line {number}", f"expected a published row, but {', '.join(missing)} is missing", "")
    if (why := wrong(row)) is not None:
        raise PlanError(f"{path}, line {number}", why, "")
    if row["result"]["status"] != "ok" or step_seconds(row) is None:
        return "no completed run with a step time"
    kind, wanted = device_kind(str(row["hardware"]["device"])), device_kind(device)
    return None if kind == wanted else f"a run of {kind}, not of {wanted}"


def _published(number: int, case: Case | str, cluster: str) -> Run | str:
    """A row on this cluster, whatever network the row says it had."""
    if isinstance(case, str):
        return case
    try:
        priced = price(case.shape, case.layout, Cluster.load(cluster, devices=case.layout.devices))
    except HpsearchError as error:
        return str(error)
    seconds = case.measured_s
    assert seconds is not None, "rows without a step time are left out before"
    return Run(str(case.row["id"]), number, priced, seconds)
