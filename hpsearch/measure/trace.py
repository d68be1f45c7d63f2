"""Collectives and matmuls out of a PyTorch profiler trace (`torch.profiler.profile(record_shapes=True)`, chrome JSON).

Collectives are kernels that carry what Kineto notes of NCCL (`Collective name`, `In msg nelems`, `Out msg nelems`,
`dtype`, `Group size`, `Process Group Ranks`). Such a kernel runs from the moment its rank arrives until the last rank
has: the shortest of all calls alike is the collective, the rest of the others is waiting. Matmuls are operators with
their shapes; their seconds are those of the kernels they launched, or their own in a trace without a device.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from hpsearch.errors import ClusterError
from hpsearch.measure.figures import CurveFigure, MatmulFigure

_KINDS = (
    ("reduce_scatter", ("reduce_scatter", "reducescatter")),
    ("all_gather", ("all_gather", "allgather")),
    ("all_reduce", ("all_reduce", "allreduce")),
    ("all_to_all", ("all_to_all", "alltoall")),
    ("broadcast", ("broadcast",)),
)
_ITEM_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip
_DTYPES = {
    "float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
}  # fmt: skip
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::_scaled_mm": (0, 1)}
"""Operator → places of its two factors among its inputs."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class TraceFigures:
    curves: tuple[CurveFigure, ...]
    matmuls: tuple[MatmulFigure, ...]


def read_trace(path: Path) -> TraceFigures:
    """The collectives and matmuls of one trace. ClusterError when it is no trace, or has neither."""
    content = path.read_bytes()
    try:
        found = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        events = [e for e in (found["traceEvents"] if isinstance(found, dict) else found) if e.get("ph") == "X"]
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise ClusterError(str(path), f"expected a chrome trace of torch.profiler, but {error!r}", "") from error
    figures = TraceFigures(_curves(events), _matmuls(events))
    if not figures.curves and not figures.matmuls:
        raise ClusterError(
            str(path), f"expected NCCL kernels or matmuls with their shapes, but found none among {len(events)} events",
            "Record it with torch.profiler.profile(record_shapes=True).",
        )  # fmt: skip
    return figures


def _curves(events: Iterable[Event]) -> tuple[CurveFigure, ...]:
    best: dict[tuple[str, int, int], dict[int, float]] = {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") != "kernel" or "Collective name" not in args:
            continue
        kind = _kind(str(args["Collective name"]))
        size = int(args.get("Group size", 0))
        if kind is None or size < 2 or str(args.get("dtype")) not in _ITEM_BYTES:
            continue
        item = _ITEM_BYTES[str(args["dtype"])]
        sent, received = int(args["In msg nelems"]) * item, int(args["Out msg nelems"]) * item
        nbytes = received if kind == "all_gather" else sent
        if nbytes > 0 and float(event["dur"]) > 0:
            curve = best.setdefault((kind, size, _stride(str(args.get("Process Group Ranks", "")), size)), {})
            curve[nbytes] = min(float(event["dur"]) * 1e-6, curve.get(nbytes, float("inf")))
    return tuple(
        CurveFigure(*key, tuple(sorted(curve)), tuple(curve[n] for n in sorted(curve)))
        for key, curve in sorted(best.items())
    )


def _kind(name: str) -> str | None:
    return next((kind for kind, marks in _KINDS if any(mark in name.lower() for mark in marks)), None)


def _stride(ranks: str, size: int) -> int:
    """How far apart the ranks of a group stand; 1 where the trace shortens or leaves out the list."""
    found = [int(word) for word in re.findall(r"\d+", ranks)]
    steps = {b - a for a, b in pairwise(found)}
    return steps.pop() if len(found) == size and len(steps) == 1 and min(steps) > 0 else 1


def _matmuls(events: list[Event]) -> tuple[MatmulFigure, ...]:
    device_us: dict[Any, float] = {}
    for event in events:
        if event.get("cat") == "kernel":
            key = event.get("args", {}).get("External id")
            device_us[key] = device_us.get(key, 0.0) + float(event["dur"])
    seconds: dict[tuple[str, int, int, int], list[float]] = {}
    for event in events:
        shape = _product(event)
        if shape is None:
            continue
        own = event["args"].get("External id")
        took_us = device_us.get(own, 0.0) if device_us else float(event["dur"])
        if took_us > 0:
            seconds.setdefault(shape, []).append(took_us * 1e-6)
    tables: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for (dtype, m, n, k), values in sorted(seconds.items()):
        tables.setdefault((dtype, n, k), []).append((m, 2 * m * n * k / median(values)))
    return tuple(
        MatmulFigure(dtype, n, k, tuple(m for m, _ in rows), tuple(rate for _, rate in rows))
        for (dtype, n, k), rows in sorted(tables.items())
    )


def _product(event: Event) -> tuple[str, int, int, int] | None:
    """(dtype, m, n, k) of a matmul operator; None for anything else, or where shapes were not recorded."""
    places = _PRODUCTS.get(str(event.get("name")))
    args = event.get("args", {})
    dims, types = args.get("Input Dims"), args.get("Input type")
    if places is None or not dims or not types:
        return None
    left, right = (dims[place] for place in places)
    dtype = _DTYPES.get(str(types[places[0]]))
    if dtype is None or len(left) != 2 or len(right) != 2 or left[1] != right[0] or 0 in (*left, *right):
        return None
    return dtype, int(left[0]), int(right[1]), int(left[1])
