"""Shapes of published models: captured from their transformers classes, each once, and kept.

Captures run side by side on the processors of this machine; what was captured before is read from the store of graphs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from hpsearch.errors import CaptureError, HpsearchError
from hpsearch.estimate import ModelShape, shape_of_graph
from hpsearch.graph import ModelGraph, store
from hpsearch.validate.configs import PUBLISHED, SEQ_LEN, config_of
from hpsearch.validate.workers import capture_all

RECIPE = "bf16"
"""Shapes and parameters do not depend on it."""


def wanted(model: Mapping[str, Any]) -> str:
    """The config that a row's model is captured from, as text. CaptureError for a row without a shape."""
    return json.dumps(config_of(model), sort_keys=True)


def shapes(configs: Iterable[str]) -> Iterator[tuple[str, ModelShape | str]]:
    """The shape of each, or one line that says why it has none; in the order in which they are ready."""
    missing = []
    for text in dict.fromkeys(configs):
        kept = store.load_graph(store.config_key(json.loads(text), SEQ_LEN, RECIPE))
        if kept is None:
            missing.append(text)
        else:
            yield text, _read(kept)
    if not missing:
        return
    for text, graph in capture_all(missing, SEQ_LEN, RECIPE, os.cpu_count() or 1):
        yield text, graph if isinstance(graph, str) else _read(graph)


def shapes_of_rows(rows: Sequence[Mapping[str, Any]]) -> list[ModelShape | str]:
    """Of each row: the shape of its model, or one line that says why it has none. A bar while models are captured."""
    configs = [_config_or_reason(row) for row in rows]
    read: dict[str, ModelShape | str] = {}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        texts = [text for text, _ in configs if text]
        task = bar.add_task("models captured", total=len(set(texts)))
        for text, shape in shapes(texts):
            read[text] = shape
            bar.advance(task)
    found: list[ModelShape | str] = []
    for row, (text, reason) in zip(rows, configs, strict=True):
        shape = read[text] if text else reason
        found.append(shape if isinstance(shape, str) else of_row(shape, row["model"], int(row.get("seq_len") or 0)))
    return found


def _config_or_reason(row: Mapping[str, Any]) -> tuple[str, str]:
    try:
        return wanted(row["model"]), ""
    except HpsearchError as error:
        return "", str(error)


def _read(graph: ModelGraph) -> ModelShape | str:
    try:
        return shape_of_graph(graph)
    except CaptureError as error:
        return str(error)


def of_row(shape: ModelShape, model: Mapping[str, Any], seq_len: int) -> ModelShape:
    """What a class of transformers does not have: extra-prediction layers, a run of layers alone, and a learned table
    of positions as long as the row's sequence."""
    name, extra = str(model.get("name")), model.get("mtp_layers")
    if extra is None:
        extra = PUBLISHED[name][1] if name in PUBLISHED else 0
    if model.get("layers") is not None and not model.get("vocab"):
        return replace(shape, name=name, vocab=0, rest=0, positions=0)
    positions = seq_len if model.get("position") == "learned" else 0
    return replace(shape, name=name, mtp_layers=int(extra), positions=positions)
