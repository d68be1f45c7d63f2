"""Bytes that a loss holds for one logit at its peak, by how it is written."""

from __future__ import annotations

from hpsearch.estimate.parallel import ParallelLayout

PARALLEL = 6.0
"""Split over the vocabulary: 16 bit, and fp32 that becomes the softmax and its own gradient in place (Megatron-LM,
core/tensor_parallel/cross_entropy.py)."""
KERNEL = 4.0
"""A kernel over whole rows: 16 bit and its 16-bit gradient, reductions in registers (FlashAttention's
losses/cross_entropy.py, llm-foundry's default)."""
EAGER = 14.0
"""Op by op: 16 bit, fp32, its softmax, its gradient."""
GATHERED = 22.0
"""Op by op on logits gathered over tp: also the 16-bit copy, and its gradient in fp32 and in 16 bit."""


def logit_bytes(layout: ParallelLayout) -> float:
    """Of one logit on one device; with `fused` the vocabulary is split over tp, else each rank has all of it."""
    if layout.fused:
        return PARALLEL
    if layout.fsdp and layout.loss_kernel:
        return KERNEL
    return EAGER if layout.tp == 1 else GATHERED


LOSS, LOSS_BY_OPS, LOSS_TORCH = (14.0, 8.0, 8.0, 6.0), (38.0, 18.0, 25.0, 12.0), (20.0, 14.0, 8.0, 6.0)
"""Bytes moved for each logit and kernels, (forward, backward, forward, backward). By ops, as Megatron-LM had it before
2024: to fp32 6, maximum 4, subtraction 8, exponential 8, sum 4, division 8; scaled 8, to 16 bit 6, written 4."""
