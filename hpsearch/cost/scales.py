"""Seconds in which ranks agree on the scales of a product in 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpsearch.cost.context import attention_layouts
from hpsearch.cost.job import Job
from hpsearch.cost.op_time import Floats, NodeKey
from hpsearch.graph import Op
from hpsearch.graph.scaled import RECIPE, scale_messages, scaled_products
from hpsearch.layout import Collective, Mesh
from hpsearch.strategy import SearchSpace


def scales_s(
    space: SearchSpace, key: NodeKey, mesh: Mesh, job: Job, on_path_s: Callable[[tuple[Collective, ...]], float]
) -> Floats | float:
    """Of one run, by state."""
    graph = space.graphs[key[0]]
    op = graph.step(key[1])
    if job.recipe.name != RECIPE or not isinstance(op, Op) or op.name not in scaled_products(space.model, graph):
        return 0.0
    found = []
    for state in range(len(space.nodes[key].rules)):
        layouts = attention_layouts(space, key, op, mesh, state)
        messages = scale_messages(graph, op, layouts, job.micro_rows(), mesh.sizes)
        found.append(on_path_s(tuple(collective for _, collective in messages)))
    return np.array(found)
