"""The traced outer graph of one stage: its own steps, with placeholders where values come from another stage."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from hpsearch.graph import OpGraph
from hpsearch.plan.stages import Stage

VALUE = "value"
"""Key of a placeholder's meta: the value it stands for, where that is not called as the placeholder is."""


def stage_graph(traced: fx.Graph, stage: Stage) -> fx.Graph:
    """`traced`, the whole outer graph, cut down to the steps of `stage`. Names of nodes stay.

    Operands are those of the stage's facts: an addition of gradients may have others than in the whole graph.
    """
    outer = stage.graph.outer
    found, nodes = fx.Graph(), {node.name: node for node in traced.nodes}
    by_value: dict[str, fx.Node] = {}
    for name in _arrivals(outer):
        maker, _, index = name.partition(".")
        node = found.create_node("placeholder", name.replace(".", "_r"), name=name.replace(".", "_r"))
        value = nodes[maker].meta["val"]
        node.meta = {"val": value[int(index)] if index else value, VALUE: name}
        by_value[name] = node
    for step in outer.steps:
        _copy(found, nodes[step.name], step.inputs, by_value)
    return found


def _arrivals(outer: OpGraph) -> list[str]:
    return [name for name, value in outer.values.items() if value.role != "op"]


def _copy(graph: fx.Graph, node: fx.Node, operands: tuple[str, ...], by_value: dict[str, fx.Node]) -> None:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    names = iter(operands)
    swapped: list[Any] = [by_value[next(names)] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(swapped, spec)
    copy = graph.create_node("call_function", node.target, tuple(args), dict(kwargs), node.name)
    copy.meta = dict(node.meta)
    by_value[node.name] = copy
    for user in node.users:
        if user.target is operator.getitem:
            item = graph.create_node("call_function", operator.getitem, (copy, user.args[1]), {}, user.name)
            item.meta = dict(user.meta)
            by_value.setdefault(f"{node.name}.{user.args[1]}", item)
