"""Searching plans for cases: graphs captured once, clusters by the number of devices, and what a plan must never do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from hpsearch.capture import capture_config
from hpsearch.cluster import Cluster
from hpsearch.graph import ModelGraph
from hpsearch.layout import Placement
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.end_to_end.test_parity import slow_devices

__all__ = ["graph_of", "h100", "search", "slow_devices", "uneven_cuts"]


def graph_of(config: Mapping[str, Any], seq_len: int = 64, recipe: str = "bf16", **changes: Any) -> ModelGraph:
    """The captured graph of a config with some fields changed."""
    return _captured(json.dumps(dict(config) | changes), seq_len, recipe)


@cache
def _captured(config: str, seq_len: int, recipe: str) -> ModelGraph:
    return capture_config(json.loads(config), seq_len=seq_len, recipe=recipe).graph


def h100(devices: int, memory_gib: float = 0.0) -> Cluster:
    """The shipped H100 cluster, with another memory size if one is given."""
    found = Cluster.load("h100-sxm-roce400", devices=devices)
    if not memory_gib:
        return found
    return replace(found, device=replace(found.device, memory_bytes=int(memory_gib * 2**30)))


def uneven_cuts(plan: Plan, model: ModelGraph) -> list[str]:
    """Every activation or parameter in use that some axis cuts into pieces of unequal size: there must be none."""
    rows, found = plan.micro_batch_rows, []
    for graph, _ in model.pieces():
        placed = plan.file.placements.get(graph.name, {})
        for name, by_axis in placed.items():
            step = graph.producer.get(name) or next((s for s in graph.steps if s.name == name), None)
            outputs = step.outputs if step is not None else (name,)
            for position, value in enumerate(outputs):
                shape = graph.values[value].shape(rows)
                pieces = [1] * len(shape)
                for axis, text in by_axis.items():
                    placement = Placement.parse(text.partition("->")[2].split(",")[position])
                    if placement.is_shard:
                        pieces[placement.dim] *= plan.mesh.size(axis)
                found += [
                    f"{graph.name}.{value} dim of {size} over {count}"
                    for size, count in zip(shape, pieces, strict=True)
                    if size % count
                ]
    return found
