"""When the last backward of a pipeline ends: the schedule's order of actions, run on the times of its chunks.

The same rule as `hpsearch.schedule.simulate` (an action starts when its rank is free and its input has arrived), in
arrays, because a search asks thousands of times. Long runs of micro-batches are not simulated: once the pipeline is
full each further round takes the same time, so two short runs give a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
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


@dataclass(frozen=True)
class Path:
    """The longest chain of actions: how often each chunk's forward and backward, and a hop, lie on it.

    The step's time is their sum, and stays it while the times change so little that the chain stays the longest.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hops: float

    def seconds(self, forward: Sequence[float], backward: Sequence[float], hop_s: float) -> float:
        pieces = zip((*self.forward, *self.backward, self.hops), (*forward, *backward, hop_s), strict=True)
        return sum(count * seconds for count, seconds in pieces)

    def stretched(self, longer: Path, rounds: float) -> Path:
        """This path, and `rounds` times what `longer` has more."""

        def go_on(short: float, long: float) -> float:
            return short + rounds * (long - short)

        return Path(
            tuple(map(go_on, self.forward, longer.forward)),
            tuple(map(go_on, self.backward, longer.backward)),
            go_on(self.hops, longer.hops),
        )


Action = tuple[int, int, bool]
"""Chunk in model order, micro-batch, backward."""
Done = dict[Action, tuple[float, Action | None]]
"""When an action ends, and the one it had to wait for last."""


def simulated_s(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> float:
    """Seconds until every rank is done; `forward[i]`, `backward[i]` of chunk i, which stands on rank i mod stages."""
    return max(at for at, _ in _simulated(forward, backward, stages, micro_batches, hop_s).values())


def _simulated(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> Done:
    count = len(forward)
    chunks = count // stages
    orders = [order(stages, chunks, micro_batches, rank) for rank in range(stages)]
    done: Done = {}
    at, clock = [0] * stages, [0.0] * stages
    last: list[Action | None] = [None] * stages
    left = sum(map(len, orders))
    while left:
        before = left
        for rank in range(stages):
            sequence, now, i = orders[rank], clock[rank], at[rank]
            while i < len(sequence):
                chunk, micro, is_backward = sequence[i]
                piece = chunk * stages + rank
                source = _source((piece, micro, is_backward), count)
                before_it = last[rank]
                if source is not None:
                    found = done.get(source)
                    if found is None:
                        break
                    ready = found[0] + (hop_s if source[0] != piece else 0.0)
                    if ready > now:
                        now, before_it = ready, source
                now += backward[piece] if is_backward else forward[piece]
                last[rank] = (piece, micro, is_backward)
                done[(piece, micro, is_backward)] = (now, before_it)
                i += 1
            left -= i - at[rank]
            at[rank], clock[rank] = i, now
        assert left < before, "the schedule waits for itself"
    return done


def _simulated_path(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> Path:
    done = _simulated(forward, backward, stages, micro_batches, hop_s)
    key: Action | None = max(done, key=lambda one: done[one][0])
    counts, hops = ([0] * len(forward), [0] * len(forward)), 0
    while key is not None:
        counts[key[2]][key[0]] += 1
        source = done[key][1]
        hops += int(source is not None and source[1:] == key[1:] and abs(source[0] - key[0]) == 1)
        key = source
    return Path(tuple(map(float, counts[0])), tuple(map(float, counts[1])), float(hops))


def pipeline_path(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> Path:
    """The longest chain of all micro-batches through `stages` ranks; long runs from two short ones."""
    if stages == 1:
        times = (float(micro_batches),) * len(forward)
        return Path(times, times, 0.0)
    rounds = micro_batches // stages
    if rounds <= 3:
        return _simulated_path(forward, backward, stages, micro_batches, hop_s)
    rest = micro_batches % stages
    short = _simulated_path(forward, backward, stages, 2 * stages + rest, hop_s)
    longer = _simulated_path(forward, backward, stages, 3 * stages + rest, hop_s)
    return short.stretched(longer, rounds - 2)


def pipeline_s(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> float:
    """Seconds of all micro-batches through `stages` ranks."""
    return pipeline_path(forward, backward, stages, micro_batches, hop_s).seconds(forward, backward, hop_s)


def pipelines_s(forward: Floats, backward: Floats, stages: int, micro_batches: int, hop_s: Floats) -> Floats:
    """`pipeline_s` of many pipelines of one schedule: rows of `forward` and `backward` [pipelines, chunks]."""
    if stages == 1:
        return np.asarray(micro_batches * (forward.sum(axis=1) + backward.sum(axis=1)))
    rounds = micro_batches // stages
    if rounds <= 3:
        return _all_simulated(forward, backward, stages, micro_batches, hop_s)
    rest = micro_batches % stages
    short = _all_simulated(forward, backward, stages, 2 * stages + rest, hop_s)
    longer = _all_simulated(forward, backward, stages, 3 * stages + rest, hop_s)
    return np.asarray(short + (rounds - 2) * (longer - short))


def _all_simulated(forward: Floats, backward: Floats, stages: int, micro_batches: int, hop_s: Floats) -> Floats:
    """When the last action ends. Which action waits for which is the same for all, so one walk serves all of them."""
    done: dict[Action, Floats] = {}
    clock = [np.zeros(len(forward)) for _ in range(stages)]
    for action, source in walk(stages, forward.shape[1] // stages, micro_batches):
        piece, _, is_backward = action
        rank = piece % stages
        now = clock[rank]
        if source is not None:
            now = np.maximum(now, done[source] + (hop_s if source[0] != piece else 0.0))
        clock[rank] = done[action] = now + (backward if is_backward else forward)[:, piece]
    return np.asarray(np.max(clock, axis=0))


@lru_cache(maxsize=256)
def walk(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, Action | None], ...]:
    """All actions in an order in which each comes behind what it waits for, with that: every chunk 1 second long."""
    done = _simulated([1.0] * (stages * chunks), [1.0] * (stages * chunks), stages, micro_batches, 0.0)
    return tuple((action, _source(action, stages * chunks)) for action in done)


def _source(action: Action, count: int) -> Action | None:
    piece, micro, is_backward = action
    if is_backward:
        return (piece + 1, micro, True) if piece + 1 < count else (piece, micro, False)
    return (piece - 1, micro, False) if piece else None
