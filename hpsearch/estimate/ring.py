"""What a ring of context-parallel ranks does beside its attention kernels and messages.

Under the causal load balance each rank has one piece from either end of the sequence. A step after the first is then
all queries on half of the keys or half of the queries on all keys, as often one as the other; the halves are copied out
first (backward: results and their gradients too). Every step's result is scaled and added to the sum, and so are its
gradients.
"""

from __future__ import annotations

ADDED = 6.0
"""Bytes moved to add one 16-bit element to a sum: read, read, written."""
COPIED = 4.0
FIRST_KERNELS, STEP_KERNELS = (2.0, 2.0), (5.0, 9.0)
"""(forward, backward) kernels around the first step's attention, and of a later step: exchange, copy, attention,
rescaling and sum; backward two exchanges, three copies, two kernels of attention, two sums."""


def ring_bytes(ranks: int, queries: float, pairs: float) -> tuple[float, float]:
    """(forward, backward) bytes that memory-bound kernels move on one rank.

    `queries`: elements of its queries, or of its results; `pairs`: of its keys and values together, which are put in
    one buffer first.
    """
    later = ranks - 1
    forward = COPIED * pairs + ADDED * queries + later * (0.75 * ADDED * queries + COPIED / 4 * (queries + pairs))
    summed = 0.75 * ADDED * (queries + pairs)
    return forward, COPIED * (queries + pairs) + later * (summed + COPIED / 4 * (3 * queries + pairs))


def ring_kernels(ranks: int) -> tuple[float, float]:
    """(forward, backward) kernels beyond those of attention in one piece."""
    first, step, later = FIRST_KERNELS, STEP_KERNELS, ranks - 1
    return first[0] + later * step[0], first[1] + later * step[1]
