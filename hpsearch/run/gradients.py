"""Norm and clipping of gradients over the whole model, the same number under any layout.

Each rank adds up its own pieces; a tensor that an axis replicates counts only on that axis's first rank. One
all-reduce of one number over all ranks follows, in float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def global_norm(gradients: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients taken as one vector; a 0-d float64 tensor, equal on every rank. Collective."""
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients if _counts_here(g)]
    local = [g for g in local if g.numel()]
    if local:
        norms = torch.stack([n.double() for n in torch._foreach_norm(local, norm_type)])
        device = norms.device
    else:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        norms = torch.zeros(1, dtype=torch.float64, device=device)
    if norm_type == inf:
        total = norms.max()
        if dist.is_initialized():
            dist.all_reduce(total, dist.ReduceOp.MAX)
        return total
    total = norms.pow(norm_type).sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.pow(1.0 / norm_type)


def _counts_here(gradient: torch.Tensor) -> bool:
    if not isinstance(gradient, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(c == 0 or not p.is_replicate() for c, p in zip(coordinate, gradient.placements, strict=True))


def clip(parameters: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their global norm, which is `norm`, is at most `max_norm`; the norm before.

    The factor is torch.nn.utils.clip_grad_norm_'s: max_norm / (norm + 1e-6), at most 1.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(local.dtype))
    return norm
