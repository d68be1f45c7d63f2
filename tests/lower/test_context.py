"""Attention over cut sequences: every way, on ranks that are threads, equals attention over the whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from hpsearch.layout import EXCHANGES
from hpsearch.lower import context as room
from hpsearch.lower.context import Context
from hpsearch.lower.context_gathered import gathered_attention, gathered_attention_backward
from hpsearch.lower.context_ring import ring_attention, ring_attention_backward
from hpsearch.lower.context_ulysses import ulysses_attention, ulysses_attention_backward
from hpsearch.lower.local_ops import cut_rows, join_rows, split_rows

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gathered": (gathered_attention, gathered_attention_backward),
    "ring": (ring_attention, ring_attention_backward),
    "ulysses": (ulysses_attention, ulysses_attention_backward),
}
ROWS, HEADS, LENGTH, WIDTH = 2, 8, 16, 6


@dataclass
class Table:
    """Where threads put what they send; nobody goes on before all have taken theirs."""

    barrier: Barrier
    put: dict[int, Any] = field(default_factory=dict)

    def all(self, rank: int, given: Any) -> dict[int, Any]:
        self.put[rank] = given
        self.barrier.wait(20)
        found = dict(self.put)
        self.barrier.wait(20)
        return found


@dataclass(frozen=True)
class Thread(Context):
    table: Table | None = None

    def _all(self, given: Any) -> list[Any]:
        assert self.table is not None
        found = self.table.all(self.rank, given)
        return [found[rank] for rank in range(self.ranks)]

    def gather(self, x: Tensor) -> Tensor:
        return join_rows(torch.cat(self._all(x)), 2, self.ranks, x.shape[2] * self.ranks, self.head_tail)

    def scatter_sum(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return cut_rows(sum(self._all(x)), 2, self.rank, self.ranks, x.shape[2], self.head_tail)

    def shift(self, *tensors: Tensor) -> Tensor:
        packed = torch.cat([x.reshape(-1) for x in tensors])
        return self._all(packed)[(self.rank - 1) % self.ranks]

    def exchange(self, x: Tensor, given: int, taken: int) -> Tensor:
        return torch.cat([pieces[self.rank] for pieces in self._all(x.tensor_split(self.ranks, given))], taken)


def masks(name: str) -> Tensor | None:
    position = torch.arange(LENGTH)
    ago = position[:, None] - position[None]
    seen = {
        "window": (ago >= 0) & (ago < 5),
        "documents": (ago >= 0) & (position[:, None] // 7 == position[None] // 7),
        "padding": (position < 11)[None],
    }
    if name not in seen:
        return None
    return torch.zeros(seen[name].shape, dtype=torch.float64).masked_fill(~seen[name], -torch.inf)[None, None]


@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("head_tail", [False, True])
@pytest.mark.parametrize("mask_name", ["none", "causal", "window", "documents", "padding"])
def test_every_way_is_attention(kind: str, ranks: int, kv_heads: int, head_tail: bool, mask_name: str) -> None:
    if kind == "ulysses" and head_tail:
        head_tail = False  # pieces of sequences are consecutive there, see search/context.py
    torch.manual_seed(0)
    q, grad = (torch.randn(ROWS, HEADS, LENGTH, WIDTH, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(ROWS, kv_heads, LENGTH, WIDTH, dtype=torch.float64) for _ in range(2))
    mask, causal = masks(mask_name), mask_name == "causal"
    out, lse = room.block(q, k, v, causal, mask, 0.3)
    expected = (out, lse, *room.block_backward(grad, q, k, v, out, lse, causal, mask, 0.3))
    table = Table(Barrier(ranks))

    def work(rank: int) -> tuple[Tensor, ...]:
        there = Thread("", rank, ranks, head_tail, table)

        def mine(x: Tensor) -> Tensor:
            return cut_rows(x, 2, rank, ranks, LENGTH, head_tail)

        rows = mask if mask is None or kind == "ulysses" or mask.shape[2] == 1 else mine(mask)
        own_q, own_k, own_v, own_grad = map(mine, (q, k, v, grad))
        more = {"context": there, "attn_mask": rows, "scale": 0.3}
        forward, backward = FUNCTIONS[kind]
        found = forward(own_q, own_k, own_v, 0.0, causal, **more)
        return (*found, *backward(own_grad, own_q, own_k, own_v, *found, 0.0, causal, **more))

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(work, range(ranks)))
    for i, whole in enumerate(expected):
        for rank in range(ranks):
            piece = cut_rows(whole, 2, rank, ranks, LENGTH, head_tail)
            torch.testing.assert_close(found[rank][i], piece, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("mask_name", ["none", "causal", "window"])
def test_products_equal_the_cpu_kernel(kv_heads: int, mask_name: str) -> None:
    torch.manual_seed(0)
    q, grad = (torch.randn(2, 4, LENGTH, WIDTH, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, LENGTH, WIDTH, dtype=torch.float64) for _ in range(2))
    how = mask_name == "causal", masks(mask_name), 0.3
    out, lse = room.block(q, k, v, *how)
    found = (*room.by_products(q, k, v, *how), *room.by_products_backward(grad, q, k, v, out, lse, *how))
    for one, other in zip(found, (out, lse, *room.block_backward(grad, q, k, v, out, lse, *how)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head_tail", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_of_each_row_come_back_in_order(head_tail: bool, dim: int) -> None:
    """Three sequences of eight positions behind one another, over two ranks."""
    x = torch.arange(48).reshape(24, 2) if dim == 0 else torch.arange(48).reshape(2, 24)
    pieces = [cut_rows(x, dim, rank, 2, 8, head_tail) for rank in range(2)]
    first = [0, 1, 6, 7] if head_tail else [0, 1, 2, 3]
    index = torch.tensor([8 * row + at for row in range(3) for at in first])
    assert torch.equal(pieces[0], x.index_select(dim, index))
    assert torch.equal(split_rows(x, dim, 2, 8, head_tail), torch.cat(pieces))
    assert torch.equal(join_rows(torch.cat(pieces), dim, 2, 8, head_tail), x)
