"""What a loss is over micro-batches, proved from the graph: their mean, their sum, or neither.

Every forward value gets a `Nature`, by the rules of its op. A rule is what runs on pieces of one mesh axis, and an axis
that cuts the rows cuts like micro-batches do. So a value that reaches `S` without communication is made of each row on
its own, and one that reaches `P` is a sum over rows. How numbers baked into arguments follow the rows shows in two
traces. What is not proved this way (a norm over the batch, a divisor made of data) is `whole`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from hpsearch.capture.batch import COUNT
from hpsearch.capture.read import Rows, matched
from hpsearch.capture.targets import counted_targets
from hpsearch.graph import Call, ModelGraph, Op, OpGraph, Rule, Targets, Value

_SCALES = {"aten.mul.Tensor": 1, "aten.mul.Scalar": 1, "aten.div.Tensor": -1, "aten.div.Scalar": -1}
"""Ops with a number, and the power in which it stands in the result."""
_MEANS = ("aten.mean.default", "aten.mean.dim")
_FILLS = (
    "aten.full.default", "aten.zeros.default", "aten.ones.default", "aten.empty.memory_format",
    "aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default", "aten.new_empty.default",
)  # fmt: skip
"""Ops whose results are alike everywhere, and read nothing of a tensor but its dtype."""
_SIZES = ("size", "shape", "N")
"""Names of arguments that state a shape, and follow the rows because the tensor does."""


@dataclass(frozen=True)
class Nature:
    """How a value follows the rows.

    `S0`: rows^degree times something of each row, stacked on that dim. `P`: rows^degree times a sum over rows.
    `R`: the same for every micro-batch. A constant is also rows^-1 times its sum over rows.
    """

    placement: str
    degree: int = 0
    targets: frozenset[Targets] = frozenset()
    """Counts of valid targets that it was divided by, each of which must be equal in all micro-batches."""


Natures = dict[str, Nature | None]
"""None: nothing is proved of the value."""


def loss_of(
    graph: ModelGraph, first: Mapping[str, fx.Graph], second: Mapping[str, fx.Graph], rows: Rows
) -> tuple[str, Targets | None]:
    """`ModelGraph.loss_reduction` and `ModelGraph.targets`, from the normal-form graphs at two row counts."""
    ratio = rows.second / rows.first
    pairs = {name: matched(name, first[name], second[name]) for name in first}
    blocks: dict[str, tuple[OpGraph, Natures]] = {}
    for name, block in graph.blocks.items():
        blocks[name] = (block, _Prover(block, pairs[name], ratio, {}).natures())
    outer = graph.outer
    found = _Prover(outer, pairs["outer"], ratio, blocks).natures()
    loss = outer.outputs[outer.tangent_of[0]] if outer.tangent_of else outer.outputs[0]
    nature = found.get(loss)
    if nature is not None and (nature.placement, nature.degree) in (("P", -1), ("R", 0)):
        if not nature.targets:
            return "mean", None
        if len(nature.targets) == 1:
            return "mean_over_targets", next(iter(nature.targets))
    readers = _readers(outer, COUNT)
    if nature == Nature("P"):
        return ("sum_over_count" if loss in readers else "sum"), None
    # Who divides every addend by a count of the whole batch says that it adds up.
    believed = _Addends(outer, pairs["outer"]).are_counted(loss)
    return ("sum_over_count" if believed else "whole"), None


def _readers(graph: OpGraph, name: str) -> set[str]:
    """`name` and every value that depends on it."""
    found = {name}
    for step in graph.steps:
        if found.intersection(step.inputs):
            found.update(step.outputs)
    return found


class _Addends:
    """Whether a loss is a sum of things that are each divided by the count, and of nothing else."""

    def __init__(self, graph: OpGraph, pairs: list[tuple[fx.Node, fx.Node]]) -> None:
        self.graph = graph
        self.nodes = {a.name: (a, b) for a, b in pairs if a.target is not operator.getitem}
        leaves = {value.name for value in graph.values.values() if value.role in ("input", "param", "buffer")}
        self.others = leaves - {COUNT}
        for step in graph.steps:
            if self.others.intersection(step.inputs):
                self.others.update(step.outputs)
        self.counts = _readers(graph, COUNT) - self.others
        """Values made of the count and of nothing else."""

    def are_counted(self, value: str) -> bool:
        step = self.graph.producer.get(value)
        if not isinstance(step, Op) or any(a != b for _, a, b in _arguments(*self.nodes[step.name])):
            return False
        if step.target == "aten.div.Tensor" and len(step.inputs) == 2:
            return step.inputs[1] in self.counts and step.inputs[0] in self.others
        # A number that is added is in no tensor, but would be added once for each micro-batch.
        sums = tuple("P" for _ in step.inputs), tuple("P" for _ in step.outputs)
        return sums in self.graph.rules_of(step) and all(map(self.are_counted, step.inputs))


@dataclass(frozen=True)
class _Prover:
    graph: OpGraph
    pairs: list[tuple[fx.Node, fx.Node]]
    ratio: float
    """Rows of the second trace over those of the first."""
    blocks: dict[str, tuple[OpGraph, Natures]]

    def natures(self) -> Natures:
        found: Natures = {}
        nodes = {a.name: (a, b) for a, b in self.pairs if a.target is not operator.getitem}
        for value in self.graph.values.values():
            if value.role in ("input", "param", "buffer"):
                text = _batch_cut(value) if value.role == "input" else "R"
                found[value.name] = None if text is None else Nature(text)
        for step in self.graph.steps:
            if step.phase == "backward":
                continue
            if isinstance(step, Call):
                found |= self._call(step, found)
            else:
                found |= self._op(step, *nodes[step.name], found)
        return found

    def _call(self, call: Call, found: Natures) -> Natures:
        block, inside = self.blocks[call.block]
        is_as_assumed = all(found[v] == inside[name] for v, name in zip(call.inputs, block.inputs, strict=True))
        return {
            out: inside.get(name) if is_as_assumed else None
            for out, name in zip(call.outputs, block.outputs, strict=True)
        }

    def _op(self, op: Op, node: fx.Node, twin: fx.Node, found: Natures) -> Natures:
        nothing: Natures = dict.fromkeys(op.outputs)
        given = [found.get(name) for name in op.inputs]
        known = [nature for nature in given if nature is not None]
        power = self._power(op, node, twin)
        if len(known) < len(given) or power is None:
            return nothing
        if op.target in _MEANS and _averages_rows(node, self.graph.values[op.inputs[0]], known[0]):
            return {op.outputs[0]: Nature("P", known[0].degree - 1, known[0].targets)}
        if op.target == "aten.div.Tensor" and [n.placement for n in known] == ["P", "P"]:
            targets = counted_targets(self.graph, {a.name: a for a, _ in self.pairs}, op.inputs[1])
            if targets is None or known[0] != Nature("P"):
                return nothing
            return {op.outputs[0]: Nature("P", -1, frozenset({targets}))}
        rule = self._rule(op, known)
        degree = self._degree(op, known, rule[0]) if rule else None
        if rule is None or degree is None or ((power or degree) and "R" in rule[1]):
            return nothing
        targets_of = frozenset().union(*(nature.targets for nature in known))
        return {
            name: Nature(text, degree + power, targets_of) if self._is_whole_rows(name, text) else None
            for name, text in zip(op.outputs, rule[1], strict=True)
        }

    def _is_whole_rows(self, name: str, text: str) -> bool:
        cut = _batch_cut(self.graph.values[name])
        return cut is not None and (text == cut or (cut == "R" and text == "P"))

    def _rule(self, op: Op, given: list[Nature]) -> Rule | None:
        """How the op runs on pieces without communication: the first rule that takes what is given.

        Beside a sum a constant may be a sum too.
        """
        expands = op.target == "aten.expand.default" and given[0].placement == "R"
        cut = _batch_cut(self.graph.values[op.outputs[0]])
        plain = all(nature.placement != "P" and not nature.degree for nature in given)
        if cut is not None and plain and (expands or op.target in _FILLS):
            return tuple(nature.placement for nature in given), (cut,)  # all rows alike
        sums = any(nature.placement == "P" for nature in given)
        for rule in self.graph.rules_of(op):
            pairs = zip(rule[0], given, strict=True)
            if all(w == n.placement or (sums and n.placement == "R" and w == "P") for w, n in pairs):
                return rule
        return None

    def _degree(self, op: Op, given: list[Nature], wanted: tuple[str, ...]) -> int | None:
        """The power of the rows in the result; None where the op is not linear in what has one."""
        if "P" in wanted:
            degrees = {n.degree - (n.placement == "R") for w, n in zip(wanted, given, strict=True) if w == "P"}
            others = [n.degree for w, n in zip(wanted, given, strict=True) if w != "P"]
            return degrees.pop() if len(degrees) == 1 and not any(others) else None
        if not any(n.degree for n in given):
            return 0
        linear = tuple("P" if n.degree else "R" for n in given)
        degrees = {n.degree for n in given if n.degree}
        is_linear = len(degrees) == 1 and any(wanted == linear for wanted, _ in self.graph.rules_of(op))
        return degrees.pop() if is_linear else None

    def _power(self, op: Op, node: fx.Node, twin: fx.Node) -> int | None:
        """The power of the rows in the op's numbers; None where one follows the rows in a way that proves nothing."""
        power = 0
        for name, a, b in _arguments(node, twin):
            if a == b or name in _SIZES:
                continue
            sign = _SCALES.get(op.target)
            if sign is None or isinstance(a, bool) or not isinstance(a, (int, float)) or not a:
                return None
            if isclose(b / a, self.ratio, rel_tol=1e-12):
                power += sign
            elif isclose(b / a, 1 / self.ratio, rel_tol=1e-12):
                power -= sign
            else:
                return None
        return power


def _batch_cut(value: Value) -> str | None:
    """`S` of the dim that is made of rows alone, `R` without rows; None where rows are mixed with something else."""
    if not value.batch_dims:
        return "R"
    whole = [dim for dim in value.batch_dims if value.fixed[dim] == 0]
    return f"S{whole[0]}" if len(whole) == len(value.batch_dims) == 1 else None


def _averages_rows(node: fx.Node, value: Value, nature: Nature) -> bool:
    """Whether a mean goes over the dim of the rows."""
    if not nature.placement.startswith("S"):
        return False
    dims: Any = node.args[1] if len(node.args) > 1 else None
    rank = len(value.fixed)
    return not dims or int(nature.placement[1:]) in {dim % rank for dim in dims}


def _arguments(node: fx.Node, twin: fx.Node) -> list[tuple[str, Any, Any]]:
    """(name of the argument, its number in one trace, in the other); tensors are left out."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    found = []
    given = [*zip(names, node.args, twin.args, strict=False)]
    given += [(name, value, twin.kwargs[name]) for name, value in node.kwargs.items()]
    for name, first, second in given:
        leaves = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
        found += [(name, a, b) for a, b in leaves if not isinstance(a, fx.Node)]
    return found
