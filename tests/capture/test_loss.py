"""What a loss is over micro-batches: what `capture` says is held against the loss itself, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpsearch.capture import capture
from hpsearch.graph import Targets

ROWS, LENGTH, CLASSES = 6, 4, 5
Loss = Callable[[torch.Tensor, Any], torch.Tensor]


class Tagger(nn.Module):
    """A class for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tags = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)
    tags[0, :3] = -100
    return {
        "x": torch.randn(ROWS, LENGTH, 3, generator=generator).double(),
        "tags": tags,
        "weight": torch.rand(ROWS, LENGTH, generator=generator).double(),
        "num_items_in_batch": torch.tensor(17),
    }


def errors(o: torch.Tensor, b: Any) -> torch.Tensor:
    return F.cross_entropy(o.flatten(0, 1), b["tags"].flatten(), reduction="none").view_as(b["weight"])


def shifted(o: torch.Tensor, b: Any) -> torch.Tensor:
    return F.cross_entropy(o[:, :-1].flatten(0, 1), b["tags"][:, 1:].flatten())


LOSSES: dict[str, tuple[str, Loss]] = {
    "mean": ("mean", lambda o, b: o.square().mean()),
    "mean of rows": ("mean", lambda o, b: o.square().sum((1, 2)).mean()),
    "sum over rows": ("mean", lambda o, b: (errors(o, b) * b["weight"]).sum() / len(o)),
    "rows divided first": ("mean", lambda o, b: (o.square() / len(o)).sum()),
    "two means": ("mean", lambda o, b: o.square().mean() + 0.1 * o.abs().mean()),
    "sum": ("sum", lambda o, b: o.square().sum()),
    "scaled sum": ("sum", lambda o, b: -0.5 * o.square().mean() * len(o)),
    "mean of valid": ("mean_over_targets", lambda o, b: F.cross_entropy(o.flatten(0, 1), b["tags"].flatten())),
    "mean of valid, shifted": ("mean_over_targets", shifted),
    "mean of valid, classes in dim 1": ("mean_over_targets", lambda o, b: F.cross_entropy(o.mT, b["tags"])),
    "with class weights, classes in dim 1": (
        "whole",
        lambda o, b: F.cross_entropy(o.mT, b["tags"], weight=torch.arange(1.0, 1 + CLASSES, dtype=o.dtype)),
    ),
    "Huber": ("mean", lambda o, b: F.huber_loss(o.mean(-1), b["weight"])),
    "smooth L1": ("mean", lambda o, b: F.smooth_l1_loss(o.mean(-1), b["weight"])),
    "yes or no": ("mean", lambda o, b: F.binary_cross_entropy(o.mean(-1).sigmoid(), b["weight"])),
    "yes or no, logits": ("mean", lambda o, b: F.binary_cross_entropy_with_logits(o.mean(-1), b["weight"])),
    "soft margin": ("mean", lambda o, b: F.soft_margin_loss(o.mean(-1), b["weight"].sign())),
    "sum over the count": ("sum_over_count", lambda o, b: errors(o, b).sum() / b["num_items_in_batch"]),
    "weighted": ("whole", lambda o, b: (errors(o, b) * b["weight"]).sum() / b["weight"].sum()),
    "other ignored": (
        "whole",
        lambda o, b: F.cross_entropy(o.flatten(0, 1), b["tags"].abs().flatten() % CLASSES, ignore_index=0),
    ),
    "root": ("whole", lambda o, b: o.square().mean().sqrt()),
    "product": ("whole", lambda o, b: o.square().mean() * o.abs().mean()),
    "mean and sum": ("whole", lambda o, b: o.square().mean() + o.abs().sum()),
    "sum and constant": ("whole", lambda o, b: o.square().sum() + 3.0),
    "square of a mean": ("whole", lambda o, b: o.mean(0).square().sum()),
    "spread of the batch": ("whole", lambda o, b: (o - o.mean(0)).square().mean()),
    "softmax over rows": ("whole", lambda o, b: o.softmax(0).square().mean()),
    "a count and a number": ("whole", lambda o, b: errors(o, b).sum() / b["num_items_in_batch"] + 3.0),
    "exponent of a count": ("whole", lambda o, b: (errors(o, b).sum() / b["num_items_in_batch"]).exp()),
    "count and data as divisor": (
        "whole",
        lambda o, b: errors(o, b).sum() / (b["num_items_in_batch"] + b["weight"].sum()),
    ),
    "half of a count and a mean": (
        "whole",
        lambda o, b: 0.5 * (errors(o, b).sum() / b["num_items_in_batch"] + o.mean(0).square().sum()),
    ),
    "two counts": (
        "sum_over_count",
        lambda o, b: errors(o, b).sum() / b["num_items_in_batch"] - 0.1 * o.sum() / b["num_items_in_batch"].clamp(1),
    ),
    "a count and a mean": (
        "whole",
        lambda o, b: errors(o, b).sum() / b["num_items_in_batch"] + o.mean(0).square().sum(),
    ),
}


def cut(found: dict[str, torch.Tensor], index: int, count: int) -> dict[str, torch.Tensor]:
    return {n: t.chunk(count)[index] if t.dim() else t for n, t in found.items()}


@pytest.mark.parametrize("name", list(LOSSES))
def test_what_a_loss_is(name: str) -> None:
    expected, loss = LOSSES[name]
    model, whole = Tagger().double(), batch()
    assert capture(model, whole, loss=loss, recipe="fp64").graph.loss_reduction == expected
    parts = [loss(model(part["x"]), part) for part in (cut(whole, i, 3) for i in range(3))]
    total = sum(parts) if expected in ("sum", "sum_over_count") else sum(parts) / 3
    is_equal = torch.allclose(total, loss(model(whole["x"]), whole), rtol=1e-12, atol=0)
    assert is_equal == (expected not in ("whole", "mean_over_targets")), "valid targets are unequal in this batch"


@pytest.mark.parametrize(("name", "skipped"), [("mean of valid", 0), ("mean of valid, shifted", 1)])
def test_whose_valid_targets_a_loss_counts(name: str, skipped: int) -> None:
    found = capture(Tagger().double(), batch(), loss=LOSSES[name][1], recipe="fp64").graph
    assert found.targets == Targets("tags", skipped)


class Coupled(nn.Module):
    """Blocks of one class, the first of which needs no gradient of its input; rows meet there, or not."""

    def __init__(self, couples: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Mixing(couples) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


class Mixing(nn.Module):
    def __init__(self, couples: bool) -> None:
        super().__init__()
        self.linear, self.couples = nn.Linear(3, 3), couples

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x - x.mean(0 if self.couples else 1, keepdim=True)


@pytest.mark.parametrize("couples", [False, True])
def test_blocks_are_looked_into(couples: bool) -> None:
    found = capture(Coupled(couples).double(), (batch()["x"],), recipe="fp64").graph
    assert found.blocks
    assert found.loss_reduction == ("whole" if couples else "mean")
