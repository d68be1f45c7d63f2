"""Experts spread over ranks, as emitted programs call them: what `capture/experts.py` is for one process.

Each rank has an equal run of the experts, on up to two axes at once. On one whose ranks have the same tokens a rank
keeps the pairs of its own experts, and sums over a token's experts are addends (`own`). On one whose ranks have
different tokens these are exchanged (`lower/exchange.py`). Rows are as many as the data says: nothing has a fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpsearch.capture.experts import at_home, combine_sum, products_of
from hpsearch.lower import exchange


@dataclass(frozen=True)
class Place:
    """Which pair of a token and an expert each row is, here or on other ranks."""

    pairs: Tensor
    """[R] `t k + j`, of rows that did not travel; empty where they did."""
    shape: tuple[int, int]
    """(T, k)."""
    flow: exchange.Route | None


@torch.compiler.disable
def route(
    index: Tensor,
    num_experts: int,
    own: tuple[int, int] = (0, 1),
    group: exchange.Group | None = None,
    hops: Sequence[exchange.Group] | None = None,
) -> tuple[Place, Tensor]:
    """The way of every token of index [T, k], and the rows of each expert of this rank.

    own: (place, ranks) on the axis whose ranks have the same tokens. group: of the axis over which they are exchanged,
    each copy on its own; hops: of those over which one copy goes to each domain.
    """
    shape = (index.shape[0], index.shape[1])
    rank, ranks = own
    if ranks > 1:
        num_experts //= ranks
        index = index - rank * num_experts
        index = torch.where((index >= 0) & (index < num_experts), index, -1)
    if group is not None or hops is not None:
        flow = exchange.route(index, num_experts, group, hops)
        return Place(index.new_empty(0), shape, flow), flow.counts
    experts = index.reshape(-1)
    here = (experts >= 0).nonzero().squeeze(1)
    pairs = here[experts[here].argsort(stable=True)]
    return Place(pairs, shape, None), torch.bincount(experts[here], minlength=num_experts)


@torch.compiler.disable
def dispatch(x: Tensor, place: Place, counts: Tensor, top_k: int) -> Tensor:
    return x[place.pairs // top_k] if place.flow is None else exchange.send(place.flow, x)[0]


@torch.compiler.disable
def dispatch_backward(grad: Tensor, place: Place, counts: Tensor, top_k: int) -> Tensor:
    if place.flow is not None:
        return exchange.send_adjoint(place.flow, grad)
    return at_home(grad, place.pairs, *place.shape).sum(1)


@torch.compiler.disable
def combine(rows: Tensor, weight: Tensor, place: Place, counts: Tensor) -> Tensor:
    if place.flow is None:
        return combine_sum(rows, weight, place.pairs)
    found = exchange.collect(place.flow, rows, weight)
    return found.to(torch.promote_types(rows.dtype, weight.dtype))


@torch.compiler.disable
def combine_backward(grad: Tensor, rows: Tensor, weight: Tensor, place: Place, counts: Tensor) -> tuple[Tensor, Tensor]:
    if place.flow is None:
        return products_of(grad, rows, weight, place.pairs)
    by_rows, by_weight = exchange.collect_adjoint(place.flow, rows, weight, grad)
    return by_rows.to(rows.dtype), by_weight
