"""On the data axes every tensor follows the batch: one rule for each op, found by propagation.

Along `dp_replicate` and `dp_shard` a value that carries rows of the batch is cut along that dim, a parameter is whole
when it is used, and what sums over rows (a weight's gradient, a loss) is partial. For each op the rule is taken that
moves the fewest bytes from what its operands already are, then the one whose results follow the batch best.
The result holds for every size of the axes: only the batch dim is ever cut, and rows divide by the data ranks.

On an axis of the role `experts` the same holds, and besides what each expert has is cut by experts, so that tokens are
exchanged on their way to them. How rows of experts are cut never changes between ops.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpsearch.errors import UnsupportedOpError
from hpsearch.graph import Call, ModelGraph, Op, OpGraph, Rule, Value
from hpsearch.layout import PARTIAL, REPLICATE, Placement, shard
from hpsearch.layout.redistribute import is_reachable, kind_between

TRAFFIC = {None: 0.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 0.5}
"""Bytes moved relative to the tensor's, to compare rules; all-reduce is a reduce-scatter and an all-gather."""


@dataclass(frozen=True)
class DataPlacements:
    """What each value is on axes of one role, and the rule of each op, for one graph."""

    values: dict[str, Placement]
    rules: dict[str, Rule]


Followed = dict[str, dict[str, DataPlacements]]
"""Role of an axis (`layout.ROLES`) → graph → what each value is on axes of that role."""


def batch_placement(value: Value) -> Placement:
    """Shard of the dim that is made of rows alone; replicate when there is none."""
    for dim in value.batch_dims:
        if value.fixed[dim] == 0:
            return shard(dim)
    return REPLICATE


def gradient_placement(value: Value) -> Placement:
    """A gradient follows the batch like its value; without a batch dim it is a sum over rows, so partial."""
    placement = batch_placement(value)
    return PARTIAL if placement.is_replicate else placement


def propagate(
    graph: OpGraph, rows: int, blocks: dict[str, tuple[OpGraph, DataPlacements]], role: str = "batch"
) -> DataPlacements:
    """Data placements of one graph; `rows` only weighs bytes against each other.

    What a call gives is what its block class (already propagated, in `blocks`) leaves in its outputs.
    """
    values = {name: _arrival(graph, value, role) for name, value in graph.values.items() if value.role != "op"}
    rules: dict[str, Rule] = {}
    for step in graph.steps:
        if isinstance(step, Call):
            values.update(_call_results(step, *blocks[step.block]))
            continue
        rule = min(graph.rules_of(step), key=lambda r: _preference(graph, step, r, values, rows, role))
        if _preference(graph, step, rule, values, rows, role)[0] == float("inf"):
            found = ", ".join(f"{v}={values[v]}" for v in step.inputs)
            raise UnsupportedOpError(
                f"{graph.name}.{step.name} ({step.target}, {step.source or 'source unknown'})",
                f"expected a rule that accepts its operands on a data axis, but found none for {found}",
                "Add a rule for this op in capture/rule_table.py.",
            )
        rules[step.name] = rule
        values.update((out, Placement.parse(p)) for out, p in zip(step.outputs, rule[1], strict=True))
    return DataPlacements(values, rules)


def _call_results(call: Call, block: OpGraph, placed: DataPlacements) -> dict[str, Placement]:
    given = block.outputs if call.phase == "forward" else [grad for grad in block.input_grads if grad is not None]
    return {out: placed.values[name] for out, name in zip(call.outputs, given, strict=True)}


def _arrival(graph: OpGraph, value: Value, role: str) -> Placement:
    """What a value from outside is: inputs follow the batch, parameters and buffers are whole, but those of experts.

    The tangent of the model's own loss is a constant one, hence whole; a block's tangent is a gradient.
    """
    if value.role == "input":
        return batch_placement(value)
    if value.role == "tangent":
        return gradient_placement(value) if graph.name != "outer" else batch_placement(value)
    return shard(0) if role == "experts" and value.name in graph.by_expert else REPLICATE


def _preference(
    graph: OpGraph, op: Op, rule: Rule, values: dict[str, Placement], rows: int, role: str
) -> tuple[float, int, float, Rule]:
    """Sort key of a rule: bytes to move, results that do not follow the batch, elements computed, then its text."""
    moved = 0.0
    for name, text in zip(op.inputs, rule[0], strict=True):
        source, target = values[name], Placement.parse(text)
        fixed = name in graph.routed and source != target
        if fixed or not is_reachable(source, target) or not _may_be(graph, name, target, role):
            return (float("inf"), 0, 0.0, rule)
        moved += TRAFFIC[kind_between(source, target)] * graph.values[name].nbytes(rows)
    astray, computed = 0, 0.0
    whole_operands = all(values[name].is_replicate for name in op.inputs)
    for name, text in zip(op.outputs, rule[1], strict=True):
        value, placement = graph.values[name], Placement.parse(text)
        if not _may_be(graph, name, placement, role):
            return (float("inf"), 0, 0.0, rule)
        wanted = shard(0) if role == "experts" and name in graph.by_expert else batch_placement(value)
        if wanted.is_replicate and not whole_operands:
            wanted = PARTIAL
        astray += placement != wanted
        computed += value.nbytes(rows) * (0.5 if placement.is_shard else 1.0)
    return (moved, astray, computed, rule)


def _may_be(graph: OpGraph, name: str, placement: Placement, role: str) -> bool:
    """Only dims made of rows may be cut on a data axis: they divide by construction; experts where they are spread."""
    value = graph.values[name]
    if role == "experts" and placement == shard(0) and name in graph.by_expert:
        return True
    return not placement.is_shard or (value.per_row[placement.dim] > 0 and value.fixed[placement.dim] == 0)


def propagate_all(model: ModelGraph, rows: int) -> Followed:
    """Placements of every block class and of the outer graph on the axes that split the batch, and experts if any."""
    roles = ("batch", "experts") if any(graph.routed for graph, _ in model.pieces()) else ("batch",)
    return {role: _of_batch(model, rows, role) for role in roles}


def _of_batch(model: ModelGraph, rows: int, role: str) -> dict[str, DataPlacements]:
    blocks = {name: (block, propagate(block, rows, {}, role)) for name, block in model.blocks.items()}
    placed = {name: placements for name, (_, placements) in blocks.items()}
    return placed | {model.outer.name: propagate(model.outer, rows, blocks, role)}
