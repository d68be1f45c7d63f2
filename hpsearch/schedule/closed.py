"""The chains of `bound.py` without a text, for schedules that run nothing as a pair.

What a rank does before its first backward, behind its last forward and behind its last backward tells how often each
action lies on each of them; the rest of a chain is the way of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hpsearch.schedule.orders import loop, order_of_chunks, turns, vee
from hpsearch.schedule.schedule import Ints


@dataclass(frozen=True)
class _Ends:
    """What ranks do outside a part of their order: [ranks, 3, chunks] forwards, input parts and weight parts of each
    chunk; a whole backward is both."""

    before_backward: Ints
    after_forward: Ints
    after_backward: Ints
    is_apart: Ints
    """[ranks]: 1 where the first backward comes behind the last forward."""
    whole: bool
    """Backwards are whole."""
    stage: Ints
    """[ranks, chunks] in model order."""


def closed(kind: str, stages: int, virtual: int, micro_batches: int) -> Ints | None:
    """[6 chains of each rank, columns], as `bound.chains` has them; None: there is no closed form."""
    if kind == "dualpipev" or (kind == "zbv" and micro_batches < max(2 * stages - 1, 2)):
        return None
    ends = _of_zbv(stages) if kind == "zbv" else _of_turns(kind, stages, virtual, micro_batches)
    n, m = stages * virtual, micro_batches
    placed = vee(stages) if kind == "zbv" else loop(stages, virtual)
    crosses = np.array([a != b for a, b in pairwise(placed)], dtype=np.int64)
    found = np.zeros((stages, 6, 4 * n - 1), dtype=np.int64)
    every, none = np.full_like(ends.after_forward, m), np.zeros_like(ends.after_forward)
    for i, before in enumerate((none, ends.before_backward)):
        for j, after in enumerate((ends.after_forward, ends.after_backward, none)):
            done = every - before - after
            for rank in range(stages):
                row = found[rank, 3 * i + j]
                if i == 1 and j == 0 and ends.is_apart[rank]:
                    continue
                for part in range(3):
                    row[part * n + ends.stage[rank]] += done[rank, part]
                begin, end = ends.stage[rank, 0 if i == 0 else -1], ends.stage[rank, -1 if j == 0 else 0]
                _begin(row, n, int(begin), crosses, is_forward=i == 0, whole=ends.whole)
                if j < 2:
                    _behind(row, n, int(end), crosses, is_forward=j == 0, whole=ends.whole)
    return found.reshape(6 * stages, -1)


def _begin(row: Ints, n: int, stage: int, crosses: Ints, *, is_forward: bool, whole: bool) -> None:
    """Adds the way of a micro-batch to its forward, or its backward, of a stage."""
    if is_forward:
        row[:stage] += 1
        row[3 * n : 3 * n + stage] += crosses[:stage]
        return
    row[:n] += 1
    row[n + stage + 1 : 2 * n] += 1
    if whole:
        row[2 * n + stage + 1 : 3 * n] += 1
    row[3 * n :] += crosses
    row[3 * n + stage :] += crosses[stage:]


def _behind(row: Ints, n: int, stage: int, crosses: Ints, *, is_forward: bool, whole: bool) -> None:
    """Adds the way of a micro-batch behind its forward, or its backward, of a stage, up to the last part of stage 0."""
    last = stage
    if is_forward:
        row[stage + 1 : n] += 1
        row[3 * n + stage :] += crosses[stage:]
        last = n
    row[n : n + last] += 1
    row[3 * n : 3 * n + last] += crosses[:last]
    row[2 * n : 2 * n + (last if whole else 1)] += 1


def _of_turns(kind: str, ranks: int, virtual: int, micro_batches: int) -> _Ends:
    warm, late = turns(kind, ranks, virtual, micro_batches)
    total, whole = micro_batches * virtual, late is None
    forward, backward = order_of_chunks(ranks, virtual, micro_batches)
    ahead, behind = np.array(warm), np.array(late or [0] * ranks)
    forwards, backwards = (_counted(one, virtual) for one in (forward, backward))
    none = np.zeros((ranks, virtual), dtype=np.int64)
    turn = np.maximum(total - ahead - 1, 0)  # of the last forward
    left = [micro_batches - backwards[np.maximum(at - behind, 0)] for at in (turn, np.full(ranks, total - 1))]
    after = micro_batches - backwards[turn]
    before_backward = np.stack([forwards[np.minimum(ahead + 1, total)], none, none], axis=1)
    after_forward = np.stack([none, after, after if whole else left[0]], axis=1)
    after_backward = np.stack([none, none, none if whole else left[1]], axis=1)
    stage = np.arange(virtual) * ranks + np.arange(ranks)[:, None]
    return _Ends(before_backward, after_forward, after_backward, (total - ahead <= 1).astype(np.int64), whole, stage)


def _counted(chunks: Ints, count: int) -> Ints:
    """[turns + 1, chunks]: how often each chunk had its turn before."""
    seen = np.cumsum(chunks[:, None] == np.arange(count), axis=0)
    return np.concatenate([np.zeros((1, count), dtype=np.int64), seen])


def _of_zbv(ranks: int) -> _Ends:
    """Where there are as many micro-batches as its order takes at least."""
    rank, none = np.arange(ranks), np.zeros(ranks, dtype=np.int64)
    full = none + ranks

    def parts(*columns: Ints) -> Ints:
        return np.stack(columns, axis=1).reshape(ranks, 3, 2)

    before_backward = parts(2 * ranks - rank - 1, rank + 1, none, none, none, none)
    after_forward = parts(none, none, full, rank + 1, full, rank + 1)
    after_backward = parts(none, none, none, none, rank + 1, rank)
    stage = np.stack([rank, 2 * ranks - 1 - rank], axis=1)
    return _Ends(before_backward, after_forward, after_backward, none, False, stage)
