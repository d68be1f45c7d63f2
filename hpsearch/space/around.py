"""`Around`: what the surroundings of a layout's blocks cost, whatever the rows of a micro-batch: once a step, for a hop
between stages, in state bytes, in gathers of fully sharded storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpsearch.cluster.efficiency import Efficiency
from hpsearch.estimate import ParallelLayout
from hpsearch.estimate.estimate import fsdp_s, hop_seconds
from hpsearch.estimate.memory import RESERVE, context_bytes, states, step_buffers
from hpsearch.estimate.optimizer import traffic_bytes
from hpsearch.estimate.shape import Layer
from hpsearch.estimate.stages import Chunk, of_layers
from hpsearch.estimate.work import Work
from hpsearch.space.space import Space
from hpsearch.space.tables import Links, Table


@dataclass(frozen=True)
class Around:
    once_s: float
    """Of reduction, gather and update of the average stage, what nothing hides."""
    room_bytes: float
    """For tensors, on one device."""
    per_dense: float
    """State bytes of one parameter."""
    per_expert: float
    hop_s: float
    """Of an empty message to the next stage."""
    hop_s_per_byte: float
    links: Links
    """Of fully sharded storage."""


def around(space: Space, layout: ParallelLayout, table: Table, rates: Efficiency, works: dict[str, Work]) -> Around:
    """`layout`: any with these surroundings; `table` and `works`: of its inside."""
    cluster = space.cluster
    empty = rates.links * hop_seconds(cluster, layout, 0.0) if layout.pp > 1 else 0.0
    full = rates.links * hop_seconds(cluster, layout, 1e9) if layout.pp > 1 else 0.0
    room = (cluster.device.memory_bytes - context_bytes(layout)) / (1 + RESERVE)
    return Around(
        once_s(space, layout, table, rates), room, sum(states(layout, 1.0, 0.0)), sum(states(layout, 0.0, 1.0)), empty,
        (full - empty) / 1e9, _links(space, layout, rates, works),
    )  # fmt: skip


def _links(space: Space, layout: ParallelLayout, rates: Efficiency, works: dict[str, Work]) -> Links:
    """Seconds of gathers, and of gathers with reductions, of each kind of layer and of the embedding."""
    if not layout.fsdp:
        return Links({}, (0.0, 0.0), 0.0, (0.0, 0.0))

    layers, ends, whole = links_s(space, layout, rates, works)
    with_gathered, _ = step_buffers(space.shape, layout, works)
    without, _ = step_buffers(space.shape, replace(layout, zero=1, fsdp=False), works)
    return Links(layers, ends, with_gathered - without, whole)


Pair = tuple[float, float]
"""Seconds of gathers, and of gathers with reductions."""


def links_s(
    space: Space, layout: ParallelLayout, rates: Efficiency, works: Mapping[str, Work]
) -> tuple[dict[Layer, Pair], Pair, Pair]:
    """Of each kind of layer, of the embedding, of the whole model; storage of `layout` is fully sharded."""

    def pair(chunk: Chunk) -> Pair:
        gather, reduce = fsdp_s(space.shape, layout, space.cluster, chunk, dict(works))
        return rates.data * gather, rates.data * (gather + reduce)

    counts = Counter(space.shape.pattern)
    layers = {kind: pair(of_layers((kind,))) for kind in sorted(counts)}
    ends = pair(replace(of_layers(()), embedding=space.shape.vocab > 0))
    gather, both = (sum(layers[kind][i] * counts[kind] for kind in layers) + ends[i] for i in (0, 1))
    return layers, ends, (gather, both)


def once_s(space: Space, layout: ParallelLayout, table: Table, rates: Efficiency) -> float:
    """Reduction, gather and update of the slowest stage, at least, and what a step costs once.

    Some stage has no fewer dense parameters than the average, and some no fewer of experts; these may be two, and
    a collective of half the bytes takes more than half as long. The estimate charges the stage with the largest sum:
    where stages are mixed, that is at least the larger of the two.
    """
    if layout.trained_parts == "layer":
        return 0.0
    if layout.lora:
        return rates.step_s
    dense, expert = float(table.dense[-1]) / layout.pp, float(table.expert[-1]) / layout.pp
    groups = (
        _parts_s(space, layout, dense, layout.data_ranks, layout.tp),
        _parts_s(space, layout, expert, layout.expert_data_ranks, layout.ep * layout.etp),
    )
    if layout.pp > 1 and not layout.fsdp and (expert or layout.optimizer == "muon"):
        return rates.step_s + least_rate(space, rates) * max(map(sum, groups))
    seen = 1 - space.cluster.device.overlap_efficiency
    reduce, gather, update = (sum(parts) for parts in zip(*groups, strict=True))
    reduce *= rates.data * (seen if layout.overlap_grad_reduce else 1.0)
    gather *= rates.data * (seen if layout.overlap_param_gather else 1.0)
    return rates.step_s + reduce + gather + rates.moved * update


def _parts_s(
    space: Space, layout: ParallelLayout, params: float, ranks: int, stride: int
) -> tuple[float, float, float]:
    """(reduction, gather, update) of so many parameters of one kind, at the tables' rates."""
    device, cluster = space.cluster.device, space.cluster
    held = params / max(min(ranks, layout.shards) if layout.zero else 1, 1)
    update = traffic_bytes(layout) * held / (device.memory_bytes_per_s * device.memory_efficiency)
    if ranks == 1 or not params or layout.fsdp:
        return 0.0, 0.0, update
    if not layout.zero:
        return cluster.collective("all_reduce", layout.grad_bytes * params, ranks, stride).seconds, 0.0, update
    reduce = cluster.collective("reduce_scatter", layout.grad_bytes * params, ranks, stride).seconds
    return reduce, cluster.collective("all_gather", 2 * params, ranks, stride).seconds, update


def least_rate(space: Space, rates: Efficiency) -> float:
    """Of what the estimate charges for reduction, gather and update over their sum at the tables' rates, by which it
    picks the stage."""
    base = space.base
    overlaps = base.overlap_grad_reduce or base.overlap_param_gather
    return min(rates.moved, rates.data * ((1 - space.cluster.device.overlap_efficiency) if overlaps else 1.0))
