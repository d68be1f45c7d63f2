"""Models of which a part is trained: adapters around frozen linears, towers that stay as they are.

What is frozen has no gradient, no optimizer state and no reduction, and below the first trained weight nothing runs
backward; the rest gets the plain model's gradients, wherever the frozen weights lie.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hpsearch.capture import CapturedGraph, capture
from hpsearch.graph import ADDS_UP, Op
from hpsearch.lower import ParallelProgram, PipelineProgram, lower
from hpsearch.lower.accounting import collectives_of
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.end_to_end.models import ROWS, build, next_token_loss
from tests.end_to_end.parity import worst
from tests.end_to_end.slow import slow_devices
from tests.lower.adapters import adapted
from tests.lower.reference import compare
from tests.lower.stages import Played

Batch = dict[str, Any]


class Seen(nn.Module):
    """Three towers with their loss, by names."""

    def __init__(self, towers: nn.Module) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self.towers(images, ids), (images, ids))


def lora() -> tuple[nn.Module, Batch]:
    case = build("llama_deep", torch.float64)
    return adapted(case.model), case.batch


def thawed(*prefixes: str) -> tuple[nn.Module, Batch]:
    """Three towers of which only what `prefixes` name is trained."""
    case = build("towers", torch.float64)
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))
    return Seen(case.model), {"images": case.batch[0].double(), "ids": case.batch[1]}


def two_frozen_layers() -> tuple[nn.Module, Batch]:
    case = build("llama_deep", torch.float64)
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_(not name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1.")))
    return case.model, case.batch


CASES = {
    "adapters": lora,
    "projector alone": lambda: thawed("projector."),
    "vision frozen": lambda: thawed("projector.", "language."),
    "two frozen layers": two_frozen_layers,
}


PARTS = 3


RARE = tuple(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("vision frozen", "two frozen layers"))


@cache
def made(name: str) -> tuple[nn.Module, Batch, CapturedGraph]:
    """Captured at the rows of one of three micro-batches, which every plan here has."""
    model, batch = CASES[name]()
    return model, batch, capture(model, batch, recipe="fp64", rows=ROWS // PARTS)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    found = model(**batch)
    return found if isinstance(found, torch.Tensor) else found.loss


def planned(name: str, devices: int, **fix: object) -> tuple[Plan, ParallelProgram | PipelineProgram]:
    captured = made(name)[2]
    pinned = {"micro_batches": PARTS, "recompute": "none", **fix}
    plan = search(captured.graph, slow_devices(devices), global_batch=ROWS, fix=pinned)
    return plan, lower(captured, plan)


def parts_of(batch: Batch) -> list[Batch]:
    """The micro-batches, with the count of the whole batch's valid targets where the loss takes one."""
    whole = {n: t.chunk(PARTS) if isinstance(t, torch.Tensor) else [t] * PARTS for n, t in batch.items()}
    if "labels" in batch:
        whole["num_items_in_batch"] = [(batch["labels"][:, 1:] != -100).sum()] * PARTS
    return [{n: pieces[i] for n, pieces in whole.items()} for i in range(PARTS)]


CUT_AT_REST = {f"model.layers.{i}.{part}": "dp_shard:S0" for i in ("0", "*") for part in ("mlp", "self_attn.k_proj")}
ON_TP = {"model.layers.*.mlp.up_proj.weight": "tp:S0", "model.layers.*.mlp.gate_proj.weight": "tp:S0",
         "model.layers.*.mlp.down_proj.weight": "tp:S1"}  # fmt: skip
LAYOUTS: list[Any] = [
    ("adapters", 2, {"dp_shard": 2, **CUT_AT_REST}),
    ("adapters", 2, {"tp": 2, **ON_TP}),
    ("projector alone", 2, {"dp_shard": 2}),
    pytest.param("adapters", 4, {"dp_shard": 2, "tp": 2, "recompute": "full"}, marks=pytest.mark.exhaustive),
    pytest.param("two frozen layers", 2, {"dp_shard": 2}, marks=pytest.mark.exhaustive),
    pytest.param("vision frozen", 2, {"dp_shard": 2}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("name", "devices", "fix"), LAYOUTS, ids=str)
def test_only_what_is_trained_has_a_gradient(name: str, devices: int, fix: dict[str, object]) -> None:
    """`compare` asserts that there is a gradient for each trained parameter and for no other."""
    model, batch, captured = made(name)
    plan, program = planned(name, devices, **fix)
    assert isinstance(program, ParallelProgram)
    found = compare(model, parts_of(batch), captured, program)
    print(f"{name} {fix}: loss {found.loss:.1e}, gradient {found.gradient:.1e}")
    assert found.gradient <= 1e-10
    assert found.loss <= 1e-6
    no_word_of_frozen(plan, program)
    if fix.keys() & CUT_AT_REST.keys():
        rests = {p.pattern: p.stored for p in plan.file.parameters if not p.trainable}
        assert set(rests.values()) == {"R", "dp_shard:S0"}, "some frozen weights rest whole, some in pieces"


def no_word_of_frozen(plan: Plan, program: ParallelProgram) -> None:
    trained = {p.pattern for p in plan.file.parameters if p.trainable}
    for entries in (plan.file.collectives, collectives_of(program)):
        assert {entry.what for entry in entries if entry.phase == "reduce"} <= trained
    states = 0
    for entry in plan.file.parameters:
        if entry.trainable:
            held = plan.stored(entry.pattern).local_shape(entry.shape, plan.mesh.sizes)
            states += 2 * 8 * prod(held) * entry.count
    assert plan.file.predicted.bytes["optimizer"] == states


@pytest.mark.parametrize("name", ["adapters", pytest.param("vision frozen", marks=pytest.mark.exhaustive)])
def test_stages_of_which_little_is_trained(name: str) -> None:
    """Two stages; the first of the towers has a frozen tower and nothing else."""
    model, batch, _ = made(name)
    _, program = planned(name, 2, pp=2)
    assert isinstance(program, PipelineProgram)
    state = {n: p.detach() for n, p in model.named_parameters()}
    rows = [{n: t for n, t in part.items() if isinstance(t, torch.Tensor)} for part in parts_of(batch)]
    share = 1.0 if program.loss_reduction in ADDS_UP else 1 / PARTS
    loss, grads = Played(program).step(state, dict(model.named_buffers()), rows, share)
    model.zero_grad()
    expected = loss_of(model, batch)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert worst("gradient", grads, gradients, 1e-9)["gradient"] <= 1e-10


@pytest.mark.parametrize("name", ["adapters", "projector alone", *RARE])
def test_nothing_runs_backward_below_the_first_trained_weight(name: str) -> None:
    """FLOPs of the products of backward are those of autograd on the plain model."""
    model, batch, captured = made(name)
    loss = loss_of(model, batch)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    found = 0
    for graph, count in captured.graph.pieces():
        for op in graph.steps:
            if isinstance(op, Op) and op.kind == "matmul" and op.phase == "backward":
                found += count * (op.flops[0] + op.flops[1] * ROWS)
    products = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm)
    assert found == sum(counter.get_flop_counts()["Global"].get(op, 0) for op in products) > 0


@pytest.mark.exhaustive
def test_layers_that_are_frozen_are_a_class_of_their_own() -> None:
    graph = made("two frozen layers")[2].graph
    assert [prefix for _, prefix in graph.instances][-2:] == ["model.layers.3", "model.layers.4"]
    for name, _ in graph.instances:
        assert len({grad is None for grad in graph.blocks[name].param_grads.values()}) == 1


class Wrapper(nn.Module):
    """As peft's: hands its arguments on to the model that it wraps, and looks up attributes there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


@pytest.mark.exhaustive
def test_a_wrapper_changes_nothing() -> None:
    model, batch, captured = made("adapters")
    wrapped = capture(Wrapper(model), batch, recipe="fp64").graph
    assert wrapped.loss_reduction == captured.graph.loss_reduction == "sum_over_count"
    assert [len(graph.steps) for graph, _ in wrapped.pieces()] == [len(g.steps) for g, _ in captured.graph.pieces()]
