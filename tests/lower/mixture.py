"""A layer of experts, one matrix each, on tokens that lie on several ranks; and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixture:
    """Inputs of the layer by rank; or what `alone` and the exchange make of them: gradients in the places of inputs,
    and the output in that of the output's gradient."""

    index: list[Tensor]
    x: list[Tensor]
    weight: list[Tensor]
    grad: list[Tensor]
    matrices: Tensor

    def alone(self) -> Mixture:
        """Token by token, slot by slot, by autograd."""
        matrices = self.matrices.clone().requires_grad_()
        xs, weights, outs = [], [], []
        total = matrices.sum() * 0
        for index, x, weight, grad in zip(self.index, self.x, self.weight, self.grad, strict=True):
            x, weight, out = x.clone().requires_grad_(), weight.clone().requires_grad_(), []
            for t, experts in enumerate(index.tolist()):
                chosen = [weight[t, j] * (x[t] @ matrices[e]) for j, e in enumerate(experts) if e >= 0]
                out.append(sum(chosen, torch.zeros_like(x[t])))
            made = torch.stack(out) if out else x * 0
            total = total + (made * grad).sum() + (x.sum() + weight.sum()) * 0
            xs, weights, outs = [*xs, x], [*weights, weight], [*outs, made.detach()]
        total.backward()
        return Mixture(self.index, [x.grad for x in xs], [w.grad for w in weights], outs, matrices.grad)  # type: ignore


def mixture(
    ranks: int,
    experts: int,
    top_k: int,
    width: int,
    tokens: Callable[[int], int],
    change: Callable[[Tensor], Tensor] = lambda index: index,
) -> Mixture:
    """Drawn in fp64: `tokens(rank)` tokens, each to `top_k` different experts, `change` applied to the index."""
    generator = torch.Generator().manual_seed(ranks * 1000 + experts + top_k)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    index = [change(draw(tokens(r), experts).topk(top_k, 1).indices) for r in range(ranks)]
    counts = [len(i) for i in index]
    tensors = [[draw(n, size) for n in counts] for size in (width, top_k, width)]
    return Mixture(index, *tensors, draw(experts, width, width))
