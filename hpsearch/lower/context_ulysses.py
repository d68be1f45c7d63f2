"""Attention over cut sequences with heads exchanged for positions, and back.

With fewer heads of keys than ranks each is repeated, so that every rank has those that its queries need.
"""

from __future__ import annotations

from torch import Tensor

from hpsearch.errors import LoweringError
from hpsearch.lower.context import HEADS, SEQUENCE, Context, Pair, Triple, block, block_backward
from hpsearch.strategy import head_repeats


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    context: Context, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Pair:  # fmt: skip
    """(out, log-sum-exp) of this rank's queries; the mask is whole."""
    repeats = _repeats(q, k, context)
    heads = [_there(x, context) for x in (q, *(x.repeat_interleave(repeats, HEADS) for x in (k, v)))]
    out, lse = block(*heads, is_causal, _own(attn_mask, context), scale)
    return _back(out, context), _back(lse, context)


def ulysses_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, *, context: Context, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Triple:  # fmt: skip
    """Gradients of this rank's (q, k, v)."""
    repeats = _repeats(q, k, context)
    given = (grad_out, q, *(x.repeat_interleave(repeats, HEADS) for x in (k, v)), out, logsumexp)
    heads = [_there(x, context) for x in given]
    dq, dk, dv = (_back(x, context) for x in block_backward(*heads, is_causal, _own(attn_mask, context), scale))
    return dq, *(x.unflatten(HEADS, (-1, repeats)).sum(HEADS + 1) for x in (dk, dv))


def _repeats(q: Tensor, k: Tensor, context: Context) -> int:
    found = head_repeats(q.shape[HEADS], k.shape[HEADS], context.ranks)
    if found is None:
        problem = f"{q.shape[HEADS]} heads of queries and {k.shape[HEADS]} of keys cannot be shared"
        raise LoweringError("ulysses attention", f"{problem} by {context.ranks} ranks", "Use gathered or ring.")
    return found


def _there(x: Tensor, context: Context) -> Tensor:
    return context.exchange(x, HEADS, SEQUENCE)


def _back(x: Tensor, context: Context) -> Tensor:
    return context.exchange(x, SEQUENCE, HEADS)


def _own(mask: Tensor | None, context: Context) -> Tensor | None:
    """The mask of this rank's heads."""
    if mask is None or mask.dim() < 4 or mask.shape[HEADS] == 1:
        return mask
    count = mask.shape[HEADS] // context.ranks
    return mask.narrow(HEADS, context.rank * count, count)
