"""What a pipeline rank keeps alive under schedules that split backwards, fold the pipeline or run all forwards first.

From its forward to its input part a chunk keeps what the backward reads (`memory`). From the input part to the weight
part it keeps the inputs of its linears and the gradients of their outputs, the 32 of 34 bytes a value of the hidden
width that Qi et al. 2024 count (arXiv:2401.10241, section 2.2), whatever recompute dropped before. How many of each are
alive together is read off the schedule (`hpsearch.schedule.alive`). The loss of a micro-batch lives as long as its
chunk: logits until the input part, their gradient until the weight part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import ModelShape
from hpsearch.estimate.stages import Chunk
from hpsearch.estimate.work import Gemm, Work
from hpsearch.schedule import alive_on

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Kept:
    """Bytes without logits, and of logits and their gradients; after a forward and in a backward, when most is kept."""

    after_forward: float
    logits_after_forward: float
    in_backward: float
    logits_in_backward: float


def kept_under(
    shape: ModelShape,
    layout: ParallelLayout,
    rank: int,
    mine: Sequence[Chunk],
    works: dict[str, Work],
    waiting: Sequence[float],
) -> Kept:
    """`waiting`: bytes that each chunk of the rank keeps from forward to backward."""
    moments = alive_on(layout.schedule_kind, layout.pp, max(layout.vpp, 1), layout.micro_batches, rank)
    owed = [sum(owed_bytes(works[name], shape, layout) * n for name, n in chunk.blocks.items()) for chunk in mine]
    head = works["head"]
    logits = [head.saved * chunk.heads for chunk in mine]
    gradients = [logit_gradient_bytes(head, shape, layout) * chunk.heads for chunk in mine]
    referenced = [0.0 if layout.fused else one for one in logits]
    at_work = [max(pair) for pair in zip(waiting, owed, strict=True)]
    sizes = np.array([*waiting, *owed, *at_work, *waiting])
    whole = [max(pair) for pair in zip(referenced, gradients, strict=True)]
    of_loss = np.array([*logits, *gradients, *whole, *referenced])
    is_forward = moments[:, 2 * len(mine) :].sum(axis=1) == 0
    found = []
    for some in (moments[is_forward], moments[~is_forward]):
        rows, losses = some @ sizes, some @ of_loss
        fullest = int(np.argmax(rows + losses))
        found += [float(rows[fullest]), float(losses[fullest])]
    return Kept(*found)


def owed_bytes(work: Work, shape: ModelShape, layout: ParallelLayout) -> float:
    """Of one block from its input part to its weight part: 16-bit inputs of its linears, at most all that the forward
    kept, and gradients of their outputs, gathered where ranks have pieces of the sequence."""
    linears = work.linears + work.grouped + work.plains
    inputs = sum(_input_bytes(one, shape, layout) for one in linears)
    return min(inputs, work.saved + work.copies) + sum(2 * m * n * batch for m, n, _, batch in linears)


def _input_bytes(linear: Gemm, shape: ModelShape, layout: ParallelLayout) -> float:
    """A column-parallel linear's input is a piece of the sequence, which is gathered again."""
    m, n, k, batch = linear
    is_piece = layout.sp and layout.fused and m == layout.tokens and k == shape.hidden != n
    return 2 * m * k * batch / (layout.tp if is_piece else 1)


def logit_gradient_bytes(head: Work, shape: ModelShape, layout: ParallelLayout) -> float:
    """Of one pass through the head, with its input; code that is not fused has the whole vocabulary on every rank."""
    (tokens, vocab, hidden, _), *_ = head.plains
    return 2 * tokens * (vocab if layout.fused else shape.vocab) + 2 * tokens * hidden
