"""One traced graph, from global tensors to what a rank does: a list of statements in the traced order.

Each value keeps the layout in which its producer leaves it. An op that needs another layout reads a copy that is made
right before its first reader, once for each (value, layout, phase); backward never reads forward's copies.
"""

from __future__ import annotations

import builtins
import keyword
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from hpsearch.errors import InternalError, LoweringError
from hpsearch.graph import Call, Op, OpGraph
from hpsearch.graph.scaled import Formats
from hpsearch.layout import Layout, Mesh
from hpsearch.lower import expert_calls
from hpsearch.lower.context_calls import CONTEXT_FUNCTIONS, context_axis, context_call, context_sent
from hpsearch.lower.dropout import number_of
from hpsearch.lower.localize import localize
from hpsearch.lower.redistribution import redistribute_value
from hpsearch.lower.render import Local, render, render_call
from hpsearch.lower.scaled import emit_scaled
from hpsearch.lower.stage_graph import VALUE
from hpsearch.lower.statement import LocalValue, Sent, Statement
from hpsearch.plan.decisions import GraphDecisions

DROPOUT = torch.ops.aten.native_dropout.default


@dataclass(frozen=True)
class LocalGraph:
    graph: OpGraph
    statements: tuple[Statement, ...]
    values: dict[str, LocalValue]
    """Value name of the traced graph → the local tensor as its producer leaves it."""

    def name(self, value: str) -> str:
        return self.values[value].name

    def layout(self, value: str) -> Layout:
        return self.values[value].layout


def localize_graph(
    decisions: GraphDecisions,
    traced: fx.Graph,
    mesh: Mesh,
    scaled: Mapping[str, Formats] | None = None,
    *,
    rows: int,
) -> LocalGraph:
    """A graph (`decisions.graph` are its facts, `traced` has its arguments) as each rank runs it, at `rows` of a
    micro-batch; `scaled`: products in 8 bits, with the formats of their operands.

    Raises LoweringError for a cut that is not even.
    """
    work = _Localization(decisions, mesh, scaled or {}, rows)
    for node in traced.nodes:
        work.visit(node)
    return LocalGraph(decisions.graph, tuple(work.statements), work.values)


class _Localization:
    def __init__(self, decisions: GraphDecisions, mesh: Mesh, scaled: Mapping[str, Formats], rows: int) -> None:
        self.graph, self.decisions, self.mesh, self.scaled, self.rows = decisions.graph, decisions, mesh, scaled, rows
        self.steps = {step.name: step for step in self.graph.steps}
        self.spread = expert_calls.spread_axes(decisions)
        self.statements: list[Statement] = []
        self.values: dict[str, LocalValue] = {}
        self.copies: dict[tuple[str, Layout, str], LocalValue] = {}
        self.results: dict[str, str] = {}
        """Traced node → value, for nodes that are values."""

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._define(node.name, node.meta.get(VALUE, node.name), node.meta["val"])
        elif node.op == "call_function" and node.target is operator.getitem:
            return  # named where its tuple is made
        elif node.op == "call_function":
            step = self.steps.get(node.name)
            if step is None:
                raise InternalError(
                    f"{self.graph.name}.{node.name}", "expected a step of that name in the graph's facts"
                )
            if isinstance(step, Call):
                self._call(node, step)
            else:
                self._op(node, step)
        elif node.op != "output":
            raise InternalError(f"{self.graph.name}.{node.name}", f"expected a normal-form graph, but found {node.op}")

    def _define(self, node: str, value: str, tensor: torch.Tensor) -> str:
        """Records what `node` (a traced node's name) leaves on this rank; returns its local name."""
        shape, dtype = self._shape(value, tensor), str(tensor.dtype).removeprefix("torch.")
        layout = self.decisions.made[value]
        self._check_even(node, shape, layout)
        per_row = self.graph.values[value].per_row
        self.values[value] = LocalValue(local_name(node), shape, dtype, layout, per_row)
        self.results[node] = value
        return self.values[value].name

    def _shape(self, value: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Of the whole tensor; rows of experts with a capacity are as many as these have slots, not as were traced."""
        padded = self.graph.slots and value in self.graph.routed
        return self._padded_shape(value) if padded else tuple(tensor.shape)

    def _padded_shape(self, value: str) -> tuple[int, ...]:
        return self.graph.values[value].shape(self.rows)

    def _check_even(self, name: str, shape: tuple[int, ...], layout: Layout) -> None:
        left = list(shape)
        for axis, placement in layout:
            size = self.mesh.size(axis)
            if not placement.is_shard:
                continue
            if placement.dim >= len(left) or left[placement.dim] % size:
                raise LoweringError(
                    f"{self.graph.name}.{name}",
                    f"dim {placement.dim} of shape {list(shape)} must divide by {axis}={size} under layout {layout}",
                    "Choose another degree or layout.",
                )
            left[placement.dim] //= size

    def fetch(self, value: str, layout: Layout, phase: str) -> LocalValue:
        """The local tensor of `value` in `layout`, redistributed when its producer leaves another."""
        source = self.values[value]
        if source.layout == layout:
            return source
        if value in self.graph.routed:
            raise LoweringError(
                f"{self.graph.name}.{value}",
                f"expected rows of experts as they were routed, {source.layout}, but {layout} is read",
                "Choose the rules that go with the router's.",
            )
        key = value, layout, phase
        if key not in self.copies:
            suffix = "_".join(f"{axis}_{p}" for axis, p in layout) or "R"
            name = f"{source.name}__{suffix}" + ("__b" if phase == "backward" else "")
            self.statements += redistribute_value(
                source, layout, self.mesh, phase=phase, what=f"{self.graph.name}/{value}", name=name
            )
            self.copies[key] = replace(source, name=name, layout=layout)
        return self.copies[key]

    def _local_shape(self, value: LocalValue) -> tuple[int, ...]:
        return value.layout.local_shape(value.shape, self.mesh.sizes)

    def _operands(self, step: Op | Call) -> list[LocalValue]:
        return [self.fetch(read.value, read.layout, step.phase) for read in self.decisions.reads(step)]

    def _op(self, node: fx.Node, op: Op) -> None:
        operands = self._operands(op)
        for operand in operands:
            self._check_even(f"{op.name} (operand {operand.name})", operand.shape, operand.layout)
        made = [t for t in _slots(node) if isinstance(t, torch.Tensor)]
        shapes = [self._shape(value, t) for value, t in zip(op.outputs, made, strict=True)]
        outputs = [self._result_shape(v, shape, operands) for v, shape in zip(op.outputs, shapes, strict=True)]
        if op.name in self.scaled:
            (name,) = self._define_results(node, op.outputs)
            formats = self.scaled[op.name]
            self.statements += emit_scaled(self.graph, op, formats, operands, self.rows, name, self.mesh)
            return
        args, kwargs = self._with_names(node, op, operands)
        function = expert_calls.function_of(self.decisions, op)
        along = context_axis(self.decisions, op, self.mesh)
        sent: tuple[Sent, ...] = ()
        if node.target is DROPOUT:
            call = self._dropout(op, args)
        elif function is not None:
            more = expert_calls.where(self.decisions, op, self._padded_shape, self.mesh)
            call = f"{function}({', '.join(map(render, args))}{more})"
        elif along is not None:
            call = context_call(along, op, args, kwargs, self.mesh)
            sent = context_sent(self.decisions, op, operands[0], self.mesh)
        else:
            here = [self._local_shape(o) for o in operands]
            call = render_call(*localize(node.target, args, kwargs, outputs, here))
        names = self._define_results(node, op.outputs)
        if function is not None:
            sent = expert_calls.sent(self.decisions, op, lambda value: self.values[value].shape, self.mesh)
        left_side = (
            names[0]
            if isinstance(node.meta["val"], torch.Tensor)
            else ", ".join(names) + ("," if len(names) == 1 else "")
        )
        self.statements.append(
            Statement(
                writes=tuple(n for n in names if n != "_"),
                text=f"{left_side} = {call}",
                reads=tuple(operand.name for operand in operands),
                phase=op.phase,
                kind="view" if is_view(node.target) else "op",
                comment=f"{list(shapes[0])} -> {render(list(outputs[0]))}" if shapes else "",
                inside=sent,
                op=op.name,
            )
        )

    def _result_shape(self, value: str, shape: tuple[int, ...], operands: list[LocalValue]) -> tuple[int, ...]:
        """Of a rank's piece of a result. Rows of experts that are spread are as many as an operand has."""
        layout = self.decisions.made[value]
        found = layout.local_shape(shape, self.mesh.sizes)
        if value in self.graph.routed and shape and any(axis in self.spread for axis, _ in layout):
            like = next((o.name for o in operands if o.shape[:1] == shape[:1]), None)
            return found if like is None else (Local(f"{like}.shape[0]"), *found[1:])  # type: ignore[return-value]
        return found

    def _dropout(self, op: Op, args: tuple[Any, ...]) -> str:
        """Numbers by place in the tensor of the whole batch, which the call is told."""
        value, layout = self.graph.values[op.inputs[0]], self.decisions.made[op.outputs[0]]
        dims, shape = [], self.values[op.inputs[0]].shape
        for dim, (fixed, per_row) in enumerate(zip(value.fixed, value.per_row, strict=True)):
            axes = tuple(axis for axis, placement in layout if placement.is_shard and placement.dim == dim)
            if fixed and per_row:
                raise LoweringError(
                    f"{self.graph.name}.{op.name}",
                    f"expected dim {dim} of dropout to grow with rows or not, but it is {fixed} + {per_row} a row",
                    "Set its probability to 0.",
                )
            dims.append((shape[dim], per_row, axes))
        x, p, train = args
        number = number_of(f"{self.graph.name}.{op.name}")
        return f"dropout({x}, {p if train else 0.0}, draws, {number}, {tuple(dims)})"

    def _define_results(self, node: fx.Node, values: tuple[str, ...]) -> list[str]:
        """Local names of the results, one for each slot of the result; `_` where there is no tensor or no reader."""
        if isinstance(node.meta["val"], torch.Tensor):
            return [self._define(node.name, values[0], node.meta["val"])]
        picks: dict[int, list[str]] = {}
        for user in node.users:
            if user.target is operator.getitem:
                picks.setdefault(user.args[1], []).append(user.name)  # type: ignore[arg-type]
        names, place = [], 0
        for index, slot in enumerate(_slots(node)):
            if not isinstance(slot, torch.Tensor):
                names.append("_")
                continue
            found = picks.get(index, [])
            names.append(self._define(found[0], values[place], slot) if found else "_")
            self.results.update((name, values[place]) for name in found)
            place += 1
        return names

    def _with_names(self, node: fx.Node, op: Op, operands: list[LocalValue]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The node's arguments with local names in place of tensors; these stand in the order of `op.inputs`."""
        nodes = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
        given = tuple(self.results[n.name] for n in nodes)
        if given != op.inputs:
            raise InternalError(f"{self.graph.name}.{op.name}", f"expected operands {op.inputs}, but traced {given}")
        names = iter(operands)

        def swap(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return Local(next(names).name)
            if isinstance(arg, (list, tuple)):
                return type(arg)(swap(a) for a in arg) if type(arg) in (list, tuple) else [swap(a) for a in arg]
            return arg

        args = tuple(swap(a) for a in node.args)
        return args, {key: swap(value) for key, value in node.kwargs.items()}

    def _call(self, node: fx.Node, call: Call) -> None:
        """A block runs in the layouts of its class; what it leaves has the layout of the class's own results."""
        operands = self._operands(call)
        names = self._define_results(node, call.outputs)
        names = [name if name != "_" else f"{node.name}__{i}" for i, name in enumerate(names)]
        self.statements.append(
            Statement(
                writes=tuple(names),
                text=f"{', '.join(names)} = {call.block}[{call.instance}].{call.phase}",
                reads=tuple(operand.name for operand in operands),
                phase=call.phase,
                kind="call",
                call=self.graph.calls.index(call),
            )
        )


def _slots(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def is_view(target: Any) -> bool:
    """Whether the op's result shares its operand's memory, or is a free reshape that the traced graph has as a view."""
    if target in (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default):
        return True
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


_PRELUDE = (
    "torch", "c10d", "einsum", "attention", "attention_backward", "split", "join", "cut", "mask", "pad", "trim",
    *expert_calls.FUNCTIONS.values(), *expert_calls.PADDED.values(), *CONTEXT_FUNCTIONS, "split_rows", "join_rows",
    "cut_rows", "extent", "groups", "coordinate", "dropout", "draws", "amax", "scaled_einsum",
    "device", "params", "buffers", "inputs", "saved", "kept", "tangents", "given", "made", "reduce_loss",
)  # fmt: skip
RESERVED = frozenset((*_PRELUDE, *keyword.kwlist, *dir(builtins)))
"""Names that emitted functions use for something else."""


def local_name(name: str) -> str:
    """The Python name of a traced node."""
    return f"{name}_" if name in RESERVED else name
