"""Mixtures of experts as a few operators that show what travels and what is computed where.

    hpsearch::route(index [T, k], num_experts) -> place [R], counts [E]      R = T k pairs of a token and an expert
    hpsearch::dispatch(x [T, D], place, counts, top_k) -> rows [R, D]        tokens, sorted by their experts
    hpsearch::dispatch_backward(grad [R, D], place, counts, top_k) -> [T, D]
    hpsearch::grouped_mm(rows, weight, counts, transposed) -> rows           weight [E, N, K]; [E, K, N] if transposed
    hpsearch::grouped_mm_weight(grad, rows, counts, transposed) -> [E, …]
    hpsearch::grouped_add(rows, bias [E, N], counts) -> rows
    hpsearch::grouped_sum(grad, counts) -> [E, N]
    hpsearch::combine(rows, weight [T, k], place, counts) -> [T, D]
    hpsearch::combine_backward(grad, rows, weight, place, counts) -> (grad of rows, grad of weight)

`place[r]` is the pair `t k + j` that stands in row r, `counts[e]` the rows of expert e. Under expert parallelism rows
are another number on every rank; what is here is one process. Products run expert by expert, so that any dtype does.

transformers lets an implementation of its experts be chosen, and every model file but Llama 4's asks for it by one
door; Llama 4 multiplies every token by every expert, with zeros for those not chosen, which is the same sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hpsearch.capture.ops import LIBRARY, TAGS

_SCHEMAS = (
    "route(Tensor index, int num_experts) -> (Tensor, Tensor)",
    "dispatch(Tensor x, Tensor place, Tensor counts, int top_k) -> Tensor",
    "dispatch_backward(Tensor grad, Tensor place, Tensor counts, int top_k) -> Tensor",
    "grouped_mm(Tensor rows, Tensor weight, Tensor counts, bool transposed) -> Tensor",
    "grouped_mm_weight(Tensor grad, Tensor rows, Tensor counts, bool transposed) -> Tensor",
    "grouped_add(Tensor rows, Tensor bias, Tensor counts) -> Tensor",
    "grouped_sum(Tensor grad, Tensor counts) -> Tensor",
    "combine(Tensor rows, Tensor weight, Tensor place, Tensor counts) -> Tensor",
    "combine_backward(Tensor grad, Tensor rows, Tensor weight, Tensor place, Tensor counts) -> (Tensor, Tensor)",
)
for _schema in _SCHEMAS:
    LIBRARY.define(_schema, tags=TAGS)


def route(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    experts = index.reshape(-1)
    return torch.argsort(experts, stable=True), torch.bincount(experts, minlength=num_experts)


def dispatch(x: Tensor, place: Tensor, counts: Tensor, top_k: int) -> Tensor:
    return x[place // top_k]


def dispatch_backward(grad: Tensor, place: Tensor, counts: Tensor, top_k: int) -> Tensor:
    return at_home(grad, place, grad.shape[0] // top_k, top_k).sum(1)


def at_home(rows: Tensor, place: Tensor, tokens: int, top_k: int) -> Tensor:
    """Rows in the order of their tokens, [T, k, D]; zeros where a pair has no row."""
    pairs = rows.new_zeros((tokens * top_k, rows.shape[1]))
    pairs[place] = rows
    return pairs.view(tokens, top_k, rows.shape[1])


def _segments(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows), of experts that have any."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            yield expert, slice(start, start + count)
        start += count


def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    out = rows.new_zeros((rows.shape[0], weight.shape[2 if transposed else 1]))
    for expert, own in _segments(counts):
        matrix = weight[expert] if transposed else weight[expert].t()
        torch.mm(rows[own], matrix, out=out[own])
    return out


def grouped_mm_weight(grad: Tensor, rows: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    left, right = (rows, grad) if transposed else (grad, rows)
    out = grad.new_zeros((counts.shape[0], left.shape[1], right.shape[1]))
    for expert, own in _segments(counts):
        torch.mm(left[own].t(), right[own], out=out[expert])
    return out


def grouped_add(rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    return rows + bias.repeat_interleave(counts, dim=0, output_size=rows.shape[0])


def grouped_sum(grad: Tensor, counts: Tensor) -> Tensor:
    out = grad.new_zeros((counts.shape[0], grad.shape[1]))
    for expert, own in _segments(counts):
        out[expert] = grad[own].sum(0)
    return out


def combine(rows: Tensor, weight: Tensor, place: Tensor, counts: Tensor) -> Tensor:
    return combine_sum(rows, weight, place)


def combine_sum(rows: Tensor, weight: Tensor, place: Tensor) -> Tensor:
    """Sum over the experts of each token, [T, D]; `place` need not have every pair."""
    return (at_home(rows, place, *weight.shape) * weight.unsqueeze(-1)).sum(1)


def combine_backward(
    grad: Tensor, rows: Tensor, weight: Tensor, place: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    return products_of(grad, rows, weight, place)


def products_of(grad: Tensor, rows: Tensor, weight: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and of the weight; `place` need not have every pair, and those missing have none."""
    top_k = weight.shape[1]
    arrived = grad[place // top_k]
    grad_rows = (arrived * weight.reshape(-1)[place].unsqueeze(-1)).to(rows.dtype)
    products = (arrived * rows).sum(-1, keepdim=True)
    return grad_rows, at_home(products, place, *weight.shape).squeeze(-1).to(weight.dtype)


_REAL: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        route, dispatch, dispatch_backward, grouped_mm, grouped_mm_weight, grouped_add, grouped_sum, combine,
        combine_backward,
    )
}  # fmt: skip

_FAKE: dict[str, Callable[..., Any]] = {
    "route": lambda index, num_experts: (
        index.new_empty((index.numel(),), dtype=torch.int64),
        index.new_empty((num_experts,), dtype=torch.int64),
    ),
    "dispatch": lambda x, place, counts, top_k: x.new_empty((place.shape[0], x.shape[1])),
    "dispatch_backward": lambda grad, place, counts, top_k: grad.new_empty((place.shape[0] // top_k, grad.shape[1])),
    "grouped_mm": lambda rows, weight, counts, transposed: rows.new_empty(
        (rows.shape[0], weight.shape[2 if transposed else 1])
    ),
    "grouped_mm_weight": lambda grad, rows, counts, transposed: grad.new_empty(
        (counts.shape[0], rows.shape[1], grad.shape[1])
        if transposed
        else (counts.shape[0], grad.shape[1], rows.shape[1])
    ),
    "grouped_add": lambda rows, bias, counts: rows.new_empty(rows.shape),
    "grouped_sum": lambda grad, counts: grad.new_empty((counts.shape[0], grad.shape[1])),
    "combine": lambda rows, weight, place, counts: rows.new_empty(
        (weight.shape[0], rows.shape[1]), dtype=torch.promote_types(rows.dtype, weight.dtype)
    ),
    "combine_backward": lambda grad, rows, weight, place, counts: (
        rows.new_empty(rows.shape),
        weight.new_empty(weight.shape),
    ),
}
for _name, _function in _REAL.items():
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hpsearch::{_name}", _FAKE[_name], lib=LIBRARY)

_ops = torch.ops.hpsearch


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, counts: Tensor, top_k: int) -> Any:
        ctx.save_for_backward(place, counts)
        ctx.top_k = top_k
        return _ops.dispatch(x, place, counts, top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _ops.dispatch_backward(grad.contiguous(), *ctx.saved_tensors, ctx.top_k), None, None, None


class _GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Any:
        ctx.save_for_backward(rows, weight, counts)
        ctx.transposed = transposed
        return _ops.grouped_mm(rows, weight, counts, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        rows, weight, counts = ctx.saved_tensors
        need_rows, need_weight = ctx.needs_input_grad[:2]
        grad = grad.contiguous()
        back = _ops.grouped_mm(grad, weight, counts, not ctx.transposed) if need_rows else None
        of_weight = _ops.grouped_mm_weight(grad, rows, counts, ctx.transposed) if need_weight else None
        return back, of_weight, None, None


class _GroupedAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Tensor) -> Any:
        ctx.save_for_backward(counts)
        return _ops.grouped_add(rows, bias, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        of_bias = _ops.grouped_sum(grad.contiguous(), *ctx.saved_tensors) if ctx.needs_input_grad[1] else None
        return grad, of_bias, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, place: Tensor, counts: Tensor) -> Any:
        ctx.save_for_backward(rows, weight, place, counts)
        return _ops.combine(rows, weight, place, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return *_ops.combine_backward(grad.contiguous(), *ctx.saved_tensors), None, None


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of an expert module's forward: [T, D], twice [T, k] → [T, D]."""
    place, counts = _ops.route(top_k_index, module.num_experts)
    rows = _Dispatch.apply(hidden_states, place, counts, top_k_index.shape[1])
    first = "gate_up_proj" if module.has_gate else "up_proj"
    rows = _linear(module, first, rows, counts)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = _linear(module, "down_proj", rows, counts)
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
    total: Tensor = _Combine.apply(rows, top_k_weights, place, counts)
    return total.to(hidden_states.dtype)


def _linear(module: Any, name: str, rows: Tensor, counts: Tensor) -> Any:
    rows = _GroupedMm.apply(rows, getattr(module, name), counts, module.is_transposed)
    return _GroupedAdd.apply(rows, getattr(module, f"{name}_bias"), counts) if module.has_bias else rows


def _llama4_forward(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's mixture: scores scale what experts read, so a pair of a token and an expert is a token of its own."""
    x = hidden_states.reshape(-1, module.hidden_dim)
    logits = nn.Linear.forward(module.router, x)
    chosen, index = torch.topk(logits, module.top_k, dim=1)
    scores = torch.sigmoid(chosen.float()).to(chosen.dtype)
    pairs = x * scores if module.top_k == 1 else (x.unsqueeze(1) * scores.unsqueeze(-1)).flatten(0, 1)
    index = index.view(-1, 1)
    experts = module.experts
    place, counts = _ops.route(index, experts.num_experts)
    rows = _Dispatch.apply(pairs, place, counts, 1)
    gate, up = _GroupedMm.apply(rows, experts.gate_up_proj, counts, True).chunk(2, dim=-1)
    rows = _GroupedMm.apply(up * experts.act_fn(gate), experts.down_proj, counts, True)
    found: Any = _Combine.apply(rows, torch.ones_like(index, dtype=rows.dtype), place, counts)
    found = found if module.top_k == 1 else found.view(-1, module.top_k, module.hidden_dim).sum(1)
    return module.shared_expert(x) + found, logits


@contextmanager
def experts_as_ops() -> Iterator[None]:
    """While open, mixtures of experts of transformers' models run by the operators of this file."""
    integration = sys.modules.get("transformers.integrations.moe")
    interface = getattr(integration, "ALL_EXPERTS_FUNCTIONS", None)
    llama4 = sys.modules.get("transformers.models.llama4.modeling_llama4")
    mixture: Any = getattr(llama4, "Llama4TextMoe", None)
    original = mixture.forward if mixture is not None else None
    try:
        if interface is not None:
            interface.get_interface = lambda *_: experts_forward
        if mixture is not None:
            mixture.forward = _llama4_forward
        yield
    finally:
        if interface is not None:
            del interface.get_interface
        if mixture is not None:
            mixture.forward = original
