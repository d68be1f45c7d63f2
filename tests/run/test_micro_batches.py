"""A step of several micro-batches is the step of the whole batch, or it is refused. One process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hpsearch
from hpsearch.capture import capture
from hpsearch.lower import lower
from hpsearch.search import search
from tests.end_to_end.test_parity import slow_devices

ROWS = 6
Loss = Callable[[torch.Tensor, Any], torch.Tensor]


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def case() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    x = torch.randn(ROWS, 4, generator=generator).double()
    weight = torch.rand(ROWS, generator=generator).double()
    return Named(model), {"x": x, "weight": weight, "kind": torch.tensor([0, 1, 2, 0, 0, 4])}


class Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def weighted(o: torch.Tensor, b: Any) -> torch.Tensor:
    return (o.square().mean(-1) * b["weight"]).sum() / b["weight"].sum()


def ignoring_0(o: torch.Tensor, b: Any) -> torch.Tensor:
    return F.cross_entropy(o, b["kind"], ignore_index=0)


def summed(o: torch.Tensor, b: Any) -> torch.Tensor:
    return o.square().sum()


def squares(o: torch.Tensor, b: Any) -> torch.Tensor:
    return o.square().mean()


def classes(o: torch.Tensor, b: Any) -> torch.Tensor:
    return F.cross_entropy(o, b["kind"])


def check_step(loss: Loss, micro_batches: int) -> None:
    model, batch = case()
    fix = {"micro_batches": micro_batches}
    parallel = hpsearch.compile(model, slow_devices(1), loss=loss, recipe="fp64", fix=fix, example=batch)
    found = parallel.step(batch)
    with torch.no_grad():
        alone = parallel(**batch)
    expected = loss(model(batch["x"]), batch)
    expected.backward()
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(alone, expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        grad = parallel.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("loss", "count"), [(squares, 3), (summed, 2), (summed, 3), (classes, 3)])
def test_micro_batches_give_the_loss_of_the_batch(loss: Loss, count: int) -> None:
    check_step(loss, count)


@pytest.mark.parametrize("loss", [weighted, ignoring_0])
def test_a_loss_that_needs_the_whole_batch_gets_it(loss: Loss) -> None:
    check_step(loss, 1)
    with pytest.raises(hpsearch.LegalityError, match=r"micro_batches=2: expected 1 for Named.*num_items_in_batch"):
        check_step(loss, 2)
    model, batch = case()
    free = hpsearch.compile(model, slow_devices(1), loss=loss, recipe="fp64", example=batch).plan.file
    assert free.job.micro_batches == 1
    assert "micro_batches > 1" in {refusal.candidate for refusal in free.certificate.refused}


def test_a_plan_of_another_loss_is_refused_too() -> None:
    model, batch = case()
    graph = capture(model, batch, loss=squares, recipe="fp64").graph
    plan = search(graph, slow_devices(1), global_batch=ROWS, fix={"micro_batches": 2})
    captured = capture(model, batch, loss=lambda o, b: o.square().mean().sqrt(), recipe="fp64", rows=3)
    with pytest.raises(hpsearch.LegalityError, match="micro_batches=2"):
        lower(captured, plan)


def test_valid_targets_must_be_equal_where_the_loss_counts_them() -> None:
    model, batch = case()
    fix = {"micro_batches": 2}
    parallel = hpsearch.compile(model, slow_devices(1), loss=classes, recipe="fp64", fix=fix, example=batch)
    labels = batch["kind"].clone()
    labels[0] = -100
    with pytest.raises(hpsearch.BatchError, match=r"micro-batches have \[2, 3\] of them"):
        parallel.step(batch | {"kind": labels})
