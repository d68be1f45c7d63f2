"""One stage of a pipeline in seconds and bytes, by the states of the whole model's nodes.

A stage is priced as a model of its own (`cost.build`): its copies, gathers and reductions are its own. What it decides
are the whole model's states, so each of its nodes stands for a node of the whole table; a value that arrives is in the
state that its maker left it in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hpsearch.cost import CostTable, build
from hpsearch.cost.op_time import Floats, local_elements
from hpsearch.cost.saved import saved_bytes, staged_bytes
from hpsearch.graph import ITEM_BYTES, Call, ModelGraph, OpGraph
from hpsearch.plan.stages import Stage
from hpsearch.search.step_memory import within
from hpsearch.strategy import Node, SearchSpace, enumerate_space
from hpsearch.strategy.search_space import NodeKey

Bytes = dict[int, Floats]
"""Node of the whole table → bytes by its state."""


@dataclass(frozen=True, eq=False)
class StagePrices:
    stage: Stage
    """The one that was priced: of stages that are alike, the first."""
    table: CostTable
    """Of the stage alone."""
    nodes: tuple[int, ...]
    """Node of the whole table that each of the table's nodes stands for."""
    static: Bytes
    """Parameters with all that follows them, buffers, what a recomputed block keeps while it runs backward, and what is
    on its way to host memory or back."""
    resident: Bytes
    """What one micro-batch keeps from its forward to the end of its backward, and what is on its way to neighbours."""
    pending: Bytes
    """What it keeps on top between the two halves of its backward."""

    seen: dict[tuple[int, ...], dict[str, int]] = field(default_factory=dict)

    def alone(self, whole: Sequence[int]) -> dict[str, int]:
        """Bytes a device by category, with one micro-batch in flight."""
        choice = self.choice(whole)
        if choice not in self.seen:
            self.seen[choice] = within(self.table, choice)
        return self.seen[choice]

    def choice(self, whole: Sequence[int]) -> tuple[int, ...]:
        return tuple(whole[n] for n in self.nodes)

    def times_s(self, whole: Sequence[int]) -> tuple[float, float, float, float]:
        """Seconds of one micro-batch's forward, input and weight part, and of what the stage does once a step.

        What the price of the stage holds beside compute and the update is spread over the micro-batches' compute.
        """
        table, choice = self.table, self.choice(whole)
        job = table.job
        parts, update_s = [0.0, 0.0, 0.0], 0.0
        weight = {g.name: weight_ops(g, self.stage) for g, _ in table.space.model.pieces()}
        for key, state in zip(table.keys, choice, strict=True):
            node = table.space.nodes[key]
            if node.kind == "param":
                update_s += node.count * table.update_s(table.storages[key][state])
            if node.kind != "op":
                continue
            seconds = float(table.seconds[key][state]) * node.count
            if table.space.graphs[key[0]].step(key[1]).phase == "forward":
                parts[0] += seconds
                parts[1] += seconds * (job.runs(key[0], "forward") - 1)
            else:
                parts[2 if key[1] in weight[key[0]] else 1] += seconds
        total_s = replace(table.problem, rows=()).evaluate(choice)
        compute_s = sum(parts)
        rest_s = max(0.0, total_s - job.micro_batches * compute_s - update_s) / job.micro_batches
        spread = 1.0 + (rest_s / compute_s if compute_s else 0.0)
        forward, backward_input, backward_weight = (part * spread for part in parts)
        return forward, backward_input, backward_weight, update_s

    def compute_s(self, whole: Sequence[int]) -> float:
        """Seconds a step of compute alone, the update among it."""
        table, total_s = self.table, 0.0
        for key, state in zip(table.keys, self.choice(whole), strict=True):
            node = table.space.nodes[key]
            if node.kind == "op":
                runs = table.job.runs(key[0], table.space.graphs[key[0]].step(key[1]).phase)
                total_s += float(table.seconds[key][state]) * node.count * runs * table.job.micro_batches
            elif node.kind == "param":
                total_s += node.count * table.update_s(table.storages[key][state])
        return total_s

    def passed_bytes(self, whole: Sequence[int], values: Iterable[str]) -> float:
        """Bytes a device of values that pass between this stage and a neighbour."""
        sizes = _by_maker(self.table, values)
        states = dict(zip(self.table.keys, self.choice(whole), strict=True))
        return sum(float(nbytes[states[key]]) for key, nbytes in sizes.items())


def price_stages(whole: CostTable, stages: Sequence[Stage]) -> tuple[StagePrices, ...]:
    """Each as `price_stage` says; those that are alike are priced once."""
    found: dict[object, StagePrices] = {}
    alike = [likeness(whole.space.model, stage) for stage in stages]
    for key, stage in zip(alike, stages, strict=True):
        if key not in found:
            found[key] = price_stage(whole, stage)
    return tuple(found[key] for key in alike)


def likeness(model: ModelGraph, stage: Stage) -> object:
    """Equal for stages that are the same but for the names of what passes between calls: their prices are equal, and so
    is the node of the whole model that each of theirs stands for."""
    outer, numbers = stage.graph.outer, dict[str, str]()
    passing = [*stage.takes, *stage.takes_back]
    passing += [value for step in outer.steps if isinstance(step, Call) for value in step.outputs]
    for value in passing:
        numbers.setdefault(value, f"#{len(numbers)}")

    def told(values: Iterable[str]) -> tuple[str, ...]:
        return tuple(numbers.get(value, value) for value in values)

    steps = tuple(
        (step.block if isinstance(step, Call) else step.name, step.phase, told(step.inputs), told(step.outputs))
        for step in outer.steps
    )
    arrived = tuple(maker(model, value) for value in (*stage.takes, *stage.takes_back))
    passed = tuple(map(told, (stage.takes, stage.gives, stage.takes_back, stage.gives_back, stage.leaves)))
    views = tuple(told(pair) for pair in outer.aliases.items())
    ends = tuple(outer.param_grads.items()), tuple(outer.buffers), stage.loss, stage.shared
    return steps, arrived, passed, views, ends


def price_stage(whole: CostTable, stage: Stage) -> StagePrices:
    """The stage's own table under the whole table's job and mesh."""
    space = _stage_space(whole.space, stage)
    table = build(space, whole.cluster, whole.mesh, whole.job, float("inf"))
    index = {key: i for i, key in enumerate(whole.keys)}
    arrived = {(stage.graph.outer.name, v): v for v in (*stage.takes, *stage.takes_back)}
    nodes = tuple(
        index[maker(whole.space.model, arrived[key])[0]] if key in arrived else index[key] for key in table.keys
    )
    static, resident, pending = _memory(table, stage)

    def renamed(by_key: dict[NodeKey, Floats]) -> Bytes:
        found: Bytes = {}
        for key, nbytes in by_key.items():
            node = nodes[table.keys.index(key)]
            found[node] = found[node] + nbytes if node in found else nbytes
        return found

    return StagePrices(stage, table, nodes, renamed(static), renamed(resident), renamed(pending))


def maker(model: ModelGraph, value: str) -> tuple[NodeKey, int]:
    """The node that makes a value of the outer graph, inside a block when a call gives it, and which of its results."""
    step = model.outer.producer[value]
    if not isinstance(step, Call):
        return (model.outer.name, step.name), step.outputs.index(value)
    block = model.blocks[step.block]
    given = block.outputs if step.phase == "forward" else [g for g in block.input_grads if g is not None]
    inner = given[step.outputs.index(value)]
    made = block.producer.get(inner)
    return ((block.name, made.name), made.outputs.index(inner)) if made else ((block.name, inner), 0)


def _stage_space(whole: SearchSpace, stage: Stage) -> SearchSpace:
    space = enumerate_space(stage.graph, whole.tp, whole.followed, whole.ep, whole.cp)
    outer, nodes = stage.graph.outer.name, dict(space.nodes)
    for kind, values in (("input", stage.takes), ("tangent", stage.takes_back)):
        for value in values:
            key, slot = maker(whole.model, value)
            rules = tuple(((), (str(placement),)) for placement in whole.nodes[key].given(slot))
            nodes[outer, value] = Node((outer, value), kind, rules, 1)
    return replace(space, nodes=nodes)


def weight_ops(graph: OpGraph, stage: Stage | None = None) -> set[str]:
    """Backward ops that no gradient of an input needs: those of the weight part. `stage`: of an outer graph."""
    ends = {v for v in graph.input_grads if v is not None}
    if stage is not None and graph.name == stage.graph.outer.name:
        ends = set(stage.gives_back)
        ends |= {v for call in graph.calls if call.phase == "backward" for v in call.inputs}
    found = set()
    for op in reversed(graph.ops):
        if op.phase == "backward":
            if ends.isdisjoint(op.outputs):
                found.add(op.name)
            else:
                ends.update(op.inputs)
    return found


def _memory(table: CostTable, stage: Stage) -> tuple[dict[NodeKey, Floats], ...]:
    space, job = table.space, table.job
    whole = table.problem.rows[0].coefficients
    saved, staged = saved_bytes(space, job, table.mesh), staged_bytes(space, job, table.mesh)
    static = {table.keys[n]: np.array(b) for n, b in whole.items()}
    resident: defaultdict[NodeKey, Floats | float] = defaultdict(float)
    pending: defaultdict[NodeKey, Floats | float] = defaultdict(float)
    for key, nbytes in saved.items():
        node = space.nodes[key]
        if key[0] in job.recompute and node.kind == "op":
            pending[key] = pending[key] + nbytes * node.count
        else:
            each = nbytes - staged.get(key, 0.0)  # of what is offloaded only one micro-batch has some on the device
            resident[key] = resident[key] + each
            static[key] = static[key] - each
    for graph, count in space.model.pieces():
        for key, nbytes in _handed(table, graph, stage).items():
            pending[key] = pending[key] + nbytes * count
    ends = (*stage.takes, *stage.gives, *stage.takes_back, *stage.gives_back)
    for key, nbytes in _by_maker(table, ends).items():
        resident[key] = resident[key] + nbytes
    return static, _arrays(resident), _arrays(pending)


def _arrays(found: dict[NodeKey, Floats | float]) -> dict[NodeKey, Floats]:
    return {key: np.asarray(nbytes, dtype=np.float64) for key, nbytes in found.items()}


def _handed(table: CostTable, graph: OpGraph, stage: Stage) -> dict[NodeKey, Floats]:
    """Bytes that the input part of one backward hands to its weight part, beside what forward saved."""
    weight = weight_ops(graph, stage)
    made = {out for step in graph.steps if step.phase == "backward" for out in step.outputs}
    own = {out for op in graph.ops if op.name in weight for out in op.outputs}
    names = {v for op in graph.ops if op.name in weight for v in op.inputs} | {
        v for v in graph.param_grads.values() if v is not None
    }
    owners = {graph.storage(v) for v in names if v in made and v not in own} | {v for v in names if v in graph.tangents}
    return _sizes(table, graph, [v for v in graph.values if v in owners])


def _sizes(table: CostTable, graph: OpGraph, values: Iterable[str]) -> dict[NodeKey, Floats]:
    found: dict[NodeKey, Floats] = {}
    for name in values:
        step = graph.producer.get(name)
        key = (graph.name, step.name) if step else (graph.name, name)
        slot = step.outputs.index(name) if step else 0
        if isinstance(step, Call):
            key, slot = maker(table.space.model, name)
        found[key] = found.get(key, np.zeros(len(table.space.nodes[key].rules))) + _nbytes(
            table, graph, name, key, slot
        )
    return found


def _by_maker(table: CostTable, values: Iterable[str]) -> dict[NodeKey, Floats]:
    return _sizes(table, table.space.model.outer, values)


def _nbytes(table: CostTable, graph: OpGraph, name: str, key: NodeKey, slot: int) -> Floats:
    value, node, rows = graph.values[name], table.space.nodes[key], table.job.micro_rows()
    cuts = table.space.cuts(graph.name, name, table.mesh)
    count = [local_elements(value, rows, (*cuts, (table.space.tp, tp))) for tp in node.given(slot)]
    return np.array(count, dtype=np.float64) * ITEM_BYTES[value.dtype]
