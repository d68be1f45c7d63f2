"""Runs a captured step on real tensors, as plainly as it can be said."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from hpsearch.capture import CapturedGraph
from hpsearch.graph import OpGraph


class Interpreter:
    """Values by name for the outer graph and for every block call; gradients by FQN."""

    def __init__(self, captured: CapturedGraph, model: nn.Module) -> None:
        self.captured = captured
        self.state = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        self.grads: dict[str, torch.Tensor] = {}
        self.blocks: dict[int, dict[str, Any]] = {}

    @torch.no_grad()
    def run(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The loss; `grads` is filled."""
        graph = self.captured.graph
        values = self.ends(graph.outer, "", dict(zip(graph.outer.inputs, tensors, strict=True)))
        loss = graph.outer.outputs[0]
        values[graph.outer.tangents[0]] = None
        for step in graph.outer.steps:
            if step.phase == "backward" and values[graph.outer.tangents[0]] is None:
                values[graph.outer.tangents[0]] = torch.ones_like(values[loss])
            self.step("outer", step, values)
        self.collect(graph.outer, "", values)
        return values[loss]

    def ends(self, piece: OpGraph, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
        for local, name in {**piece.params, **piece.buffers}.items():
            values[name] = self.state[prefix + local].detach()
        return values

    def collect(self, piece: OpGraph, prefix: str, values: dict[str, Any]) -> None:
        for local, name in piece.param_grads.items():
            if name is not None:
                assert prefix + local not in self.grads
                self.grads[prefix + local] = values[name]

    def step(self, piece: str, step: Any, values: dict[str, Any]) -> None:
        if hasattr(step, "instance"):
            outputs = self.call(step, [values[v] for v in step.inputs])
        else:
            node = next(n for n in self.captured.fx[piece].nodes if n.name == step.name)
            outputs = self.apply(node, values)
        for name, value in zip(step.outputs, outputs, strict=True):
            values[name] = value

    def apply(self, node: fx.Node, values: dict[str, Any]) -> list[torch.Tensor]:
        def of(n: fx.Node) -> Any:
            return values[f"{n.args[0]}.{n.args[1]}" if n.target is operator.getitem else n.name]

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), of)
        target: Any = node.target
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        result = target(*args, **kwargs)
        return [r for r in result if r is not None] if isinstance(result, (list, tuple)) else [result]

    def call(self, call: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        piece = self.captured.graph.blocks[call.block]
        prefix = self.captured.graph.instances[call.instance][1] + "."
        if call.phase == "forward":
            values = self.ends(piece, prefix, dict(zip(piece.inputs, inputs, strict=True)))
            self.blocks[call.instance] = values
        else:
            values = self.blocks[call.instance]
            values |= dict(zip(piece.tangents, inputs, strict=True))
        for step in piece.steps:
            if step.phase == call.phase:
                self.step(call.block, step, values)
        if call.phase == "forward":
            return [values[v] for v in piece.outputs]
        self.collect(piece, prefix, values)
        return [values[v] for v in piece.input_grads if v is not None]
