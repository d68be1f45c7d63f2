"""The normal form of a captured graph: placeholders, `call_function` nodes, one output; one spelling for each thing.

In the order they run:

    drop_aliases      detach, alias, lift_fresh, copies, views to the same shape: their input stands for them
    one_spelling      _unsafe_view and reshape → view; transposes of a matrix → t; t of t → nothing
    restore_einsum    view–mm–view, forward and both backward products → `hpsearch::einsum` on unflattened tensors
    sink_bias         view(x) + bias → view(x + bias)
    unflatten_sum     sum of a flattened tensor over its rows → sum over the dims it was flattened from
    merge_views       view of view → one view

Batch and sequence then stay dims of their own, and a split of either can be seen.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SAME_SHAPE_IS_SAME = (aten.view.default, aten.expand.default)


def normalise(graph: fx.Graph) -> None:
    """Brings `graph` to normal form, in place. Every node keeps or gets `meta["val"]`."""
    one_spelling(graph)
    drop_aliases(graph)
    restore_einsum(graph)
    sink_bias(graph)
    unflatten_sum(graph)
    merge_views(graph)
    _drop_dead(graph)
    graph.lint()


def insert(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
    """A new node where the cursor stands, with the origin of `like` and its own `meta["val"]`."""
    name = target.overloadpacket.__name__
    node = graph.create_node("call_function", target, args, kwargs, name)
    node.meta = {key: value for key, value in like.meta.items() if key != "val"}
    values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = like.meta["val"].fake_mode
    with mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.target in targets]


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _drop_dead(graph: fx.Graph) -> None:
    """A block's backward is never dead: it makes the gradients of the block's parameters."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            if node.target is torch.ops.hpsearch.block_backward.default:
                node.meta["val"] = []
            else:
                graph.erase_node(node)


def one_spelling(graph: fx.Graph) -> None:
    for node in _calls(graph, *_VIEWS):
        node.target = aten.view.default
        node.args = (node.args[0], list(shape_of(node)))
    for node in _calls(graph, aten.transpose.int, aten.permute.default, aten.numpy_T.default):
        source = node.args[0]
        if len(shape_of(node)) == 2 and _swaps(node):
            node.target, node.args = aten.t.default, (source,)
    for node in _calls(graph, aten.t.default):
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target is aten.t.default:
            _replace(node, source.args[0])  # type: ignore[arg-type]


def _swaps(node: fx.Node) -> bool:
    if node.target is aten.transpose.int:
        return {d % 2 for d in node.args[1:]} == {0, 1}  # type: ignore[operator]
    return node.target is aten.numpy_T.default or [d % 2 for d in node.args[1]] == [1, 0]  # type: ignore[union-attr,operator]


def drop_aliases(graph: fx.Graph) -> None:
    for node in _calls(graph, *_ALIASES):
        _replace(node, node.args[0])  # type: ignore[arg-type]
    for node in _calls(graph, aten.copy.default):
        _replace(node, _copied(graph, node))
    for node in _calls(graph, aten.clone.default):
        if _is_plain_copy(node):
            _replace(node, node.args[0])  # type: ignore[arg-type]
    for node in _calls(graph, *_SAME_SHAPE_IS_SAME):
        if shape_of(node) == shape_of(node.args[0]):  # type: ignore[arg-type]
            _replace(node, node.args[0])  # type: ignore[arg-type]


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What `copy(into, source)` leaves in `into`: the source in its shape and dtype."""
    source: fx.Node = node.args[1]  # type: ignore[assignment]
    dtype = node.meta["val"].dtype
    with graph.inserting_before(node):
        if source.meta["val"].dtype != dtype:
            source = insert(graph, node, aten._to_copy.default, (source,), dtype=dtype)
        if shape_of(source) != shape_of(node):
            source = insert(graph, node, aten.expand.default, (source, list(shape_of(node))))
    return source


def _is_plain_copy(node: fx.Node) -> bool:
    """A copy that does not change the strides: nothing writes in place here, so nothing needs it."""
    before = node.args[0].meta["val"]  # type: ignore[union-attr]
    return bool(before.stride() == node.meta["val"].stride())


class _Operand:
    """A matrix operand traced back to the tensor it was flattened from: groups of that tensor's dims."""

    def __init__(self, node: fx.Node) -> None:
        self.transposed = node.target is aten.t.default
        self.node: fx.Node = node.args[0] if self.transposed else node  # type: ignore[assignment]
        source = flattened_from(self.node)
        if source is not None:
            self.node = source

    @property
    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes behind the matrix's two dims, in the matrix's order."""
        shape = shape_of(self.node)
        pair = shape[:-1], shape[-1:]
        return (pair[1], pair[0]) if self.transposed else pair

    def as_matrix(self, original: fx.Node) -> None:
        """Gives up unflattening: the matrix itself is the operand."""
        self.node = original.args[0] if self.transposed else original  # type: ignore[assignment]


def flattened_from(node: fx.Node) -> fx.Node | None:
    """The tensor (…, last) that `node` is the matrix (prod(…), last) of; None if it is no such view."""
    if node.target is not aten.view.default:
        return None
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    before, after = shape_of(source), shape_of(node)
    fits = len(before) > 2 and len(after) == 2 and before[-1] == after[-1] and prod(before[:-1]) == after[0]
    return source if fits else None


def restore_einsum(graph: fx.Graph) -> None:
    for node in _calls(graph, aten.mm.default):
        a, b = _Operand(node.args[0]), _Operand(node.args[1])  # type: ignore[arg-type]
        if a.groups[1] != b.groups[0]:
            a.as_matrix(node.args[0])  # type: ignore[arg-type]
            b.as_matrix(node.args[1])  # type: ignore[arg-type]
        if a.groups[1] != b.groups[0]:
            continue
        equation = _equation(a, b)
        with graph.inserting_before(node):
            product = insert(graph, node, torch.ops.hpsearch.einsum.default, (equation, a.node, b.node))
            if shape_of(product) != shape_of(node):
                product = insert(graph, node, aten.view.default, (product, list(shape_of(node))))
        _replace(node, product)


def _equation(a: _Operand, b: _Operand) -> str:
    """Letters: rows are b, s, t, …; `d` is summed over (or, when the rows are summed over, a free dim), `f` is free."""
    rows = "bstuvwxyz"
    left, inner, right = a.groups[0], a.groups[1], b.groups[1]
    if a.transposed:  # a weight gradient: the rows are summed over
        free, shared, other = "f" if len(left) == 1 else rows[: len(left)], rows[: len(inner)], "d"
    else:
        free, shared, other = rows[: len(left)], "d" if len(inner) == 1 else "klmnop"[: len(inner)], "f"
    if len(right) > 1:
        other = "ghijq"[: len(right)]
    return f"{_order(a, free, shared)},{_order(b, shared, other)}->{free}{other}"


def _order(operand: _Operand, first: str, second: str) -> str:
    return second + first if operand.transposed else first + second


def sink_bias(graph: fx.Graph) -> None:
    for node in _calls(graph, aten.add.Tensor):
        matrix, bias = node.args[:2]
        if not isinstance(matrix, fx.Node) or not isinstance(bias, fx.Node) or node.kwargs:
            continue
        source = flattened_from(matrix)
        if source is None or len(shape_of(bias)) > 1:
            continue
        with graph.inserting_before(node):
            total = insert(graph, node, aten.add.Tensor, (source, bias))
            view = insert(graph, node, aten.view.default, (total, list(shape_of(node))))
        _replace(node, view)


def unflatten_sum(graph: fx.Graph) -> None:
    for node in _calls(graph, aten.sum.dim_IntList):
        source = flattened_from(node.args[0])  # type: ignore[arg-type]
        if source is None or list(node.args[1]) != [0] or node.kwargs:  # type: ignore[arg-type]
            continue
        with graph.inserting_before(node):
            total = insert(graph, node, aten.sum.dim_IntList, (source, list(range(len(shape_of(source)) - 1))))
            if shape_of(total) != shape_of(node):
                total = insert(graph, node, aten.view.default, (total, list(shape_of(node))))
        _replace(node, total)


def merge_views(graph: fx.Graph) -> None:
    for node in _calls(graph, aten.view.default):
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if source.target is aten.view.default:
            node.args = (source.args[0], node.args[1])
    drop_aliases(graph)
