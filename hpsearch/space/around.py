"""`Around`: what the surroundings of a layout's blocks cost, whatever the rows of a micro-batch: once a step, for a hop
between stages, in state bytes, in gathers of fully sharded storage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpsearch.cluster.efficiency import Efficiency
from hpsearch.estimate import ParallelLayout
from hpsearch.estimate.estimate import fsdp_s, hop_seconds
from hpsearch.estimate.memory import RESERVE, context_bytes, states, step_buffers
from hpsearch.estimate.optimizer import traffic_bytes
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

    def pair(chunk: Chunk) -> tuple[float, float]:
        gather, reduce = fsdp_s(space.shape, layout, space.cluster, chunk, works)
        return rates.data * gather, rates.data * (gather + reduce)

    layers = {kind: pair(of_layers((kind,))) for kind in sorted(set(space.shape.pattern))}
    ends = pair(replace(of_layers(()), embedding=space.shape.vocab > 0))
    whole = tuple(sum(layers[kind][i] for kind in space.shape.pattern) + ends[i] for i in (0, 1))
    with_gathered, _ = step_buffers(space.shape, layout, works)
    without, _ = step_buffers(space.shape, replace(layout, zero=1, fsdp=False), works)
    return Links(layers, ends, with_gathered - without, (whole[0], whole[1]))


def once_s(space: Space, layout: ParallelLayout, table: Table, rates: Efficiency) -> float:
    """Of the average stage: the slowest one takes no less in all.

    The estimate charges the stage with the largest sum of reduction, gather and update; a stage with other shares of
    experts, or matrices to orthogonalise, may have less of one of them, so only what is left of the sum counts then.
    """
    if layout.trained_parts == "layer":
        return 0.0
    if layout.lora:
        return rates.step_s
    dense, expert = float(table.dense[-1]) / layout.pp, float(table.expert[-1]) / layout.pp
    device = space.cluster.device
    stream = device.memory_bytes_per_s * device.memory_efficiency
    reduce = gather = held = 0.0
    for params, ranks, stride in (
        (dense, layout.data_ranks, layout.tp),
        (expert, layout.expert_data_ranks, layout.ep * layout.etp),
    ):
        held += params / max(min(ranks, layout.shards) if layout.zero else 1, 1)
        if ranks > 1 and params and not layout.fsdp:
            if layout.zero:
                reduce += _collective_s(space, "reduce_scatter", layout.grad_bytes * params, ranks, stride)
                gather += _collective_s(space, "all_gather", 2 * params, ranks, stride)
            else:
                reduce += _collective_s(space, "all_reduce", layout.grad_bytes * params, ranks, stride)
    seen = 1 - device.overlap_efficiency
    reduce *= rates.data * (seen if layout.overlap_grad_reduce else 1.0)
    gather *= rates.data * (seen if layout.overlap_param_gather else 1.0)
    update = rates.moved * traffic_bytes(layout) * held / stream
    if layout.pp > 1 and not layout.fsdp and (expert or layout.optimizer == "muon"):
        return rates.step_s + min(seen, 1.0) * (reduce + gather + update) * LEAST_RATE
    return rates.step_s + reduce + gather + update


LEAST_RATE = 0.5
"""The estimate compares stages before its efficiencies scale the three parts; these differ by less than a factor 2."""


def _collective_s(space: Space, kind: str, nbytes: float, ranks: int, stride: int) -> float:
    return space.cluster.collective(kind, nbytes, ranks, stride).seconds
