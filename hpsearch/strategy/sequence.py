"""On the axis cp every tensor follows its sequences: one rule for each op, found by propagation.

`S<d>` there cuts every sequence that dim `d` holds: of a dim made of rows (tokens of all sequences one behind the
other) each row's part of it. So it is never in the way of the data axes, which cut between rows.

Inputs of the batch are whole on every rank, and what is made of integers alone stays whole; it is cut, which is free,
where a cut tensor meets it. The first product of whole tensors that come from a sequence is cut along that sequence.
Parameters are whole, their gradients addends. Where nothing but mixing positions is left (a convolution or scan along
the sequence), the model is refused: gathering activations would be a silent slowdown. Two things may be gathered: keys
and values of an attention written as products, and integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from hpsearch.errors import LegalityError
from hpsearch.graph import Call, ModelGraph, Op, OpGraph, Rule, Value
from hpsearch.layout import HEAD_TAIL, PARTIAL, REPLICATE, ROLES, Mesh, Placement, shard
from hpsearch.layout.redistribute import is_reachable, kind_between
from hpsearch.strategy.attention import is_attention
from hpsearch.strategy.data_axes import TRAFFIC, DataPlacements

_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default")
SEQUENCE = 2
"""Attention operations take [rows, heads, sequence, head size]."""
_ROWS = (7, 11)
"""Numbers of rows at which sizes are compared: equal at both, equal at any."""
_CLOSED = (float("inf"), 0, 0, 0.0, 0)
_STARTS = ("matmul", "embedding", "attention", "conv")
"""Ops from which on tensors are worth cutting."""


@dataclass(frozen=True)
class Along:
    """The axis that cuts sequences."""

    size: int
    exchange: str
    """See `layout.EXCHANGES`."""
    pieces: int
    """Equal parts that a sequence must have: the ranks, or twice as many for head-tail order."""
    experts: bool = False
    """Whether experts are spread over the axis too; else they are whole on it, and each rank has its tokens' rows."""


def along_axis(mesh: Mesh) -> Along | None:
    """What a mesh's axis along sequences does; None without one."""
    axis = next((a for a in mesh.axes if ROLES[a.name] == "sequence"), None)
    if axis is None:
        return None
    return Along(axis.size, axis.exchange, axis.size * (2 if axis.order == HEAD_TAIL else 1), bool(axis.hops))


def sequence_lengths(model: ModelGraph) -> list[int]:
    """Lengths of the sequences in the batch, in the order of its tensors."""
    graph = model.outer
    return [graph.values[name].fixed[dim] for name, dim in sequence_dims(graph).items()]


def sequence_dims(graph: OpGraph) -> dict[str, int]:
    """Inputs of the batch → their sequence dim: the one behind the rows, of tokens [rows, sequence] and of vectors
    [rows, sequence, width]."""
    found = {}
    for name in graph.inputs:
        value = graph.values[name]
        rank = 3 if value.dtype.startswith(("float", "bfloat")) else 2
        if len(value.fixed) == rank and value.per_row[0]:
            found[name] = 1
    return found


def rules_along(graph: OpGraph, op: Op, exchange: str) -> tuple[Rule, ...]:
    """The rules of an op on an axis along sequences: those of its table, and what only such an axis may do."""
    found = list(graph.rules_of(op))
    if op.target in _VIEWS:
        found += _views(graph.values[op.inputs[0]], graph.values[op.outputs[0]])
    if is_attention(op):
        found.append(attention_rule(graph, op, exchange))
    return tuple(dict.fromkeys(found))


def _views(source: Value, target: Value) -> Iterator[Rule]:
    """A cut of sequences is the same cut of another dim that has equally many leading elements."""
    for d in range(len(source.fixed)):
        for e in range(len(target.fixed)):
            if _row(source, d) > 1 and _row(target, e) > 1 and _lead(source, d) == _lead(target, e):
                yield (f"S{d}",), (f"S{e}",)


def _lead(value: Value, dim: int) -> tuple[int, ...]:
    """Elements in front of a sequence's part of `dim`, at two numbers of rows."""
    found = []
    for rows in _ROWS:
        count = rows if value.per_row[dim] else 1
        for size in value.shape(rows)[:dim]:
            count *= size
        found.append(count)
    return tuple(found)


def _row(value: Value, dim: int) -> int:
    """Elements of one sequence along `dim`; 0 where a row is no whole part of it."""
    if not value.per_row[dim]:
        return value.fixed[dim]
    return value.per_row[dim] if value.fixed[dim] == 0 else 0


def attention_rule(graph: OpGraph, op: Op, exchange: str) -> Rule:
    """Queries, keys, values and results cut along their sequences; a mask along its queries, or whole for ulysses."""
    cut = f"S{SEQUENCE}"
    tensors = 3 if op.phase == "forward" else 6
    masks = []
    for name in op.inputs[tensors:]:
        shape = graph.values[name].fixed
        at = len(shape) - 2
        masks.append("R" if exchange == "ulysses" or shape[at] == 1 else f"S{at}")
    return (cut,) * tensors + tuple(masks), (cut,) * len(op.outputs)


def propagate_sequence(model: ModelGraph, rows: int, along: Along) -> dict[str, DataPlacements]:
    """Placements of every graph on cp, by graph name. Raises LegalityError for an op that mixes positions, and for a
    model that has no sequence of a length that divides."""
    work = _Propagation(model, rows, along)
    outer = work.graph(model.outer, dict.fromkeys((*model.outer.inputs, *model.outer.tangents), REPLICATE))
    found = {name: work.blocks[name] for name in model.blocks} | {model.outer.name: outer}
    if not any(p.is_shard for placed in found.values() for p in placed.values.values()):
        raise LegalityError(
            f"fix cp={along.size}",
            f"expected sequences of a length that divides by {along.pieces}, but nothing of {model.name} can be cut",
            "Pin cp=1, or choose another length.",
        )
    return found


@dataclass
class _Propagation:
    model: ModelGraph
    rows: int
    along: Along
    blocks: dict[str, DataPlacements] = field(default_factory=dict)

    @cached_property
    def lengths(self) -> frozenset[int]:
        return frozenset(sequence_lengths(self.model))

    def graph(self, graph: OpGraph, arrive: dict[str, Placement]) -> DataPlacements:
        """Placements of a graph whose inputs and tangents arrive as `arrive`; of its blocks at their first call."""
        values = {n: self._rests(graph, n) for n, value in graph.values.items() if value.role != "op"} | arrive
        dims = sequence_dims(graph) if graph is self.model.outer else {}
        dims = {name: dim for name, dim in dims.items() if self._divides(graph.values[name], dim)}
        rules: dict[str, Rule] = {}
        for step in graph.steps:
            if isinstance(step, Call):
                values.update(self._call(step, values))
                continue
            rule = self._best(graph, step, values, dims)
            rules[step.name] = rule
            values.update((out, Placement.parse(p)) for out, p in zip(step.outputs, rule[1], strict=True))
        return DataPlacements(values, rules)

    def _rests(self, graph: OpGraph, name: str) -> Placement:
        """What a value from outside is: whole, but for experts that are spread."""
        return shard(0) if self._spread(graph, name) else REPLICATE

    def _spread(self, graph: OpGraph, name: str) -> bool:
        return self.along.experts and name in graph.by_expert

    def _divides(self, value: Value, dim: int) -> bool:
        row = _row(value, dim)
        return row > 1 and row % self.along.pieces == 0

    def _call(self, call: Call, values: dict[str, Placement]) -> dict[str, Placement]:
        block = self.model.blocks[call.block]
        if call.block not in self.blocks:
            arrive = {entry: values[v] for entry, v in zip(block.inputs, call.inputs, strict=True)}
            self.blocks[call.block] = self._block(block, arrive)
        if call.phase == "backward":
            self._check_gradients(block, call, values)
        given = block.outputs if call.phase == "forward" else [g for g in block.input_grads if g is not None]
        placed = self.blocks[call.block].values
        return {out: placed[name] for out, name in zip(call.outputs, given, strict=True)}

    def _check_gradients(self, block: OpGraph, call: Call, values: dict[str, Placement]) -> None:
        """No collective makes an addend of a piece."""
        for tangent, value in zip(block.tangents, call.inputs, strict=True):
            if values[value].is_shard and self.blocks[block.name].values[tangent] == PARTIAL:
                problem = (
                    f"expected {block.name} to take gradients cut like its results, but {value} is {values[value]}"
                )
                problem += " and the result is whole"
                raise LegalityError(f"fix cp={self.along.size}", problem, "Pin cp=1 for this model.")

    def _block(self, block: OpGraph, arrive: dict[str, Placement]) -> DataPlacements:
        """Gradients arrive as what they are of; of what is whole they are addends."""
        tangents = dict.fromkeys(block.tangents, PARTIAL)
        forward = self.graph(_forward_of(block), arrive | tangents)
        for tangent, output in zip(block.tangents, block.tangent_of, strict=True):
            made = forward.values[block.outputs[output]]
            tangents[tangent] = made if made.is_shard else PARTIAL
        return self.graph(block, arrive | tangents)

    def _best(self, graph: OpGraph, op: Op, values: dict[str, Placement], dims: dict[str, int]) -> Rule:
        whole = all(values[name].is_replicate for name in op.inputs)
        candidates = rules_along(graph, op, self.along.exchange)
        if whole:
            start = self._start(graph, op, dims, candidates)
            rule = start if start is not None and op.kind in _STARTS else _whole(op)
            if start is not None and rule is not start:  # carries the sequence on, uncut
                dims.update((out, int(p[1:])) for out, p in zip(op.outputs, start[1], strict=True) if p[0] == "S")
            return rule
        ranked = [(self._preference(graph, op, rule, values), rule) for rule in candidates]
        cost, rule = min(ranked)
        if cost[0] == float("inf"):
            found = ", ".join(f"{name} {list(graph.values[name].fixed)}={values[name]}" for name in op.inputs)
            raise LegalityError(
                f"fix cp={self.along.size}",
                f"expected ops that leave positions of a sequence apart, but {op.target} of {graph.name} "
                f"({op.source or 'source unknown'}) has no rule for {found}",
                "Pin cp=1 for this model.",
            )
        return rule

    def _start(self, graph: OpGraph, op: Op, dims: dict[str, int], candidates: tuple[Rule, ...]) -> Rule | None:
        """The rule that cuts operands with a known sequence along it, and some result with them."""
        for rule in candidates:
            cuts = [(n, t) for n, t in zip(op.inputs, rule[0], strict=True) if t != "R"]
            follows = bool(cuts) and all(t == f"S{dims.get(name, '-')}" for name, t in cuts)
            even = all(
                t[0] != "S" or self._divides(graph.values[name], int(t[1:]))
                for name, t in zip(op.inputs + op.outputs, rule[0] + rule[1], strict=True)
            )
            if follows and even and any(t[0] == "S" for t in rule[1]):
                return rule
        return None

    def _preference(
        self, graph: OpGraph, op: Op, rule: Rule, values: dict[str, Placement]
    ) -> tuple[float, int, int, float, int]:
        """Bytes to move, results that are whole, cuts of what has another length than the batch's sequences (heads,
        where an addend may be cut along any dim), elements computed, dims that are cut; infinite for a rule that is not
        open. Of a product of queries and keys queries, the earlier dim, stay cut."""
        moved = 0.0
        for name, text in zip(op.inputs, rule[0], strict=True):
            source, target, value = values[name], Placement.parse(text), graph.values[name]
            fixed = (name in graph.routed or self._spread(graph, name)) and source != target
            if fixed or not is_reachable(source, target) or not self._may(op, rule, value, source, target):
                return _CLOSED
            moved += TRAFFIC[kind_between(source, target)] * value.nbytes(self.rows)
        whole, astray, computed, dims = 0, 0, 0.0, 0
        for name, text in zip(op.outputs, rule[1], strict=True):
            value, placement = graph.values[name], Placement.parse(text)
            odd = placement.is_shard and (name in graph.by_expert or not self._divides(value, placement.dim))
            if placement != shard(0) if self._spread(graph, name) else odd:
                return _CLOSED
            whole += placement.is_replicate
            astray += placement.is_shard and _row(value, placement.dim) not in self.lengths
            dims += max(placement.dim, 0)
            computed += value.nbytes(self.rows) * (0.5 if placement.is_shard else 1.0)
        return (moved, whole, astray, computed, dims)

    def _may(self, op: Op, rule: Rule, value: Value, source: Placement, target: Placement) -> bool:
        if source == target:
            return True
        if target.is_shard and (value.role == "param" or not self._divides(value, target.dim)):
            return False
        if not source.is_shard:
            return True
        if not target.is_replicate:
            return False
        product = op.kind == "matmul" and any(text[0] == "S" for text in rule[0])
        return product or not value.dtype.startswith(("float", "bfloat", "complex"))


def _whole(op: Op) -> Rule:
    return ("R",) * len(op.inputs), ("R",) * len(op.outputs)


def _forward_of(graph: OpGraph) -> OpGraph:
    return replace(graph, steps=tuple(step for step in graph.steps if step.phase == "forward"))
