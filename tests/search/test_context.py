"""Cut sequences as pins: what is chosen, what it sends, what is refused and how."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from hpsearch.capture import capture
from hpsearch.errors import LegalityError, PlanError
from hpsearch.graph import ModelGraph
from hpsearch.layout import EXCHANGES
from hpsearch.lower import lower
from hpsearch.lower.accounting import collectives_of
from hpsearch.plan import Plan
from hpsearch.plan.explain import mesh_table
from hpsearch.search import search
from tests.end_to_end import experts
from tests.end_to_end.models import build
from tests.end_to_end.sequences import ROWS
from tests.end_to_end.slow import slow_devices

assert "mixtral" in experts.OTHERS


@cache
def graph(family: str, rows: int = 2) -> Any:
    case = build(family, torch.float64)
    return capture(case.model, case.batch, recipe="fp64", rows=rows)


def plan(family: str, devices: int, **fix: object) -> Plan:
    return search(graph(family).graph, slow_devices(devices), global_batch=ROWS, fix=fix)


def test_the_cheapest_kind_is_chosen() -> None:
    pinned = {kind: plan("causal", 4, cp=4, cp_kind=kind).file.predicted.step_s for kind in EXCHANGES}
    free = plan("causal", 4, cp=4)
    assert free.file.predicted.step_s == min(pinned.values())
    assert pinned[free.mesh.axis("cp").exchange] == min(pinned.values())


@pytest.mark.parametrize("kind", EXCHANGES)
def test_a_program_sends_what_the_plan_lists(kind: str) -> None:
    made = plan("causal", 4, cp=2, cp_kind=kind, tp=2, micro_batches=2)
    program = lower(graph("causal", made.micro_batch_rows), made)
    listed = [sorted((c.kind, c.axis, c.phase, c.what, c.dtype, c.nbytes, c.calls) for c in found)
              for found in (made.file.collectives, collectives_of(program))]  # fmt: skip
    assert listed[0] == listed[1]
    named = {"gathered": "all_gather", "ring": "shift", "ulysses": "all_to_all"}[kind]
    assert any(c.kind == named and c.axis == "cp" for c in made.file.collectives)


@pytest.mark.parametrize("family", ["causal", "mixtral"])
def test_parameters_are_whole_on_cp_and_their_gradients_addends(family: str) -> None:
    made = plan(family, 4, cp=2, dp_shard=2)
    for entry in made.file.parameters:
        assert "cp" not in entry.stored + entry.used
        assert "cp:P" in entry.gradient.split(), entry
    assert not any("cp" in entry.layout for entry in made.file.inputs), "the batch is whole on every rank of cp"


class Running(nn.Module):
    """A running sum over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).cumsum(1).square().sum()


class Products(nn.Module):
    """Attention without a fused op."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        return ((y @ y.mT).softmax(-1) @ y).square().sum()


class Pooled(nn.Module):
    """No sequences: one vector a row."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).square().sum()


def other(model: nn.Module, *shape: int) -> ModelGraph:
    return capture(model, (torch.randn(2, *shape),), recipe="fp32", rows=2).graph


@pytest.mark.parametrize(
    ("model", "devices", "fix", "message"),
    [
        ("causal", 3, {"cp": 3}, "fix cp=3: expected a sequence length that cp divides, but 16 % 3 = 1"),
        ("causal", 2, {"cp_kind": "ring"}, "fix cp_kind=ring: expected .* beside cp of at least 2, but found cp=1"),
        ("causal", 2, {"cp": 2, "cp_kind": "round"}, "fix cp_kind=round: expected one of gathered, ring, ulysses"),
        ("causal", 16, {"cp": 16, "cp_kind": "ulysses"}, "cp_kind=ulysses: expected heads that 16 ranks can share"),
        (Products, 2, {"cp": 2, "cp_kind": "ring"}, "expected a fused attention to pass blocks through"),
        (Running, 2, {"cp": 2}, "expected ops that leave positions of a sequence apart, but aten.cumsum.default"),
        (Pooled, 2, {"cp": 2}, "fix cp=2: expected a sequence length that cp divides, but the batch has no sequences"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(model: Any, devices: int, fix: dict[str, object], message: str) -> None:
    shape = (8,) if model is Pooled else (16, 8)
    facts = graph(model).graph if isinstance(model, str) else other(model(), *shape)
    with pytest.raises(LegalityError, match=message):
        search(facts, slow_devices(devices), global_batch=ROWS, fix=fix)


def test_a_plan_says_how_attention_runs() -> None:
    (meaning,) = mesh_table(plan("causal", 2, cp=2, cp_kind="ring")).columns[-1].cells
    assert str(meaning) == "context parallel; keys and values go round; a piece from either end of each sequence"


def test_an_edited_kind_is_refused() -> None:
    content = plan("causal", 2, cp=2, cp_kind="ring").content
    with pytest.raises(PlanError, match="axis cp has exchange rong, expected gathered or ring or ulysses"):
        Plan.from_bytes(content.replace(b'"exchange": "ring"', b'"exchange": "rong"'), "p.json")
