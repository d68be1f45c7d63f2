"""What is folded and what is not, held to the plain step each time; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpsearch.capture import CapturedGraph, capture
from hpsearch.errors import CaptureError
from tests.capture.interpreter import Interpreter
from tests.capture.models import Case
from tests.capture.test_families import plain_step


class Layer(nn.Module):
    """One residual layer; what it does may depend on its index."""

    def __init__(self, index: int = 0, by_index: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = 1.0 + index if by_index else 1.0

    def forward(self, x: Tensor, bias: Tensor | None = None, flag: bool = True) -> tuple[Tensor, Tensor | None]:
        y = torch.tanh(self.inner(x)) * self.scale
        return x + y + (0 if bias is None else bias), bias


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module], freeze_first: bool = False, bias: bool = False, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.first.requires_grad_(not freeze_first)
        self.bias = nn.Parameter(torch.randn(8)) if bias else None
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 3)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.first(x), self.bias
        for _ in range(self.times):
            for layer in self.layers:
                x, bias = layer(x, bias)
        return self.head(x)


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


def check(model: nn.Module) -> CapturedGraph:
    """Captures the model, runs the graphs, compares loss and gradients with the plain step."""
    torch.manual_seed(0)
    batch = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    case = Case(model.double(), batch, loss)
    captured = capture(case.model, batch, loss=loss, recipe="fp64")
    expected, grads = plain_step(case, batch)
    interpreter = Interpreter(captured, case.model)
    torch.testing.assert_close(interpreter.run(captured.batch.flatten(batch)), expected, rtol=1e-12, atol=0)
    assert set(interpreter.grads) == set(grads)
    for fqn, grad in grads.items():
        torch.testing.assert_close(interpreter.grads[fqn], grad, rtol=1e-10, atol=1e-14)
    return captured


def blocks(captured: CapturedGraph) -> list[str]:
    return [cls for cls, _ in captured.graph.instances]


def test_equal_layers_are_one_class_and_depth_costs_calls_only() -> None:
    few, many = check(Model([Layer() for _ in range(3)])), check(Model([Layer() for _ in range(6)]))
    assert blocks(few) == ["Layer"] * 3
    assert blocks(many) == ["Layer"] * 6
    assert len(few.graph.outer.ops) == len(many.graph.outer.ops)


def test_layers_that_depend_on_their_index_are_not_one_class() -> None:
    captured = check(Model([Layer(i, by_index=True) for i in range(3)]))
    assert blocks(captured) == []


def test_equal_layers_among_others_are_folded() -> None:
    layers: list[nn.Module] = [Layer(0), Layer(1, by_index=True), Layer(0), Layer(1, by_index=True)]
    assert blocks(check(Model(layers))) == ["Layer", "Layer#2", "Layer", "Layer#2"]


def test_an_argument_handed_through_is_no_output_and_its_gradients_add_up() -> None:
    captured = check(Model([Layer() for _ in range(3)], bias=True))
    block = captured.graph.blocks["Layer"]
    assert len(block.inputs) == 2
    assert len(block.outputs) == 1
    assert None not in block.input_grads


def test_blocks_after_a_frozen_start_still_have_gradients() -> None:
    captured = check(Model([Layer() for _ in range(3)], freeze_first=True))
    assert captured.graph.outer.param_grads["first.weight"] is None
    assert not captured.graph.params["first.weight"].trainable
    assert captured.graph.instances == (("Layer", "layers.1"), ("Layer", "layers.2"))


class SideBySide(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(torch.stack([layer(x)[0] for layer in self.layers]).sum(0))


def test_blocks_whose_inputs_all_need_no_gradient_still_have_gradients() -> None:
    captured = check(SideBySide([Layer() for _ in range(3)], freeze_first=True))
    assert blocks(captured) == ["Layer"] * 3
    assert captured.graph.blocks["Layer"].input_grads == (None,)
    assert "anchor" not in str(captured.graph.outer)


def test_a_module_called_many_times_is_traced_where_it_stands() -> None:
    captured = check(Model([Layer(), Layer()], times=3))
    assert blocks(captured) == []


def test_layers_that_share_a_parameter_are_traced_where_they_stand() -> None:
    layers = [Layer() for _ in range(3)]
    layers[2].inner.weight = layers[0].inner.weight
    captured = check(Model(list(layers)))
    assert blocks(captured) == []
    assert captured.graph.params["layers.0.inner.weight"].aliases == ("layers.2.inner.weight",)


class TwoOutputs(Layer):
    """Its second result is not part of the loss; its third is a plain value."""

    def forward(self, x: Tensor, bias: Tensor | None = None, flag: bool = True) -> Any:
        y, _ = super().forward(x, bias)
        self.extra = None
        return y, {"norm": y.square().sum(-1), "index": y.argmax(-1), "name": "a"}


class UsesFirst(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


def test_results_that_are_not_differentiated_have_no_tangent() -> None:
    captured = check(UsesFirst([TwoOutputs() for _ in range(3)]))
    block = captured.graph.blocks["TwoOutputs"]
    assert len(block.outputs) == 3
    assert block.tangent_of == (0,)


class ViewOut(Layer):
    def forward(self, x: Tensor, bias: Tensor | None = None, flag: bool = True) -> Any:
        y, _ = super().forward(x, bias)
        return y, x.view(x.shape[0], 2, 4)


class UsesViews(Model):
    def forward(self, x: Tensor) -> Tensor:
        x, extra = self.first(x), 0
        for layer in self.layers:
            x, view = layer(x)
            extra = extra + view.square().sum((1, 2), keepdim=False).unsqueeze(1)
        return self.head(x) + extra


def test_a_result_that_is_a_view_of_an_argument_passes_its_gradient() -> None:
    assert blocks(check(UsesViews([ViewOut() for _ in range(3)]))) == ["ViewOut"] * 3


def test_the_users_model_is_left_as_it_was() -> None:
    model = Model([Layer() for _ in range(3)])
    before = {n: (id(p), p.dtype) for n, p in model.named_parameters()}
    hooks = [len(m._forward_hooks) for m in model.modules()]
    capture(model, (torch.randn(4, 4), torch.tensor([0, 1, 2, 1])), loss=loss)
    assert {n: (id(p), p.dtype) for n, p in model.named_parameters()} == before
    assert [len(m._forward_hooks) for m in model.modules()] == hooks


def test_a_look_at_values_is_refused_with_its_line() -> None:
    class Branch(Layer):
        def forward(self, x: Tensor, bias: Tensor | None = None, flag: bool = True) -> Any:
            if x.sum() > 0:  # the line to name
                x = x + 1
            return super().forward(x, bias)

    with pytest.raises(CaptureError, match=r"test_fold\.py:\d+: .*if x\.sum\(\) > 0") as caught:
        capture(Model([Branch()]), (torch.randn(4, 4), torch.tensor([0, 1, 2, 1])), loss=loss)
    assert "\n" not in str(caught.value)


def test_a_buffer_that_forward_writes_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(CaptureError, match=r"^buffer 1\.running_mean"):
        capture(model, (torch.randn(4, 4), torch.tensor([0, 1, 2, 1])), loss=loss)


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(CaptureError, match="loss: expected a scalar"):
        capture(Model([Layer()]), (torch.randn(4, 4),))
