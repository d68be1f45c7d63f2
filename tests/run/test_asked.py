"""What is asked for beside a plan agrees with the plan, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hpsearch
from hpsearch.plan import Plan
from hpsearch.run.asked import Asked
from tests.end_to_end.test_parity import slow_devices
from tests.run.jobs import uneven_case
from tests.run.plans import plan_bytes


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.from_bytes(plan_bytes("uneven", 2, dp_shard=2, micro_batches=2, **{"wide.weight": "dp_shard:S1"}))


AGREES: list[dict[str, Any]] = [
    {},
    {"fix": {"dp_shard": 2, "tp": 1, "micro_batches": 2, "recompute": "none"}},
    {"fix": {"wide.weight": "dp_shard:S1"}},
    {"global_batch": 12, "optimizer": "adamw"},
]
CONTRADICTS: list[tuple[dict[str, Any], str]] = [
    ({"fix": {"tp": 2}}, "tp=2 was asked for, but the plan has tp=1"),
    ({"fix": {"dp_shard": 1}}, "dp_shard=1 was asked for, but the plan has dp_shard=2"),
    ({"fix": {"micro_batches": 3}}, "micro_batches=3 was asked for, but the plan has micro_batches=2"),
    ({"fix": {"wide.weight": "R"}}, "wide.weight=R was asked for, but the plan has wide.weight=dp_shard:S1"),
    ({"fix": {"wide": "R"}}, "wide=R was asked for, but the plan has wide=dp_shard:S1 for wide.weight"),
    ({"fix": {"deep.weight": "R"}}, "parameter deep.weight: the plan has no such parameter"),
    ({"global_batch": 24}, "global_batch=24 was asked for, but the plan has global_batch=12"),
    ({"optimizer": "sgd"}, "optimizer=sgd was asked for, but the plan has optimizer=adamw"),
]


@pytest.mark.parametrize("asked", AGREES)
def test_what_agrees_is_taken(plan: Plan, asked: dict[str, Any]) -> None:
    Asked(**asked).check(plan, "plan")


@pytest.mark.parametrize(("asked", "message"), CONTRADICTS)
def test_what_contradicts_is_refused(plan: Plan, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(hpsearch.PlanError) as refused:
        Asked(**asked).check(plan, "plan")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"fix": {"tp": 2}, "recipe": "fp64"}, "tp=2 was asked for, but the plan has tp=1"),
        ({"recipe": "fp32"}, "the plan is for recipe fp64, this was captured for fp32. Compile with recipe='fp64', or"),
    ],
)
def test_compile_says_so(asked: dict[str, Any], message: str) -> None:
    model, batch = uneven_case()
    given = Plan.from_bytes(plan_bytes("uneven", 1))
    with pytest.raises(hpsearch.PlanError, match=message):
        hpsearch.compile(model, plan=given, example=batch, **asked)


class Tiny(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        ({"model": Tiny}, hpsearch.CaptureError, "model: expected an nn.Module, but found the class Tiny. Pass an"),
        ({"model": 3}, hpsearch.CaptureError, "model: expected an nn.Module, but found int"),
        ({"loss": "mse"}, hpsearch.CaptureError, "loss: expected a function, but found str"),
        ({"fix": "tp=2"}, hpsearch.LegalityError, "fix: expected a mapping of names to values, but got 'tp=2'"),
        ({"example": (torch.empty(0, 3),)}, hpsearch.BatchError, "batch: expected at least one row, but found none"),
    ],
)
def test_an_argument_of_another_kind_is_refused(asked: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = {"model": Tiny(3, 3), "cluster": slow_devices(1), "example": (torch.empty(2, 3),)} | asked
    with pytest.raises(kind) as error:
        hpsearch.compile(**arguments)
    assert str(error.value).startswith(message)
