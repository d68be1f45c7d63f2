"""What routed experts cost besides their products: how tokens are arranged, quantised and waited for.

Dropless experts run op by op: token counts come back to the host, tokens are sorted, sent through buffers, padded,
quantised and multiplied expert by expert. Code that captures the whole iteration has no host in the way, and kernels
that read tokens where they are.
"""

from __future__ import annotations

from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import ModelShape

ARRANGED, ARRANGED_CAPTURED = 16.0, 6.0
"""Bytes moved one way for each element of a routed token: sorted by expert, in and out of the dispatcher's buffers, put
back in order."""
CLAMPED = (48.0, 112.0)
"""Bytes moved for each element of the expert's width, forward and backward, where biases and a clamped activation are
applied op by op: two clamps, a scale, a sigmoid, two products, a sum, the bias, the weight in fp32 and back."""
QUANTISED = {"mxfp8": 10.0, "nvfp4": 10.0}
QUANTISED_BY_TENSOR = 16.0
"""Bytes moved to quantise one element of an expert's input: padded to whole blocks of rows, read, written along both
sides, cut again; one scale for a whole tensor is found by a pass of its own."""
QUANTISED_CAPTURED = 4.0
"""The same inside the kernels that sort tokens."""
EXPERT_LAUNCH = 0.046
"""A launch from a loop over experts inside one call, in kernels: the device sees 3 us between two small kernels."""
ROUTING_STALL = 5.0
"""Kernels that the host issues between learning how many tokens each expert got and the first product over them."""


def by_ops(layout: ParallelLayout) -> bool:
    """Whether experts run op by op, driven by the host."""
    return "all" not in layout.graphed


def arranged_bytes(layout: ParallelLayout) -> float:
    """Moved one way for each element of a routed token."""
    return ARRANGED if by_ops(layout) else ARRANGED_CAPTURED


def clamped_bytes(shape: ModelShape, layout: ParallelLayout) -> tuple[float, float]:
    """Moved for each element of the expert's width beyond a plain activation, (forward, backward)."""
    return CLAMPED if shape.expert_bias and by_ops(layout) else (0.0, 0.0)


def quantised_bytes(layout: ParallelLayout) -> float:
    """Moved for each element that enters an expert's linear in less than 16 bit."""
    if not layout.low_precision:
        return 0.0
    return QUANTISED.get(layout.precision, QUANTISED_BY_TENSOR) if by_ops(layout) else QUANTISED_CAPTURED


def expert_stalls(layout: ParallelLayout, experts: float) -> tuple[float, float]:
    """(forward, backward) kernels that the device waits for, with this many local experts.

    Grouped linears issue small kernels for every expert: a product, in 8 and 4 bit the quantisation of its input, in
    block-scaled formats the rearrangement of both operands' scales. Two linears; backward has twice the products.
    With a capacity no counts come to the host, and one batched product has all experts.
    """
    if not by_ops(layout) or layout.capacity:
        return 0.0, 0.0
    quantised = 1.0 if layout.low_precision else 0.0
    scales = 2.0 if layout.precision in QUANTISED else 0.0
    forward, backward = 1 + quantised + scales, 2 + quantised + 2 * scales
    return ROUTING_STALL + 2 * experts * forward * EXPERT_LAUNCH, 2 * experts * backward * EXPERT_LAUNCH
