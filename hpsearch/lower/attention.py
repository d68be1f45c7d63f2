"""Attention as emitted programs call it: the kernel it was captured as on CPU, the public one on any other device.

A model is captured on CPU, so its graph holds the CPU flash kernel. On another device `scaled_dot_product_attention`
picks that device's own kernel; its backward runs the forward once more, because the public function does not hand out
what its kernels keep. That costs one attention forward a backward, and is right for any dtype, mask and device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_aten = torch.ops.aten


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of heads `b h s d`; keys and values may have fewer heads. The log-sum-exp is empty off CPU."""
    if q.device.type == "cpu":
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu.default
        found: tuple[Tensor, Tensor] = kernel(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
        return found
    return _public(q, k, v, is_causal, attn_mask, scale), q.new_empty((*q.shape[:3],), dtype=torch.float32)


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (q, k, v)."""
    if q.device.type == "cpu":
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found: tuple[Tensor, Tensor, Tensor] = kernel(
            grad_out, q, k, v, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        return found
    return public_backward(grad_out, q, k, v, is_causal, attn_mask, scale)


def public_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by running the public function again under autograd."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        again = _public(*leaves, is_causal, attn_mask, scale)
        dq, dk, dv = torch.autograd.grad(again, leaves, grad_out)
    return dq, dk, dv


def _public(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
