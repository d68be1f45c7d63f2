"""When the last backward of a pipeline ends: the schedule's order of actions, run on the times of its chunks.

The same rule as `hpsearch.schedule.simulate` (an action starts when its rank is free and its input has arrived), in
arrays, because a search asks thousands of times. Long runs of micro-batches are not simulated: once the pipeline is
full each further round takes the same time, so two short runs give a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

Slot = tuple[int, int, bool]
"""Chunk of the rank, micro-batch, backward."""


@lru_cache(maxsize=512)
def order(stages: int, chunks: int, micro_batches: int, rank: int) -> tuple[Slot, ...]:
    """Actions of one rank: 1F1B, or interleaved 1F1B with `chunks` model chunks a rank (Narayanan et al. 2021).

    Rank r holds chunks r, r + stages, r + 2·stages, ... Micro-batches go in groups of `stages` through each chunk.
    """
    total = micro_batches * chunks
    if chunks == 1:
        warm = min(stages - rank - 1, total)
    elif micro_batches == stages:
        warm = total
    else:
        warm = min(2 * (stages - rank - 1) + (chunks - 1) * stages, total)
    forward = [_slot(i, stages, chunks, micro_batches, backward=False) for i in range(total)]
    backward = [_slot(i, stages, chunks, micro_batches, backward=True) for i in range(total)]
    found = forward[:warm]
    for i in range(total - warm):
        found += [forward[warm + i], backward[i]]
    return tuple(found + backward[total - warm :])


def _slot(index: int, stages: int, chunks: int, micro_batches: int, backward: bool) -> Slot:
    if chunks == 1:
        return 0, index, backward
    group, inside = divmod(index, stages * chunks)
    first = group * stages
    width = min(stages, micro_batches - first)
    chunk, offset = divmod(inside, width)
    return (chunks - 1 - chunk if backward else chunk), first + offset, backward


def simulated_s(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> float:
    """Seconds until every rank is done; `forward[i]`, `backward[i]` of chunk i, which stands on rank i mod stages."""
    count = len(forward)
    chunks = count // stages
    orders = [order(stages, chunks, micro_batches, rank) for rank in range(stages)]
    done: dict[tuple[int, int, bool], float] = {}
    at, clock = [0] * stages, [0.0] * stages
    left = sum(map(len, orders))
    while left:
        before = left
        for rank in range(stages):
            sequence, now, i = orders[rank], clock[rank], at[rank]
            while i < len(sequence):
                chunk, micro, is_backward = sequence[i]
                piece = chunk * stages + rank
                if is_backward:
                    source = (piece + 1, micro, True) if piece + 1 < count else (piece, micro, False)
                else:
                    source = (piece - 1, micro, False)
                ready = 0.0
                if is_backward or piece:
                    found = done.get(source)
                    if found is None:
                        break
                    ready = found + (hop_s if source[0] != piece else 0.0)
                now = max(now, ready) + (backward[piece] if is_backward else forward[piece])
                done[(piece, micro, is_backward)] = now
                i += 1
            left -= i - at[rank]
            at[rank], clock[rank] = i, now
        assert left < before, "the schedule waits for itself"
    return max(clock)


def pipeline_s(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> float:
    """Seconds of all micro-batches through `stages` ranks; long runs from two short ones."""
    if stages == 1:
        return micro_batches * (sum(forward) + sum(backward))
    rounds = micro_batches // stages
    if rounds <= 3:
        return simulated_s(forward, backward, stages, micro_batches, hop_s)
    rest = micro_batches % stages
    short = simulated_s(forward, backward, stages, 2 * stages + rest, hop_s)
    longer = simulated_s(forward, backward, stages, 3 * stages + rest, hop_s)
    return longer + (rounds - 3) * (longer - short)
