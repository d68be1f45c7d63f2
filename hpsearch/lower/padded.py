"""Experts with a capacity, as emitted programs call them: `lower/experts.py` with shapes that no data changes.

Each expert has `slots` rows for every row of the batch; which tokens take them says `graph/capacity.py`. Rows of
experts are [expert, row of the batch, slot], then features; of ranks that exchange tokens [local expert, sender, row,
slot]. Slots that no token takes are zeros on the way there and read by nobody on the way back, so their gradients are
zeros. Exchanges are even, products are batched, and the host never waits for the device.

`place[p]` is the slot of pair p = t k + j among those that this rank fills; their number where it has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpsearch.lower.exchange import Group, swap


def route_padded(
    index: Tensor, num_experts: int, slots: int, tokens: int, own: tuple[int, int] = (0, 1), ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """(place [T k], rows of each local expert [E / own / ranks]) of index [T, k], with `tokens` of T in a row of the
    batch.

    own: (place, ranks) on the axis whose ranks have the same tokens. ranks: of the axis over which they are exchanged.
    """
    experts = index.to(torch.int64).reshape(-1, tokens * index.shape[1])
    rows = experts.shape[0]
    before = _before(experts, num_experts)
    row = torch.arange(rows, device=index.device).unsqueeze(1)
    place = (experts * rows + row) * slots + before
    part, parts = own
    experts_here = num_experts // parts
    here = experts_here * rows * slots
    place = place - part * here
    taken = (before < slots) & (place >= 0) & (place < here)
    counts = index.new_full((experts_here // ranks,), rows * slots * ranks)
    return torch.where(taken, place, here).reshape(-1), counts


def _before(experts: Tensor, num_experts: int) -> Tensor:
    """[rows, pairs]: how many pairs of its row come before each pair and are of the same expert."""
    ordered, order = experts.sort(dim=1, stable=True)
    counts = experts.new_zeros((experts.shape[0], num_experts)).scatter_add(1, experts, torch.ones_like(experts))
    first = counts.cumsum(1) - counts
    turn = torch.arange(experts.shape[1], device=experts.device).expand_as(experts)
    return torch.empty_like(experts).scatter(1, order, turn - first.gather(1, ordered))


def dispatch_padded(
    x: Tensor, place: Tensor, counts: Tensor, top_k: int, size: int, group: Group = "", ranks: int = 1
) -> Tensor:
    """x [T, D] to the slots: [R, D]. `size`: slots that this rank fills."""
    return _there(_with_zeros(x)[_pairs(place, size) // top_k], counts, group, ranks)


def dispatch_backward_padded(
    grad: Tensor, place: Tensor, counts: Tensor, top_k: int, group: Group = "", ranks: int = 1
) -> Tensor:
    """The adjoint of `dispatch_padded`: [R, D] to [T, D]."""
    return _with_zeros(_back(grad, counts, group, ranks))[place].unflatten(0, (-1, top_k)).sum(1)


def combine_padded(
    rows: Tensor, weight: Tensor, place: Tensor, counts: Tensor, group: Group = "", ranks: int = 1
) -> Tensor:
    """The sum over the experts that took each token, of weight [T, k] times row [R, D]: [T, D]."""
    met = _with_zeros(_back(rows, counts, group, ranks))[place].unflatten(0, weight.shape)
    return (met * weight.unsqueeze(-1)).sum(1)


def combine_backward_padded(
    grad: Tensor, rows: Tensor, weight: Tensor, place: Tensor, counts: Tensor, group: Group = "", ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """Gradients of `combine_padded` by its rows and its weight, from grad [T, D]: ([R, D], [T, k]).

    grad crosses as tokens do, in the dtype of rows; the weight crosses too, and one number a slot comes back.
    """
    pairs = _pairs(place, rows.shape[0])
    arrived = _there(_with_zeros(grad.to(rows.dtype))[pairs // weight.shape[1]], counts, group, ranks)
    weights = _there(_with_zeros(weight.reshape(-1, 1))[pairs], counts, group, ranks)
    products = (arrived.to(torch.promote_types(rows.dtype, weight.dtype)) * rows).sum(-1, keepdim=True)
    by_weight = _with_zeros(_back(products.to(weight.dtype), counts, group, ranks))[place]
    return (arrived * weights).to(rows.dtype), by_weight.view(weight.shape)


def grouped_mm_padded(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return torch.bmm(rows.unflatten(0, (weight.shape[0], -1)), weight if transposed else weight.mT).flatten(0, 1)


def grouped_mm_weight_padded(grad: Tensor, rows: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    left, right = (rows, grad) if transposed else (grad, rows)
    experts = counts.shape[0]
    return torch.bmm(left.unflatten(0, (experts, -1)).mT, right.unflatten(0, (experts, -1)))


def grouped_add_padded(rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    return (rows.unflatten(0, (bias.shape[0], -1)) + bias.unsqueeze(1)).flatten(0, 1)


def grouped_sum_padded(grad: Tensor, counts: Tensor) -> Tensor:
    return grad.unflatten(0, (counts.shape[0], -1)).sum(1)


def _pairs(place: Tensor, size: int) -> Tensor:
    """[size]: the pair in each slot; one past the last where there is none."""
    found = place.new_full((size + 1,), place.shape[0])
    return found.scatter(0, place, torch.arange(place.shape[0], device=place.device))[:size]


def _with_zeros(x: Tensor) -> Tensor:
    """x with a row of zeros behind, which what has no place reads."""
    return torch.cat((x, x.new_zeros((1, *x.shape[1:]))))


def _there(rows: Tensor, counts: Tensor, group: Group, ranks: int) -> Tensor:
    """Rows [rank, local expert, …] of all experts to the ranks that have them: [local expert, sender, …]."""
    if ranks == 1:
        return rows
    met = swap(rows, group, ranks)
    return met.unflatten(0, (ranks, counts.shape[0], -1)).transpose(0, 1).flatten(0, 2)


def _back(rows: Tensor, counts: Tensor, group: Group, ranks: int) -> Tensor:
    """The inverse of `_there`."""
    if ranks == 1:
        return rows
    return swap(rows.unflatten(0, (counts.shape[0], ranks, -1)).transpose(0, 1).flatten(0, 2), group, ranks)
