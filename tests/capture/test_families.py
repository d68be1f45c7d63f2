"""A captured step, run on real tensors, is the plain model's step: loss and every gradient, in fp64."""

from __future__ import annotations

import pytest
import torch

from hpsearch.capture import capture
from hpsearch.capture.batch import COUNT, model_arguments, own_loss
from tests.capture.interpreter import Interpreter
from tests.capture.models import FAMILIES, Case

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2e-2}

NOISE = 1e-9
"""A gradient this much smaller than the largest is compared against the largest."""


def _in_recipe(case: Case) -> Case:
    for param in case.model.parameters() if case.recipe == "bf16" else ():
        param.data = param.data.bfloat16()
    if case.recipe != "fp64":
        return case
    case.model.double()
    double = lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t  # noqa: E731
    batch = case.batch
    case.batch = {k: double(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(map(double, batch))
    return case


def plain_step(case: Case, batch: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    args, kwargs = model_arguments(case.model, batch, only_accepted=case.loss is not None)
    outputs = case.model(*args, **kwargs)
    loss = own_loss(outputs) if case.loss is None else case.loss(outputs, batch)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in case.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_captured_step_equals_the_plain_step(name: str) -> None:
    torch.manual_seed(0)
    case = _in_recipe(FAMILIES[name]())
    captured = capture(case.model, case.batch, loss=case.loss, recipe=case.recipe)
    batch = case.batch
    if captured.graph.loss_reduction == "sum_over_count":
        batch = {**batch, COUNT: torch.tensor(7)}
    loss, grads = plain_step(case, batch)
    interpreter = Interpreter(captured, case.model)
    torch.testing.assert_close(interpreter.run(captured.batch.flatten(batch)), loss, rtol=1e-6, atol=0)
    assert set(interpreter.grads) == set(grads)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for fqn, grad in grads.items():
        scale = grad.abs().max()
        if scale < NOISE * largest:  # keys' biases have no gradient in exact arithmetic, only rounding
            scale = torch.tensor(largest)
        assert float((interpreter.grads[fqn] - grad).abs().max() / scale) < TOLERANCE[case.recipe], fqn
    assert captured.graph.num_params == sum(p.numel() for p in case.model.parameters())
