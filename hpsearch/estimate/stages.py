"""Which layers stand in which chunk of the pipeline."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import ModelShape


@dataclass(frozen=True)
class Chunk:
    """A run of layers; chunk i stands on pipeline rank i mod pp."""

    blocks: Counter[str]
    layers: int
    embedding: bool
    heads: int
    """Passes through the output projection: one more for each extra-prediction layer."""


def chunks(shape: ModelShape, layout: ParallelLayout) -> tuple[Chunk, ...]:
    """`pp·vpp` runs of layers, as even as whole layers allow; what does not divide lies in the middle, so that the
    first and the last run, which have embedding and head, are never the longer ones."""
    count = layout.pp * max(layout.vpp, 1)
    base, more = divmod(shape.layers, count)
    first = (count - more) // 2
    sizes = [base + (1 if first <= i < first + more else 0) for i in range(count)]
    found, at = [], 0
    for i, size in enumerate(sizes):
        blocks = Counter(block for layer in shape.pattern[at : at + size] for block in layer)
        last = i == count - 1
        if last and shape.mtp_layers:
            for block in shape.pattern[-1]:
                blocks[block] += shape.mtp_layers
        heads = (1 + shape.mtp_layers) if last and shape.vocab else 0
        found.append(Chunk(blocks, size, i == 0 and shape.vocab > 0, heads))
        at += size
    return tuple(found)
