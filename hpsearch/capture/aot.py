"""The one file that touches AOTAutograd's private joint export, checked against torch 2.13.

What we rely on, each held by tests/capture/test_aot.py: `aot_export_joint_with_descriptors` traces forward and backward
into one graph; placeholders and the output node carry `meta["desc"]`; `meta["val"]` is a fake tensor;
`meta["seq_nr"]` is equal for a forward node and the backward nodes that differentiate it;
`meta["custom"]` is copied from `torch.fx.traceback.current_meta`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.utils import _pytree as pytree

from hpsearch.capture.twin import constant_of
from hpsearch.errors import CaptureError


@dataclass(frozen=True)
class Slot:
    """What a placeholder or a result of a joint graph is.

    kind: `param`, `buffer` (key: FQN), `input`, `output` (key: index), `tangent` (key: index of the output),
    `param_grad` (key: FQN), `input_grad` (key: index of the input), `none` (the gradient of what needs none; dropped).
    """

    kind: str
    key: Any


@dataclass(frozen=True)
class Joint:
    graph: fx.Graph
    placeholders: tuple[Slot, ...]
    results: tuple[Slot, ...]
    """One for each element of the output node's list."""


def export_joint(
    module: nn.Module, args: tuple[torch.Tensor, ...], decompositions: dict[Any, Callable[..., Any]]
) -> Joint:
    """The joint graph of `module(*args)`, a tuple of tensors; parameters and arguments are fake tensors of one mode.

    Raises CaptureError where the module writes into a buffer or an argument.
    """
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, module, args, decompositions=decompositions)
        graph = joint.graph_module.graph
    placeholders = tuple(_input_slot(n.meta["desc"]) for n in graph.nodes if n.op == "placeholder")
    results = tuple(_output_slot(desc) for desc in graph.output_node().meta["desc"])
    _inline_constants(joint.graph_module)
    return _merge_tied(Joint(graph, placeholders, results), module)


def _merge_tied(joint: Joint, module: nn.Module) -> Joint:
    """Torch makes one placeholder a name; a tied tensor gets one, under its first name, and one gradient, the sum."""
    state = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first = {id(tensor): name for name, tensor in reversed(state)}
    names = {name: first[id(tensor)] for name, tensor in state}
    nodes = [n for n in joint.graph.nodes if n.op == "placeholder"]
    kept: dict[Slot, fx.Node] = {}
    for node, slot in zip(nodes, joint.placeholders, strict=True):
        slot = Slot(slot.kind, names[slot.key]) if slot.kind in ("param", "buffer") else slot
        if slot in kept:
            node.replace_all_uses_with(kept[slot])
            joint.graph.erase_node(node)
        else:
            kept[slot] = node
    grads: dict[Slot, fx.Node] = {}
    output = joint.graph.output_node()
    for slot, node in zip(joint.results, pytree.tree_leaves(output.args[0]), strict=True):
        slot = Slot(slot.kind, names[slot.key]) if slot.kind == "param_grad" else slot
        if not isinstance(node, fx.Node):
            continue
        if slot in grads:
            with joint.graph.inserting_before(output):
                add = torch.ops.aten.add.Tensor
                total = joint.graph.create_node("call_function", add, (grads[slot], node), name="add")
            total.meta = dict(node.meta)
            node = total
        grads[slot] = node
    output.args = (list(grads.values()),)
    return Joint(joint.graph, tuple(kept), tuple(grads))


def _input_slot(desc: Any) -> Slot:
    match desc:
        case descriptors.ParamAOTInput(target):
            return Slot("param", target)
        case descriptors.BufferAOTInput(target):
            return Slot("buffer", target)
        case descriptors.PlainAOTInput(idx):
            return Slot("input", idx)
        case descriptors.TangentAOTInput(descriptors.PlainAOTOutput(idx)):
            return Slot("tangent", idx)
    raise CaptureError(
        f"model input {desc.expr()}",
        "expected parameters, buffers and plain tensors, but torch made a special input of it",
        "Pass plain tensors that do not share memory.",
    )


def _output_slot(desc: Any) -> Slot:
    match desc:
        case None:
            return Slot("none", None)
        case descriptors.PlainAOTOutput(idx):
            return Slot("output", idx)
        case descriptors.GradAOTOutput(of):
            slot = _input_slot(of)
            return Slot(f"{slot.kind}_grad", slot.key)
        case descriptors.InputMutationAOTOutput(of):
            slot = _input_slot(of)
            raise CaptureError(
                f"{slot.kind} {str(slot.key).partition('.')[2] or slot.key}",
                "expected a training step that leaves buffers and inputs as they are, but forward writes into it",
                "BatchNorm's running statistics are such writes; use a norm without running statistics.",
            )
    raise CaptureError(f"model output {desc.expr()}", "expected a plain tensor", "Return fresh tensors, not views.")


def _inline_constants(module: fx.GraphModule) -> None:
    """Tensor constants become ops: a scalar is `aten.full`. There is no other state in a normal-form graph."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(module, node.target)
        value = constant_of(tensor)
        if value is None:
            raise CaptureError(
                f"tensor constant {node.target}",
                f"expected constants of one element, but found shape {list(tensor.shape)} made inside forward",
                "Register it as a buffer of its module.",
            )
        with graph.inserting_before(node):
            options = {"dtype": tensor.dtype, "device": torch.device("cpu")}
            full = graph.call_function(torch.ops.aten.full.default, (list(tensor.shape), value), options)
        full.meta = dict(node.meta)
        node.replace_all_uses_with(full)
        graph.erase_node(node)
