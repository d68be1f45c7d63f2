"""Attention over cut sequences with keys and values that pass from rank to rank.

While a rank works at one block the next is on its way. In backward the gradient of a block travels with it, one rank
behind, and is home after as many shifts as there are ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpsearch.lower.context import SEQUENCE, Context, Pair, Triple, arrived, block, block_backward, merge


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    context: Context, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Pair:  # fmt: skip
    """(out, log-sum-exp) of this rank's queries; the mask has its rows for them, or one for all, and all columns."""
    found, local = None, q.shape[SEQUENCE]
    for step in range(context.ranks):
        message = context.shift(k, v) if step < context.ranks - 1 else None
        source = (context.rank - step) % context.ranks
        seen = _seen(context, source, is_causal, local, k.shape[SEQUENCE])
        if seen is not None:
            rows, columns, causal = seen
            mask = _columns(attn_mask, context, source, k.shape[SEQUENCE])
            part = [x.narrow(SEQUENCE, *span) for x, span in ((q, rows), (k, columns), (v, columns))]
            found = merge(found, _widened(block(*part, causal, mask, scale), rows, local))
        if message is not None:
            k, v = arrived(message, k, v)
    assert found is not None  # its own block is always seen
    return found[0].to(q.dtype), found[1]


def ring_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, *, context: Context, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Triple:  # fmt: skip
    """Gradients of this rank's (q, k, v)."""
    local, dtypes = q.shape[SEQUENCE], (k.dtype, v.dtype)
    dq = torch.zeros_like(q, dtype=logsumexp.dtype)
    dk, dv = (torch.zeros_like(x, dtype=logsumexp.dtype) for x in (k, v))
    travelling = None
    for step in range(context.ranks):
        message = context.shift(k, v) if step < context.ranks - 1 else None
        source = (context.rank - step) % context.ranks
        seen = _seen(context, source, is_causal, local, k.shape[SEQUENCE])
        own = [torch.zeros_like(dk), torch.zeros_like(dv)]
        if seen is not None:
            rows, columns, causal = seen
            mask = _columns(attn_mask, context, source, k.shape[SEQUENCE])
            part = [x.narrow(SEQUENCE, *span) for x, span in ((q, rows), (k, columns), (v, columns))]
            ahead, *ends = (x.narrow(SEQUENCE, *rows) for x in (grad_out, out, logsumexp))
            found = block_backward(ahead, *part, *ends, causal, mask, scale)
            dq.narrow(SEQUENCE, *rows).add_(found[0])
            for total, added in zip(own, found[1:], strict=True):
                total.narrow(SEQUENCE, *columns).add_(added)
        if travelling is not None:
            own = [mine + theirs for mine, theirs in zip(own, arrived(travelling, dk, dv), strict=True)]
        travelling = context.shift(*own)
        if message is not None:
            k, v = arrived(message, k, v)
    assert travelling is not None
    dk, dv = arrived(travelling, dk, dv)
    return dq.to(q.dtype), dk.to(dtypes[0]), dv.to(dtypes[1])


Span = tuple[int, int]
"""(first, how many) of local positions."""


def _seen(context: Context, source: int, is_causal: bool, queries: int, keys: int) -> tuple[Span, Span, bool] | None:
    """Which of the queries see which keys of rank `source`, and whether each up to its own place; None if none do."""
    rows, columns = (0, queries), (0, keys)
    if not is_causal or source == context.rank:
        return rows, columns, is_causal
    if context.head_tail:
        half = queries // 2
        return (rows, (0, half), False) if source < context.rank else ((half, half), columns, False)
    return (rows, columns, False) if source < context.rank else None


def _columns(mask: Tensor | None, context: Context, source: int, keys: int) -> Tensor | None:
    """The mask's columns for the keys of a rank."""
    if mask is None or mask.shape[-1] == 1:
        return mask
    return torch.cat([mask.narrow(-1, *piece) for piece in context.pieces(source, keys)], -1)


def _widened(found: Pair, rows: Span, local: int) -> Pair:
    """A result of some of the queries as one of all, of which the others have seen nothing."""
    first, count = rows
    if count == local:
        return found
    out, lse = found
    shape = list(out.shape)
    shape[SEQUENCE] = first
    nothing = out.new_zeros(shape), lse.new_full(shape[:-1], -torch.inf)
    return torch.cat((nothing[0], out), SEQUENCE), torch.cat((nothing[1], lse), SEQUENCE)
