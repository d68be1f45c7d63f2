"""Forward only: layouts of a model that is not trained in this step, from the pieces of the estimate.

Seconds: every micro-batch through all stages, one behind the other: sum of the stages + (micro-batches - 1) times the
slowest. Bytes: weights in 16 bit, one layer at work or the logits, what stands gathered; no gradients, no optimizer
state, nothing kept for a backward. Stages are as even as whole layers allow.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from hpsearch.cluster.efficiency import Efficiency, efficiency_of
from hpsearch.errors import InfeasibleError
from hpsearch.estimate import ModelShape, ParallelLayout, Priced
from hpsearch.estimate.estimate import assembled, chunk_params
from hpsearch.estimate.memory import RESERVE, context_bytes, loss_bytes, step_buffers
from hpsearch.estimate.price import scales
from hpsearch.estimate.stages import chunks, filled_sizes
from hpsearch.estimate.work import Work
from hpsearch.space import Space
from hpsearch.space.prices import Prices
from hpsearch.space.rules import Rules
from hpsearch.space.tables import norm_s

PINS = {"recompute": ("full",), "vpp": (1,), "zero": (0, 3)}
"""Of the space of training layouts, those that make a difference to a forward."""
GATHERED = 2
"""Layers whose parameters stand gathered: the one at work and the next."""


@dataclass(frozen=True)
class Forward:
    """A layout of a forward."""

    layout: ParallelLayout
    seconds: float
    peak_bytes: float
    resident_bytes: float
    """Of those, what stays while others run."""


def forward_s(priced: Priced, rates: Efficiency) -> float:
    """Of all micro-batches of a layout."""
    f = priced.split_seconds(rates)[0]
    hops = (priced.layout.pp - 1) * priced.hop_s * rates.links
    return float(f.sum() + (priced.layout.micro_batches - 1) * f.max()) + hops


def forward_bytes(shape: ModelShape, layout: ParallelLayout, works: dict[str, Work]) -> tuple[float, float]:
    """(peak, what stays) of the fullest device."""
    plain = replace(layout, zero=0, fsdp=False)
    layer, exchange = step_buffers(shape, plain, works)
    context, fullest, stays = context_bytes(layout), 0.0, 0.0
    widest = max(sum(works[name].params + works[name].expert_params for name in one) for one in set(shape.pattern))
    gathered = 2.0 * GATHERED * widest if layout.fsdp else 0.0
    for chunk in chunks(shape, layout):
        dense, expert = chunk_params(shape, layout, chunk, works)
        if layout.fsdp:
            dense, expert = dense / layout.shards, expert / min(layout.expert_data_ranks, layout.shards)
        working = max(layer + gathered, loss_bytes(shape, layout, works) if chunk.heads else 0.0)
        weights = 2.0 * (dense + expert)
        stays = max(stays, weights)
        fullest = max(fullest, weights + working + exchange)
    return fullest * (1 + RESERVE) + context, stays * (1 + RESERVE)


def narrowed(space: Space) -> Space:
    """The layouts of a space that make a difference to a forward."""
    pins = {**space.pins}
    for name, values in PINS.items():
        pins[name] = tuple(value for value in values if name not in pins or value in pins[name]) or values
    return replace(space, pins=pins)


def best_forward(space: Space) -> Forward:
    """The fastest layout of a forward that fits; best-first by a bound, so nothing of the space is faster.

    A chunk's norm of device and host is at least its share of the whole model's, so the stages add up to the whole
    at least and the slowest is no quicker than their average. InfeasibleError: none fits, or none is legal.
    """
    space, rules = narrowed(space), Rules()
    prices, rates = Prices(space), efficiency_of(space.cluster.device.name, space.cluster.efficiency)
    heap: list[tuple[float, int, tuple[int, ...]]] = []
    for inside in space.insides(rules):
        rows = space.outsides(inside, rules)
        if not len(rows):
            continue
        number = prices.price(inside)
        whole = _whole_s(space, prices, number, rates)
        bounds = whole * (1 + (rows[:, 3] - 1) / rows[:, 0])
        heap += [(float(b), number, tuple(row)) for b, row in zip(bounds.tolist(), rows.tolist(), strict=True)]
    heapq.heapify(heap)
    found, least = None, float("inf")
    while heap and (found is None or heap[0][0] < found.seconds):
        _, number, row = heapq.heappop(heap)
        made = _forward(space, prices, number, row, rates)
        least = min(least, made.peak_bytes)
        if made.peak_bytes <= space.cluster.device.memory_bytes and (found is None or made.seconds < found.seconds):
            found = made
    if found is None:
        raise InfeasibleError(
            f"forward of {space.shape.name}", f"expected a layout on {space.devices} devices that fits in "
            f"{space.cluster.device.memory_bytes / 1e9:.4g} GB, but the leanest needs {least / 1e9:.4g} GB",
            "Give it more devices.",
        )  # fmt: skip
    return found


def _forward(space: Space, prices: Prices, number: int, row: tuple[int, ...], rates: Efficiency) -> Forward:
    works, seconds = prices.inners[number].works, prices.inners[number].seconds
    layout = space.layout(prices.insides[number], row, filled_sizes(space.shape, row[0] * row[1]))  # type: ignore[arg-type]
    priced = assembled(space.shape, layout, space.cluster, works, seconds)
    peak, stays = forward_bytes(space.shape, layout, works)
    return Forward(layout, forward_s(priced, rates), peak, stays)


def _whole_s(space: Space, prices: Prices, number: int, rates: Efficiency) -> float:
    """One micro-batch through the whole model, forward, at least."""
    seconds, factor = prices.inners[number].seconds, scales(rates, space.base.low_precision)
    counts = {**space.shape.counts, **({"head": 1, "embedding": 1} if space.shape.vocab else {})}
    total = (
        sum((seconds[name].forward * float(count) for name, count in counts.items()), np.zeros(len(factor))) * factor
    )
    return norm_s(float(total[:-1].sum()), float(total[-1]))


def floors_s(prices: Prices) -> tuple[float, float]:
    """What no forward, and no forward with backward, of a space is below without what comes once: all rows spread
    evenly over all devices, the quickest inside of each. inf: none is legal."""
    space, forward, both = prices.space, float("inf"), float("inf")
    for slot in space.slots(Rules()):
        rounds = space.global_batch * slot.tp * slot.cp / (slot.micro_batch * space.devices)
        seconds = prices.wholes(slot).both_s
        forward = min(forward, float(seconds[..., 0].min(initial=np.inf)) * rounds)
        both = min(both, float(seconds.sum(axis=-1).min(initial=np.inf)) * rounds)
    return forward, both
