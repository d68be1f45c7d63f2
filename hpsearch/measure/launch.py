"""What an operator costs besides its work: the statements of a transformer block on tensors of a few numbers.

Emitted programs issue one operator after another from Python, and between two that compute stand views, which move
nothing and still take the host's time. So the block has views as emitted programs have them, and its seconds are shared
out among the operators that a cost model prices.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

PRICED = 27
"""Operators of `block` that are not views."""
EVICTED_BYTES = 16 * 2**20
"""Touched before each block on a processor: a step's kernels leave nothing of the dispatcher in the cache."""
BLOCKS = 12
"""In one round."""


def block(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """x, turn: [1, 4, 8]; w: [8, 8]; scale: [8]."""
    aten = torch.ops.aten
    square = aten.pow.Tensor_Scalar(x, 2)
    mean = aten.mean.dim(square, [-1], True)
    root = aten.rsqrt.default(aten.add.Scalar(mean, 1e-6))
    normal = aten.mul.Tensor(scale, aten.mul.Tensor(x, root))
    q, k, v = (_linear(normal, w) for _ in range(3))
    heads = aten.transpose.int(aten.view.default(q, [1, 4, 2, 4]), 1, 2)
    other = aten.transpose.int(aten.view.default(k, [1, 4, 2, 4]), 1, 2)
    first, second = aten.slice.Tensor(heads, 3, 0, 2), aten.slice.Tensor(heads, 3, 2, 4)
    turned = aten.cat.default([aten.neg.default(second), first], -1)
    wide = aten.expand.default(aten.unsqueeze.default(aten.view.default(turn, [4, 8]), 0), [1, 4, 8])
    cos = aten.transpose.int(aten.view.default(wide, [1, 4, 2, 4]), 1, 2)
    placed = aten.add.Tensor(aten.mul.Tensor(heads, cos), aten.mul.Tensor(turned, cos))
    joined = aten.add.Tensor(placed, other)
    flat = aten.view.default(aten.clone.default(aten.transpose.int(joined, 1, 2)), [1, 4, 8])
    gate = aten.mul.Tensor(aten.silu.default(_linear(flat, w)), v)
    out = aten.add.Tensor(x, _linear(gate, w))
    back = aten.mm.default(aten.t.default(aten.view.default(out, [4, 8])), aten.view.default(gate, [4, 8]))
    total = aten.sum.dim_IntList(aten.mul.Tensor(out, x), [0, 1], True)
    summed: torch.Tensor = aten.add.Tensor(aten.view.default(total, [8]), aten.sum.dim_IntList(back, [0]))
    return aten.add.Tensor(out, summed)


def _linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As an einsum is emitted: view, transpose, product, view."""
    aten = torch.ops.aten
    product = aten.mm.default(aten.view.default(x, [4, 8]), aten.t.default(w))
    return aten.view.default(product, [1, 4, 8])  # type: ignore[no-any-return]


def blocks(device: torch.device) -> Callable[[], object]:
    """One block on small tensors of `device`."""
    x, turn = (torch.ones(1, 4, 8, device=device) for _ in range(2))
    w, scale = torch.ones(8, 8, device=device) / 8, torch.ones(8, device=device)
    return lambda: block(x, w, scale, turn)


def cold_cpu_s(run: Callable[[], object]) -> float:
    """CPU seconds of one block, median of a few that each begin with cold caches."""
    swept, found = torch.zeros(EVICTED_BYTES // 4), []
    for _ in range(BLOCKS):
        swept.add_(1.0)
        start = time.thread_time()
        run()
        found.append(time.thread_time() - start)
    return sorted(found)[BLOCKS // 2]
