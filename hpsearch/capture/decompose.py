"""Operators that are taken apart while tracing, and no others.

Kept whole, because sharding rules and prices exist for the whole: softmax, layer and RMS norm, embedding, attention,
convolution, dropout. Taken apart: `addmm` (so that every matrix product is one kind of node), torch's losses (so that
a mean is a sum and a count, and not hidden in an op), and group norm (no sharding rule knows it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.mm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(result, mean [N, G], 1/std [N, G])."""
    grouped = x.reshape(n, groups, c // groups * hw)
    mean = grouped.mean(2, keepdim=True)
    centred = grouped - mean
    rstd = ((centred * centred).mean(2, keepdim=True) + eps).rsqrt()
    result = (centred * rstd).reshape(x.shape)
    channels = (1, c, *(1,) * (x.dim() - 2))
    result = result if weight is None else result * weight.reshape(channels)
    result = result if bias is None else result + bias.reshape(channels)
    return result, mean.squeeze(2), rstd.squeeze(2)


def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None,
    n: int, c: int, hw: int, groups: int, mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of input, weight and bias, those that `mask` asks for."""
    shape = (n, groups, c // groups * hw)
    rstd = rstd.unsqueeze(2)
    normal = (x.reshape(shape) - mean.unsqueeze(2)) * rstd
    others = [0, *range(2, x.dim())]
    inner = grad if weight is None else grad * weight.reshape(1, c, *(1,) * (x.dim() - 2))
    inner = inner.reshape(shape)
    away = inner.mean(2, keepdim=True) + normal * (inner * normal).mean(2, keepdim=True)
    return (
        (rstd * (inner - away)).reshape(x.shape) if mask[0] else None,
        (grad * normal.reshape(x.shape)).sum(others) if mask[1] else None,
        grad.sum(others) if mask[2] else None,
    )


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table that `export_joint` traces with."""
    table: dict[Any, Callable[..., Any]] = dict(
        get_decompositions(
            [
                aten.nll_loss_forward.default,
                aten.nll_loss_backward.default,
                aten.nll_loss2d_forward.default,
                aten.nll_loss2d_backward.default,
                aten.mse_loss.default,
                aten.mse_loss_backward.default,
                aten.smooth_l1_loss.default,
                aten.smooth_l1_loss_backward.default,
                aten.huber_loss.default,
                aten.huber_loss_backward.default,
                aten.binary_cross_entropy.default,
                aten.binary_cross_entropy_backward.default,
                aten.binary_cross_entropy_with_logits.default,
                aten.soft_margin_loss.default,
                aten.soft_margin_loss_backward.default,
                aten.log_sigmoid_forward.default,
                aten.log_sigmoid_backward.default,
            ]
        )
    )
    table[aten.addmm.default] = _addmm
    table[aten.baddbmm.default] = _baddbmm
    table[aten.native_group_norm.default] = _group_norm
    table[aten.native_group_norm_backward.default] = _group_norm_backward
    return table
