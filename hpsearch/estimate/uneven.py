"""Data ranks on slow nodes take fewer micro-batches: who takes how many, and where that may be.

Only what meets once a step may come out of step: without pipelines (they span all data ranks of a stage), without
gradients or parameters that are exchanged for every micro-batch (ZeRO-2 and 3), and with experts inside a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpsearch.cluster import Cluster
from hpsearch.estimate.parallel import ParallelLayout


def ranks_of(cluster: Cluster, layout: ParallelLayout) -> tuple[int, ...]:
    """Data ranks of each group; () where all have to take as many micro-batches."""
    each, fold = layout.tp * layout.cp, layout.ep * layout.etp
    may = layout.pp == 1 and layout.zero < 2 and not layout.offload_share and layout.devices == cluster.devices
    if not cluster.groups or not may or any(g.devices % each or g.devices % fold for g in cluster.groups):
        return ()
    return tuple(group.devices // each for group in cluster.groups)


def shares(seconds: Sequence[float], ranks: Sequence[int], micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of each rank of a group, at least one, so that the last of them is over first; together at least
    `micro_batches`. `seconds`: of one on a rank of each group."""

    def within(limit_s: float) -> list[int]:
        return [max(int(limit_s / one * (1 + 1e-9)), 1) for one in seconds]

    most = -(-micro_batches // min(ranks))
    limits = sorted({count * one for one in seconds for count in range(1, most + 1) if count * one >= max(seconds)})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        enough = sum(a * b for a, b in zip(within(limits[middle]), ranks, strict=True)) >= micro_batches
        low, high = (low, middle) if enough else (middle + 1, high)
    found = within(limits[low])
    for i in sorted(range(len(ranks)), key=lambda i: (-seconds[i], i)):  # what is too many, the slowest leave
        over = sum(a * b for a, b in zip(found, ranks, strict=True)) - micro_batches
        found[i] -= min(max(over, 0) // ranks[i], found[i] - 1)
    return tuple(found)


def with_shares(layout: ParallelLayout, ranks: Sequence[int], counts: Sequence[int]) -> ParallelLayout:
    """`layout` with so many micro-batches for the ranks of each group; itself where all have as many."""
    most = max(counts)
    uneven = tuple(zip(ranks, counts, strict=True)) if min(counts) < most else ()
    return replace(layout, global_batch=most * layout.dp * layout.micro_batch, uneven=uneven)
