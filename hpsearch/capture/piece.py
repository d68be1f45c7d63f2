"""`Piece`: one joint graph in normal form, with names for everything that goes in and comes out."""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from hpsearch.capture.aot import Joint, Slot
from hpsearch.capture.normal import insert, normalise
from hpsearch.capture.probe import CallRecord

aten = torch.ops.aten


@dataclass
class Piece:
    """Names are value names: a node's name, or `name.i` for the i-th result of a node with several."""

    graph: fx.Graph
    params: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    tangents: list[str] = field(default_factory=list)
    tangent_of: list[int] = field(default_factory=list)
    input_grads: list[str | None] = field(default_factory=list)
    param_grads: dict[str, str | None] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    """Which of the original inputs are still inputs."""


def make_piece(joint: Joint, prefix: str, input_names: list[str], needs: tuple[bool, ...], keep_inputs: bool) -> Piece:
    """Normalises `joint` and names its ends. FQNs lose `prefix`; what is not under it is dropped.

    Inputs nobody reads are dropped unless `keep_inputs`; an input that wants a gradient but does not influence the
    outputs gets a gradient of zeros.
    """
    graph = joint.graph
    ends = dict(zip((n for n in graph.nodes if n.op == "placeholder"), joint.placeholders, strict=True))
    results = _results(joint, ends, needs, prefix)
    normalise(graph)
    _drop_foreign(graph, ends, prefix)
    by_slot = {slot: node for node, slot in ends.items()}
    results = dict(zip(results, graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    piece = Piece(graph)
    for index, name in enumerate(input_names):
        node = by_slot[Slot("input", index)]
        if keep_inputs or node.users:
            _rename(node, name)
            piece.kept.append(index)
            piece.inputs.append(node.name)
            grad = results.get(Slot("input_grad", index))
            piece.input_grads.append(None if grad is None else value_name(grad))
        else:
            graph.erase_node(node)
            ends.pop(node)
    _name_state(piece, ends, results, prefix)
    piece.outputs = [value_name(n) for slot, n in results.items() if slot.kind == "output"]
    return piece


def _results(joint: Joint, ends: dict[fx.Node, Slot], needs: tuple[bool, ...], prefix: str) -> list[Slot]:
    """Rewrites the output node to a flat list of wanted results, and says what each is."""
    graph = joint.graph
    output = graph.output_node()
    inputs = {slot.key: node for node, slot in ends.items() if slot.kind == "input"}
    nodes: Any = output.args[0]
    pairs = [
        (slot, node)
        for slot, node in zip(joint.results, nodes, strict=True)
        if slot.kind != "param_grad" or slot.key.startswith(prefix)
    ]
    found = {slot for slot, _ in pairs}
    for index, need in enumerate(needs):
        slot = Slot("input_grad", index)
        if need and slot not in found:
            with graph.inserting_before(output):
                pairs.append((slot, insert(graph, inputs[index], aten.zeros_like.default, (inputs[index],))))
    output.args = ([node for _, node in pairs],)
    return [slot for slot, _ in pairs]


def _drop_foreign(graph: fx.Graph, ends: dict[fx.Node, Slot], prefix: str) -> None:
    for node, slot in list(ends.items()):
        if slot.kind in ("param", "buffer") and not slot.key.startswith(prefix) and not node.users:
            graph.erase_node(node)
            ends.pop(node)


def _name_state(piece: Piece, ends: dict[fx.Node, Slot], results: dict[Slot, fx.Node], prefix: str) -> None:
    for node, slot in ends.items():
        if slot.kind in ("param", "buffer"):
            fqn = slot.key.removeprefix(prefix)
            _rename(node, fqn)
            (piece.params if slot.kind == "param" else piece.buffers)[fqn] = node.name
            if slot.kind == "param":
                grad = results.get(Slot("param_grad", slot.key))
                piece.param_grads[fqn] = None if grad is None else value_name(grad)
        elif slot.kind == "tangent":
            _rename(node, f"tangent_{slot.key}")
            piece.tangents.append(node.name)
            piece.tangent_of.append(slot.key)


def _rename(node: fx.Node, name: str) -> None:
    text = "".join(c if c.isalnum() else "_" for c in name)
    node._rename(text if text[:1].isalpha() else f"x_{text}")
    node.target = node.name


def value_name(node: fx.Node) -> str:
    """The name of the value that `node` stands for in `OpGraph.values`."""
    if node.op == "call_function" and node.target is _GETITEM:
        return f"{node.args[0]}.{node.args[1]}"
    return node.name


_GETITEM = operator.getitem


def block_input_names(record: CallRecord) -> list[str]:
    """Names of a block's distinct tensor arguments, from the signature of its forward."""
    positional = _positional(record.module)
    args, kwargs = pytree.tree_unflatten(record.leaves, record.in_spec)
    names: dict[int, str] = {}
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            keys = [getattr(p, "idx", getattr(p, "key", getattr(p, "name", ""))) for p in path[1:]]
            if path[0].idx == 0:  # type: ignore[union-attr]
                keys[0] = positional[keys[0]] if keys[0] < len(positional) else f"arg{keys[0]}"
            names.setdefault(id(leaf), "_".join(str(k) for k in keys))
    return [names[id(t)] for t in record.tensors]


def _positional(module: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]


def drop_call_inputs(outer: fx.Graph, kept: dict[int, list[int]]) -> None:
    """Leaves only the inputs that call i's class kept."""
    for node in outer.nodes:
        if node.target is torch.ops.hpsearch.block.default:
            inputs: Any = node.args[0]
            node.args = ([inputs[i] for i in kept[node.args[1]]], node.args[1])
