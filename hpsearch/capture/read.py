"""From normal-form fx graphs at two row counts to an `OpGraph`: facts, affine in rows, without torch."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from hpsearch.capture.piece import Piece, value_name
from hpsearch.capture.price_kind import flops_of, is_view, kind_of
from hpsearch.capture.rules import rules_for
from hpsearch.capture.scope import scope_and_source
from hpsearch.errors import CaptureError
from hpsearch.graph import Call, Op, OpGraph, Rule, Value


@dataclass(frozen=True)
class Rows:
    """The two row counts that a graph was traced at."""

    first: int
    second: int

    def affine(self, subject: str, first: int, second: int) -> tuple[int, int]:
        """(fixed, per_row) through both points. Raises CaptureError where those are not whole numbers ≥ 0."""
        per_row, rest = divmod(second - first, self.second - self.first)
        fixed = first - per_row * self.first
        if rest or per_row < 0 or fixed < 0:
            raise CaptureError(
                subject,
                f"expected fixed + per_row·rows, but found {first} at {self.first} rows and {second} at {self.second}",
                "Sizes must grow evenly with the rows of the batch.",
            )
        return fixed, per_row


@dataclass
class _Reader:
    rows: Rows
    values: dict[str, Value] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    rules: dict[tuple[Rule, ...], int] = field(default_factory=dict)

    def value(self, name: str, role: str, first: torch.Tensor, second: torch.Tensor) -> None:
        pairs = [self.rows.affine(f"value {name}", a, b) for a, b in zip(first.shape, second.shape, strict=True)]
        dtype = str(first.dtype).removeprefix("torch.")
        self.values[name] = Value(name, tuple(f for f, _ in pairs), tuple(p for _, p in pairs), dtype, role)

    def results(self, node: fx.Node, twin: fx.Node) -> tuple[str, ...]:
        first, second = node.meta["val"], twin.meta["val"]
        if isinstance(first, torch.Tensor):
            self.value(node.name, "op", first, second)
            return (node.name,)
        names = []
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            if isinstance(a, torch.Tensor):
                names.append(f"{node.name}.{index}")
                self.value(names[-1], "op", a, b)
        return tuple(names)

    def op(self, node: fx.Node, twin: fx.Node, phase: str, origin: tuple[str, str]) -> Op:
        outputs, inputs = self.results(node, twin), _inputs(node)
        if is_view(node):
            self.aliases |= dict.fromkeys(outputs, inputs[0])
        target = "hpsearch.einsum" if node.target is torch.ops.hpsearch.einsum.default else str(node.target)
        equation = str(node.args[0]) if target == "hpsearch.einsum" else ""
        flops = self.rows.affine(f"FLOPs of {node.name}", flops_of(node), flops_of(twin))
        table = self.rules.setdefault(rules_for(node), len(self.rules))
        return Op(node.name, target, inputs, outputs, phase, kind_of(node), table, flops, equation, *origin)


def read_graph(name: str, piece: Piece, twin: Piece, rows: Rows, calls: tuple[tuple[str, str], ...] = ()) -> OpGraph:
    """The facts of `piece` (traced at `rows.first`) and `twin` (at `rows.second`).

    `calls[i]` is (class, FQN prefix) of block call i. Raises CaptureError when the two graphs are not the same ops, or
    sizes are not affine.
    """
    pairs = matched(name, piece.graph, twin.graph)
    reader = _Reader(rows)
    roles = dict.fromkeys(piece.params.values(), "param") | dict.fromkeys(piece.buffers.values(), "buffer")
    roles |= dict.fromkeys(piece.inputs, "input") | dict.fromkeys(piece.tangents, "tangent")
    origins = scope_and_source(piece.graph)
    backward = _backward(piece)
    steps: list[Op | Call] = []
    for node, other in pairs:
        if node.op == "placeholder":
            reader.value(node.name, roles[node.name], node.meta["val"], other.meta["val"])
        elif node.op == "call_function" and node.target is not operator.getitem:
            phase = "backward" if node in backward else "forward"
            if node.target in _BLOCKS:
                instance = int(node.args[1])  # type: ignore[arg-type]
                outputs = reader.results(node, other)
                steps.append(Call(node.name, calls[instance][0], instance, phase, _inputs(node), outputs))
            else:
                steps.append(reader.op(node, other, phase, origins[node.name]))
    steps.sort(key=lambda s: s.phase == "backward")
    return OpGraph(
        name, reader.values, tuple(steps), piece.params, piece.buffers, tuple(piece.inputs), tuple(piece.outputs),
        tuple(piece.tangents), tuple(piece.tangent_of), tuple(piece.input_grads), piece.param_grads,
        tuple(reader.rules), reader.aliases,
    )  # fmt: skip


_BLOCKS = (torch.ops.hpsearch.block.default, torch.ops.hpsearch.block_backward.default)


def _inputs(node: fx.Node) -> tuple[str, ...]:
    found: list[str] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(value_name(n)))
    return tuple(found)


def matched(name: str, first: fx.Graph, second: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """The nodes of two graphs of the same operators, side by side. Raises CaptureError where they are not."""
    a, b = list(first.nodes), list(second.nodes)
    for x, y in zip(a, b, strict=False):
        if (x.op, x.name, str(x.target)) != (y.op, y.name, str(y.target)):
            raise CaptureError(
                f"graph {name}",
                f"expected the same operators for every batch size, but found {x.target} and {y.target}",
                "Control flow may not depend on the number of rows.",
            )
    if len(a) != len(b):
        raise CaptureError(f"graph {name}", f"expected {len(a)} nodes at more rows, but found {len(b)}")
    return list(zip(a, b, strict=True))


def _backward(piece: Piece) -> set[fx.Node]:
    """Nodes of the backward pass: those traced after the last op that the outputs need, and all below a tangent."""
    nodes = list(piece.graph.nodes)
    wanted, last = set(piece.outputs), 0
    ancestors: set[fx.Node] = set()
    for position in range(len(nodes) - 1, -1, -1):
        node: Any = nodes[position]
        if node.op != "output" and (value_name(node) in wanted or node in ancestors):
            last = max(last, position)
            ancestors.update(node.all_input_nodes)
    return set(nodes[last + 1 :])
