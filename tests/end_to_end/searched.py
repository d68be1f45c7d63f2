"""Layouts drawn from the space of a search, as plans."""

from __future__ import annotations

import random

from hpsearch.estimate import ParallelLayout, shape_of_graph
from hpsearch.graph import ModelGraph
from hpsearch.plan import Plan
from hpsearch.search import search
from hpsearch.search.from_layout import pins_of_layout
from hpsearch.space.pins import space_of
from hpsearch.space.rules import Rules
from tests.end_to_end.slow import slow_devices

PINS = {"cp": "1", "ep": "1", "etp": "1", "recompute": "full"}
"""What programs have no form for yet, and recompute of whole layers."""


def drawn(graph: ModelGraph, devices: int, rows: int, tokens: int, draw: random.Random) -> ParallelLayout:
    """A layout of the space, any of them, on all devices and with every row."""
    space = space_of(shape_of_graph(graph), slow_devices(devices), PINS, global_batch=rows, seq_len=tokens)
    rules = Rules()
    choices = []
    for inside in space.insides(rules):
        for row in space.outsides(inside, rules).tolist():
            layout = space.layout(inside, tuple(row))
            if layout.devices == devices and layout.global_batch == rows:
                choices.append((inside, tuple(row)))
    inside, row = draw.choice(choices)
    chunks, layers = space.layout(inside, row).chunks, space.shape.layers
    ends = sorted(draw.sample(range(1, layers), chunks - 1))
    cut = tuple(b - a for a, b in zip([0, *ends], [*ends, layers], strict=True))
    recomputed = cut if draw.random() < 0.3 else ()
    return space.layout(inside, row, cut, recomputed)


def planned(graph: ModelGraph, layout: ParallelLayout) -> Plan:
    pins = pins_of_layout(layout, layout.devices, layout.global_batch)
    return search(graph, slow_devices(layout.devices), global_batch=layout.global_batch, fix=pins.fix)
