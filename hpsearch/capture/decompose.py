"""Operators that are taken apart while tracing, and no others.

Kept whole, because sharding rules and prices exist for the whole: softmax, layer and RMS norm, embedding, attention,
convolution, dropout. Taken apart: `addmm` (so that every matrix product is one kind of node) and the negative
log-likelihood loss (so that "mean over valid tokens" is a sum and a count, and not hidden in an op).
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


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table that `export_joint` traces with."""
    table: dict[Any, Callable[..., Any]] = dict(
        get_decompositions(
            [
                aten.nll_loss_forward.default,
                aten.nll_loss_backward.default,
                aten.mse_loss.default,
                aten.mse_loss_backward.default,
            ]
        )
    )
    table[aten.addmm.default] = _addmm
    table[aten.baddbmm.default] = _baddbmm
    return table
