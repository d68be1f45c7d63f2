"""One layout in full: the cut and the recomputed layers made whole, memory exactly, the step by its timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil

import numpy as np
from numpy.typing import NDArray

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency
from hpsearch.estimate import ModelShape, ParallelLayout
from hpsearch.estimate.estimate import Priced, assembled
from hpsearch.estimate.memory import rank_memory, stage_memory
from hpsearch.estimate.pipeline import run_s, waits
from hpsearch.estimate.stages import Chunk, chunks, with_again
from hpsearch.schedule import longest_chain
from hpsearch.space.tables import Inner

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """A layout that fits, priced."""

    layout: ParallelLayout
    step_s: float


def simulated(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, priced: Inner, e: Efficiency
) -> tuple[float, float]:
    """(seconds of the step with every micro-batch on the timeline, what it takes at least with more recompute than
    that); `priced`: the layout's inside.

    More recompute makes no pipeline shorter, but the first rank's backward hides the gradients' reduction, unless it is
    split: then its weight part does, which recompute makes no longer. A pipeline
    of m micro-batches has m times the first rank's seconds at least: what that rank idles for each is free, and beyond
    it every second hides one at most and costs m.
    """
    made = _assembled(shape, layout, cluster, priced)
    forward, inputs, weights = made.split_seconds(e)
    backward = inputs + weights
    if layout.pp == 1:
        pipe = layout.micro_batches * float(forward.sum() + backward.sum())
    else:
        parts = forward.tolist(), inputs.tolist(), weights.tolist()
        pipe = run_s(layout.schedule_kind, parts, layout.pp, layout.micro_batches, made.hop_s * e.links)
    step_s = made.around(pipe, forward, backward, e)[0]
    if layout.recompute == "selective" or layout.is_split:
        return step_s, step_s
    idle = pipe / layout.micro_batches - float((forward + backward)[list(layout.chunks_of(0))].sum())
    longer = backward.copy()
    longer[0] += max(idle, 0.0)
    return step_s, made.around(pipe, forward, longer, e)[0]


def longest(shape: ModelShape, layout: ParallelLayout, cluster: Cluster, priced: Inner, e: Efficiency) -> Floats:
    """The longest chain of a pipeline, in the columns of `hpsearch.schedule.bound.chains`."""
    made = _assembled(shape, layout, cluster, priced)
    forward, inputs, weights = made.split_seconds(e)
    waited = waits(layout.schedule_kind, layout.pp, layout.chunks // layout.pp, layout.micro_batches)
    found = longest_chain(waited, forward.tolist(), inputs.tolist(), weights.tolist(), made.hop_s * e.links)
    return np.array([*found.forward, *found.backward_input, *found.backward_weight, *found.hops], dtype=np.float64)


def _assembled(shape: ModelShape, layout: ParallelLayout, cluster: Cluster, priced: Inner) -> Priced:
    if layout.recompute == "none":  # `priced` has whole layers computed again, for those layouts that have some
        layout = replace(layout, recompute="full", recomputed=(0,) * layout.chunks)
    return assembled(shape, layout, cluster, priced.works, priced.seconds, priced.ranks)


def fitted(shape: ModelShape, layout: ParallelLayout, priced: Inner, rooms: Sequence[float]) -> ParallelLayout | None:
    """`layout` with as few recomputed layers on each pipeline rank as fit in its room, in bytes; None if even all do
    not.

    `layout` has a cut; its inside is `priced`. Recompute of a part fits or does not.
    """
    if priced.layout.recompute != "full":
        return layout if fits(shape, layout, priced, rooms) else None
    again = [0] * len(layout.cut)
    plain = replace(layout, recompute="none", recomputed=())
    all_chunks, starts = chunks(shape, plain), [0, *accumulate(layout.cut)]
    for rank in range(layout.pp):
        here = layout.chunks_of(rank)
        mine, at = tuple(all_chunks[i] for i in here), [starts[i] for i in here]
        least = _Rank(shape, plain, priced, rank, mine, at).least(rooms[rank])
        if least is None:
            return None
        for i, layers in zip(here, least, strict=True):
            again[i] = layers
    if not any(again):
        return replace(layout, recompute="none", recomputed=())
    return replace(layout, recompute="full", recomputed=tuple(again))


def fits(shape: ModelShape, layout: ParallelLayout, priced: Inner, rooms: Sequence[float]) -> bool:
    """Whether every pipeline rank has the room that it needs, in bytes."""
    cut, last = chunks(shape, layout), layout.pp - 1
    for rank in sorted(range(layout.pp), key=lambda one: one not in (0, last)):  # these are the fullest mostly
        if rank_memory(shape, layout, rank, cut, priced.works).peak_bytes > rooms[rank]:
            return False
    return True


@dataclass(frozen=True)
class _Rank:
    """One pipeline rank of a layout, and how many of its layers are computed again."""

    shape: ModelShape
    layout: ParallelLayout
    priced: Inner
    rank: int
    chunks: tuple[Chunk, ...]
    starts: list[int]
    """First layer of each chunk."""

    @property
    def sizes(self) -> list[int]:
        return [chunk.layers for chunk in self.chunks]

    def least(self, room_bytes: float) -> list[int] | None:
        """The fewest layers of each chunk that fit. Bytes fall alike with every layer, but for the first."""
        most = sum(self.sizes)
        none = self.peak_bytes(0)
        if none <= room_bytes:
            return self.spread(0)
        full = self.peak_bytes(most)
        if full > room_bytes:
            return None
        count = min(max(ceil(most * (none - room_bytes) / max(none - full, 1.0)), 1), most)
        while self.peak_bytes(count) > room_bytes:
            count += 1
        while count > 1 and self.peak_bytes(count - 1) <= room_bytes:
            count -= 1
        return self.spread(count)

    def spread(self, total: int) -> list[int]:
        """`total` layers over the chunks, as even as they come."""
        found, left = [], total
        for i, size in enumerate(self.sizes):
            behind = sum(self.sizes[i + 1 :])
            mine = min(size, max(-(-left // (len(self.sizes) - i)), left - behind))
            found.append(mine)
            left -= mine
        return found

    def peak_bytes(self, total: int) -> float:
        layout, chunks = self.layout, self.chunks
        if total:
            layout = replace(layout, recompute="full")
            parts = zip(self.chunks, self.starts, self.spread(total), strict=True)
            chunks = tuple(with_again(self.shape, chunk, at, layers) for chunk, at, layers in parts)
        return stage_memory(self.shape, layout, self.rank, chunks, self.priced.works).peak_bytes
