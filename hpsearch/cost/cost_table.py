"""`CostTable`: seconds and bytes of everything one search space, mesh and job let the solver choose, as one `Problem`.

    objective = Σ compute + Σ communication on the dependence path + Σ exposed part of what can be hidden

What can be hidden is a parameter's gather (under the forward or backward that runs before its use) and its gradient's
reduction (under the rest of backward). Hidden seconds share a budget, the compute of their own block in that phase:

    exposed = (1 - η) X + η max(0, X - C)      X seconds to hide, C compute seconds, η the cluster's measured overlap

which is `max(C, X) - C` for a perfect overlap (η = 1) and X for none (η = 0). Memory is one row, in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpsearch.cluster import Cluster
from hpsearch.cost.assembly import Assembly, update_s
from hpsearch.cost.job import Job
from hpsearch.cost.op_time import Floats, NodeKey, op_seconds
from hpsearch.cost.storage import Storage, storages
from hpsearch.graph import OpGraph
from hpsearch.layout import Mesh, Placement
from hpsearch.solve import Problem
from hpsearch.strategy import SearchSpace


@dataclass(frozen=True, eq=False)
class CostTable:
    """The noun of this room: prices by node and state, and the problem made of them."""

    space: SearchSpace
    cluster: Cluster
    mesh: Mesh
    job: Job
    seconds: dict[NodeKey, Floats]
    """Of one execution of an op, by state."""
    storages: dict[NodeKey, tuple[Storage, ...]]
    """States of a parameter."""
    problem: Problem
    keys: tuple[NodeKey, ...]
    """Node of each index in the problem."""

    def update_s(self, storage: Storage) -> float:
        """Seconds of the optimizer's update of one parameter on one device."""
        return update_s(storage, self.cluster, self.job, self.mesh)

    @property
    def least_parts_s(self) -> float:
        """A lower bound on seconds: every node in its cheapest state, redistribution and exposure left out."""
        return sum(float(u.min()) for u in self.problem.unary)

    @property
    def least_parts_bytes(self) -> float:
        """A lower bound on memory: every node in the state that needs least, its neighbours ignored."""
        row = self.problem.rows[0]
        return sum(
            float(np.min(np.where(np.isfinite(self.problem.unary[n]), b, np.inf))) for n, b in row.coefficients.items()
        )


def build(space: SearchSpace, cluster: Cluster, mesh: Mesh, job: Job, limit_bytes: float) -> CostTable:
    """Prices of `space` on `mesh` under `job`, with `limit_bytes` of memory a device."""
    seconds = op_seconds(space, cluster, job.micro_rows(), mesh)
    kept = {key: _storages(space, mesh, key) for key, node in space.nodes.items() if node.kind == "param"}
    problem = Assembly(space, cluster, mesh, job, seconds, kept).problem(limit_bytes)
    return CostTable(space, cluster, mesh, job, seconds, kept, problem, tuple(space.nodes))


def _storages(space: SearchSpace, mesh: Mesh, key: NodeKey) -> tuple[Storage, ...]:
    graph, name = space.graphs[key[0]], key[1]
    local = next(local for local, value in graph.params.items() if value == name)
    gradient = graph.param_grads.get(local)
    shape = graph.values[name].fixed
    passes = 2 if _is_read_backward(graph, name) else 1
    found: list[Storage] = []
    for (placement,) in [rule[1] for rule in space.nodes[key].rules]:
        tp = Placement.parse(placement)
        left = space.layout(key[0], gradient, tp, mesh) if gradient is not None else None
        found += storages(shape, tp, mesh, left, passes, name in graph.by_expert)
    return tuple(found)


def _is_read_backward(graph: OpGraph, param: str) -> bool:
    return any(graph.storage(v) == param for op in graph.ops if op.phase == "backward" for v in op.inputs)
