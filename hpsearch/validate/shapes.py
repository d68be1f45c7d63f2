"""Shapes of published models: captured from their transformers classes, each once, and kept.

Captures run side by side on the processors of this machine; what was captured before is read from the store of graphs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from hpsearch.errors import CaptureError, HpsearchError
from hpsearch.estimate import ModelShape, shape_of_graph
from hpsearch.graph import ModelGraph, store
from hpsearch.validate.configs import PUBLISHED, SEQ_LEN, config_of

RECIPE = "bf16"
"""Shapes and parameters do not depend on it."""


def wanted(model: Mapping[str, Any]) -> str:
    """The config that a row's model is captured from, as text. CaptureError for a row without a shape."""
    return json.dumps(config_of(model), sort_keys=True)


def shapes(configs: Iterable[str]) -> Iterator[tuple[str, ModelShape | str]]:
    """The shape of each, or one line that says why it has none; in the order in which they are ready."""
    missing = []
    for text in dict.fromkeys(configs):
        graph = store.load_graph(store.config_key(json.loads(text), SEQ_LEN, RECIPE))
        if graph is None:
            missing.append(text)
        else:
            yield text, _read(graph)
    if not missing:
        return
    workers = min(os.cpu_count() or 1, len(missing))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(captured, text): text for text in missing}
        for done in as_completed(running):
            yield running[done], done.result()


def shapes_of_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, ModelShape | str]:
    """By row id: the shape of its model, or one line that says why it has none. A bar while models are captured."""
    configs: dict[str, str] = {}
    found: dict[str, ModelShape | str] = {}
    listed = list(rows)
    for row in listed:
        try:
            configs[str(row["id"])] = wanted(row["model"])
        except HpsearchError as error:
            found[str(row["id"])] = str(error)
    read: dict[str, ModelShape | str] = {}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("models captured", total=len(set(configs.values())))
        for text, shape in shapes(configs.values()):
            read[text] = shape
            bar.advance(task)
    for row in listed:
        name = str(row["id"])
        if name in configs:
            shape = read[configs[name]]
            found[name] = shape if isinstance(shape, str) else of_row(shape, row["model"], int(row["seq_len"] or 0))
    return found


def captured(text: str) -> ModelShape | str:
    """Captures in this process, and keeps the graph."""
    from hpsearch.capture import capture_config

    try:
        graph: ModelGraph = capture_config(json.loads(text), seq_len=SEQ_LEN, recipe=RECIPE).graph
    except HpsearchError as error:
        return str(error)
    return _read(graph)


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
