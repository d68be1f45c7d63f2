"""Expert ops: what they compute, their rules by brute force, and what of transformers' models they stand for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hpsearch.capture import capture
from hpsearch.capture.expert_rules import EXPERT_RULES
from hpsearch.capture.experts import experts_as_ops
from hpsearch.capture.op_facts import OpFacts, TensorFacts, output_slots
from hpsearch.capture.rules import find_rules
from hpsearch.graph.routed import ROUTE
from hpsearch.lower import experts as spread
from tests.capture.rule_truth import true_rules
from tests.end_to_end.experts import EXPERTS
from tests.end_to_end.models import build

T, K, E, D, N = 12, 2, 6, 12, 18
ops = torch.ops.hpsearch
generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


INDEX = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(T)])
"""The last expert has no token."""
PLACE, COUNTS = ops.route(INDEX, E)
X, ROWS, GRAD_ROWS, GRAD = normal(T, D), normal(T * K, D), normal(T * K, N), normal(T, D)
WEIGHT, BIAS, SHARES = normal(E, N, D), normal(E, D), normal(T, K)
CALLS: dict[str, tuple[Any, ...]] = {
    "route": (INDEX, E),
    "dispatch": (X, PLACE, COUNTS, K),
    "dispatch_backward": (ROWS, PLACE, COUNTS, K),
    "grouped_mm": (ROWS, WEIGHT, COUNTS, False),
    "grouped_mm_weight": (GRAD_ROWS, ROWS, COUNTS, False),
    "grouped_add": (ROWS, BIAS, COUNTS),
    "grouped_sum": (ROWS, COUNTS),
    "combine": (ROWS, SHARES, PLACE, COUNTS),
    "combine_backward": (GRAD, ROWS, SHARES, PLACE, COUNTS),
}


Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tokens, their experts, the share of each, the gradient of the result."""


def facts(name: str) -> tuple[OpFacts, list[Tensor]]:
    args = CALLS[name]
    target = getattr(ops, name).default
    tensors = [a for a in args if isinstance(a, Tensor)]
    seen = [TensorFacts(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args]
    inputs = tuple(a for a in seen if isinstance(a, TensorFacts))
    return OpFacts(target, tuple(seen), {}, inputs, output_slots(target(*args))), tensors


@pytest.mark.parametrize("name", list(CALLS))
def test_rules_that_cut_no_rows(name: str) -> None:
    """On features, and of addends, by brute force; rows are sorted on each rank by itself and are tried as a whole."""
    found, tensors = facts(name)
    plain = {rule for rule in find_rules(found) if "S0" not in (*rule[0], *rule[1])}
    for ranks in (2, 3):
        truth = true_rules(found, ranks, lambda *_: tensors)
        assert plain <= truth


def test_every_expert_rule_is_tried() -> None:
    assert {f"hpsearch.{name}.default" for name in CALLS} == set(EXPERT_RULES)


def region(given: Given, weight: Tensor, bias: Tensor, run: Any = ops, **where: Any) -> tuple[Tensor, ...]:
    """A mixture of experts and its backward, op by op: result and gradients of x, weight, bias and shares."""
    x, index, shares, grad = given
    place, counts = run.route(index, E, **where)
    rows = run.dispatch(x, place, counts, K)
    made = ops.grouped_add(ops.grouped_mm(rows, weight, counts, False), bias, counts)
    out = run.combine(made, shares, place, counts)
    by_made, by_shares = run.combine_backward(grad, made, shares, place, counts)
    by_weight = ops.grouped_mm_weight(by_made, rows, counts, False)
    by_x = run.dispatch_backward(ops.grouped_mm(by_made, weight, counts, True), place, counts, K)
    return out, by_x, by_weight, ops.grouped_sum(by_made, counts), by_shares


WIDE = normal(E, D, D)
GIVEN = X, INDEX, SHARES, GRAD


def dense(given: Given, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Every token by every expert, autograd for the rest."""
    x, index, shares, grad = given
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, shares)]
    x, weight, bias, shares = leaves
    every = torch.einsum("td,end->ten", x, weight) + bias
    chosen = every.gather(1, index.unsqueeze(-1).expand(-1, -1, every.shape[-1]))
    out = (chosen * shares.unsqueeze(-1)).sum(1)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("index", [INDEX, torch.tensor([[0, 1]]).expand(T, K), INDEX[:0]], ids=["some", "two", "none"])
def test_a_mixture_is_what_every_expert_would_say(index: Tensor) -> None:
    few = len(index)
    given = X[:few], index, SHARES[:few], GRAD[:few]
    for found, expected in zip(region(given, WIDE, BIAS), dense(given, WIDE, BIAS), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_by_token(ranks: int) -> None:
    """The rules with counts P: tokens cut, weights whole; their gradients are addends."""
    whole = region(GIVEN, WIDE, BIAS)
    pieces = [region(given, WIDE, BIAS) for given in zip(*(t.chunk(ranks) for t in GIVEN), strict=True)]
    for place, join in enumerate((torch.cat, torch.cat, sum, sum, torch.cat)):
        torch.testing.assert_close(join([piece[place] for piece in pieces]), whole[place], rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_own_experts(ranks: int) -> None:
    """The rules with tokens R and counts S0: weights cut; sums over experts are addends."""
    whole = region(GIVEN, WIDE, BIAS)
    pieces = [
        region(GIVEN, weight, bias, spread, own=(rank, ranks))
        for rank, (weight, bias) in enumerate(zip(WIDE.chunk(ranks), BIAS.chunk(ranks), strict=True))
    ]
    for place, join in enumerate((sum, sum, torch.cat, torch.cat, sum)):
        torch.testing.assert_close(join([piece[place] for piece in pieces]), whole[place], rtol=0, atol=1e-12)


def _values_and_gradients(family: str, around: Callable[[], Any]) -> list[Tensor]:
    case = build(family, torch.float64)
    with around():
        loss = case.model(**case.batch).loss
        loss.backward()
    return [loss.detach(), *(p.grad for p in case.model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", [*EXPERTS, *(f"{name}_skewed" for name in EXPERTS), "llama4_top2"])
def test_what_transformers_computes(family: str) -> None:
    """The ops in place of transformers' loop over experts, in one process, forward and backward."""
    expected = _values_and_gradients(family, nullcontext)
    found = _values_and_gradients(family, experts_as_ops)
    assert len(found) == len(expected)
    largest = max(b.abs().max() for b in expected[1:])
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-6 * max(b.abs().max(), 1e-3 * largest)  # routers are in fp32


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", list(EXPERTS))
def test_every_family_is_recognised(family: str) -> None:
    case = build(family, torch.float64)
    graph = capture(case.model, case.batch, recipe="fp64", rows=2).graph
    pieces = [piece for piece, _ in graph.pieces() if any(op.target == ROUTE for op in piece.ops)]
    assert pieces
    for piece in pieces:
        weights = {name for name, value in piece.params.items() if value in piece.by_expert}
        assert {name.rpartition(".")[2] for name in weights} >= {"gate_up_proj", "down_proj"}
        grads = {piece.param_grads[name] for name in weights}
        assert grads <= piece.by_expert
        assert not grads & piece.routed
    assert graph.loss_reduction == "sum_over_count"
