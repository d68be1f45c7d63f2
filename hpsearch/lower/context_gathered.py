"""Attention over cut sequences with all keys and values gathered."""

from __future__ import annotations

import torch
from torch import Tensor

from hpsearch.lower.context import SEQUENCE, Context, Pair, Triple, block, block_backward, merge


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    context: Context, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Pair:  # fmt: skip
    """(out, log-sum-exp) of this rank's queries; the mask has its rows for them, or one for all, and all columns."""
    keys, values = context.gather(k), context.gather(v)
    if not is_causal:
        return block(q, keys, values, False, attn_mask, scale)
    outs, sums, at = [], [], 0
    for start, count in context.pieces(context.rank, q.shape[SEQUENCE]):
        own = q.narrow(SEQUENCE, at, count)
        found = None
        for first, length, causal in _spans(start, count):
            part = (x.narrow(SEQUENCE, first, length) for x in (keys, values))
            found = merge(found, block(own, *part, causal, None, scale))
        assert found is not None
        outs.append(found[0])
        sums.append(found[1])
        at += count
    return torch.cat(outs, SEQUENCE).to(q.dtype), torch.cat(sums, SEQUENCE)


def gathered_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, *, context: Context, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Triple:  # fmt: skip
    """Gradients of this rank's (q, k, v)."""
    keys, values = context.gather(k), context.gather(v)
    if not is_causal:
        dq, dk, dv = block_backward(grad_out, q, keys, values, out, logsumexp, False, attn_mask, scale)
        return dq, context.scatter_sum(dk, k.dtype), context.scatter_sum(dv, v.dtype)
    dqs, at = [], 0
    dk, dv = (torch.zeros_like(x, dtype=logsumexp.dtype) for x in (keys, values))
    for start, count in context.pieces(context.rank, q.shape[SEQUENCE]):
        own = [x.narrow(SEQUENCE, at, count) for x in (grad_out, q)]
        ends = [x.narrow(SEQUENCE, at, count) for x in (out, logsumexp)]
        dq = torch.zeros_like(own[1], dtype=logsumexp.dtype)
        for first, length, causal in _spans(start, count):
            part = [x.narrow(SEQUENCE, first, length) for x in (keys, values)]
            found = block_backward(*own, *part, *ends, causal, None, scale)
            dq += found[0]
            dk.narrow(SEQUENCE, first, length).add_(found[1])
            dv.narrow(SEQUENCE, first, length).add_(found[2])
        dqs.append(dq)
        at += count
    return torch.cat(dqs, SEQUENCE).to(q.dtype), context.scatter_sum(dk, k.dtype), context.scatter_sum(dv, v.dtype)


def _spans(start: int, count: int) -> list[tuple[int, int, bool]]:
    """(first key, keys, whether causal) of what `count` queries from `start` on see."""
    before = [(0, start, False)] if start else []
    return [*before, (start, count, True)]
