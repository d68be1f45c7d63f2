"""Attention over sequences that are cut over ranks, as emitted programs call it: three ways, equal results.

    gathered   every rank gets all keys and values and attends with its own queries
    ring       blocks of keys and values pass from rank to rank; results of blocks are merged by their log-sum-exps
    ulysses    every rank gets some heads of all positions, attends, and gives the results back

A rank has consecutive positions, or head-tail: pieces r and 2n-1-r of 2n, so that looking back is equal work for all.
With the log-sum-exp of all keys known, gradients of blocks add up, so backward needs no merging.
Keys and values may have fewer heads than queries. Shapes: q, k, v, out `b h s d`, log-sum-exp `b h s`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpsearch.lower.local_ops import join, join_rows, split, split_rows

c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
SEQUENCE, HEADS = 2, 1
Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Context:
    """The ranks that share each sequence."""

    group: str
    rank: int
    ranks: int
    head_tail: bool

    def pieces(self, rank: int, local: int) -> list[tuple[int, int]]:
        """(first position, positions) of what `rank` has of a sequence, `local` in all."""
        if not self.head_tail:
            return [(rank * local, local)]
        half = local // 2
        return [(rank * half, half), ((2 * self.ranks - 1 - rank) * half, half)]

    def gather(self, x: Tensor) -> Tensor:
        every = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), self.ranks, self.group))
        return join_rows(every, SEQUENCE, self.ranks, x.shape[SEQUENCE] * self.ranks, self.head_tail)

    def scatter_sum(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        each = split_rows(x.to(dtype), SEQUENCE, self.ranks, x.shape[SEQUENCE], self.head_tail)
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(each, "sum", self.ranks, self.group))

    def shift(self, *tensors: Tensor) -> Tensor:
        """Sends to the next rank what the one before sends here: one message, to be taken by `arrived`."""
        packed = torch.cat([x.reshape(-1) for x in tensors])
        there, here = [0] * self.ranks, [0] * self.ranks
        there[(self.rank + 1) % self.ranks] = here[(self.rank - 1) % self.ranks] = packed.numel()
        return c10d.all_to_all_single(packed, here, there, self.group)

    def exchange(self, x: Tensor, given: int, taken: int) -> Tensor:
        """Pieces of dim `given` for the pieces that other ranks have of dim `taken`."""
        each = split(x, given, self.ranks)
        counts = [each.shape[0] // self.ranks] * self.ranks
        return join(c10d.wait_tensor(c10d.all_to_all_single(each, counts, counts, self.group)), taken, self.ranks)


def arrived(message: Tensor, *like: Tensor) -> list[Tensor]:
    """The tensors of a `shift`, of the shapes of `like`."""
    parts = c10d.wait_tensor(message).split([x.numel() for x in like])
    return [part.reshape(x.shape) for part, x in zip(parts, like, strict=True)]


def block(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Pair:
    """(out, log-sum-exp) of queries over some of the keys; zeros and -inf for queries that see none of them."""
    if q.device.type == "cpu":
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        out, lse = by_products(q, k, v, causal, mask, scale)
    if mask is None:
        return out, lse
    blind = mask.isneginf().all(-1)  # torch's kernel says 0 for those
    return torch.where(blind.unsqueeze(-1), 0.0, out), torch.where(blind, -torch.inf, lse)


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, mask: Tensor | None, scale: float | None,
) -> Triple:  # fmt: skip
    """What some of the keys add to the gradients; `out` and `lse` are over all keys."""
    if q.device.type == "cpu":
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found: Triple = kernel(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return found
    return by_products_backward(grad, q, k, v, out, lse, causal, mask, scale)


def by_products(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Pair:
    """`block` for any device, the scores written out."""
    scores, values = _scores(q, k, causal, mask, scale), _as_heads(v, q).to(_sum_dtype(q))
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ values).to(q.dtype), lse


def by_products_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, mask: Tensor | None, scale: float | None,
) -> Triple:  # fmt: skip
    """`block_backward` for any device."""
    work = _sum_dtype(q)
    wide, far, keys = grad.to(work), _as_heads(v, q).to(work), _as_heads(k, q).to(work)
    shares = (_scores(q, k, causal, mask, scale) - lse.unsqueeze(-1)).exp()
    raised = shares * (wide @ far.mT - (wide * out.to(work)).sum(-1, keepdim=True)) * _scale(q, scale)
    dq, dk, dv = raised @ keys, raised.mT @ q.to(work), shares.mT @ wide
    return dq.to(q.dtype), _own_heads(dk, k).to(k.dtype), _own_heads(dv, v).to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    work = _sum_dtype(q)
    scores = (q.to(work) @ _as_heads(k, q).to(work).mT) * _scale(q, scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores if mask is None else scores + mask


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def _as_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[HEADS] // x.shape[HEADS], HEADS)


def _own_heads(grad: Tensor, x: Tensor) -> Tensor:
    return grad.unflatten(HEADS, (x.shape[HEADS], -1)).sum(HEADS + 1)


def merge(one: Pair | None, other: Pair) -> Pair:
    """The result over the keys of both; out in the dtype in which results are added."""
    out, lse = other[0].to(other[1].dtype), other[1]
    if one is None:
        return out, lse
    total = torch.logaddexp(one[1], lse)
    shares = [torch.where(part.isneginf(), 0.0, (part - total).exp()).unsqueeze(-1) for part in (one[1], lse)]
    return one[0] * shares[0] + out * shares[1], total
