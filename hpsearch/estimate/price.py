"""Seconds of `Work` on a cluster, as a vector over kinds of time, forward and backward.

The vector is kept apart from the efficiencies that scale it: a layout is priced once and fitted, or compared between
machines of one generation, by a product of two small arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hpsearch.cluster import Cluster
from hpsearch.cluster.dispatch import parts_met
from hpsearch.cluster.efficiency import Efficiency
from hpsearch.cluster.tier import memory_domain
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import kind_of
from hpsearch.estimate.work import Gemm, Work

Floats = NDArray[np.float64]
KINDS = ("matmul", "matmul16", "experts", "core", "moved", "tp", "cp", "ep", "stall", "host")
"""matmul: linears in the layout's precision; matmul16: head and router; experts: routed experts, their matmuls and
memory-bound kernels; core: attention; moved: memory-bound kernels; tp, cp, ep: collectives on the path; stall,
host: kernels issued while the device waits, or beside it (counts, not seconds)."""
LINEAR, PLAIN, ROUTED, CORE, MOVED, TP, CP, EP, STALL, HOST = range(len(KINDS))
LOW = "float8_e4m3fn"


@dataclass(frozen=True)
class Seconds:
    """Vectors over KINDS at the rates of the tables."""

    forward: Floats
    backward: Floats
    repeat: Floats
    """Forward work done again in the backward (recompute)."""
    weight: Floats = field(default_factory=lambda: np.zeros(len(KINDS)))
    """Of the backward, what no other rank waits for: gradients of weights, and their accumulation."""

    def __add__(self, other: Seconds) -> Seconds:
        forward, backward = self.forward + other.forward, self.backward + other.backward
        return Seconds(forward, backward, self.repeat + other.repeat, self.weight + other.weight)

    def __mul__(self, count: float) -> Seconds:
        return Seconds(self.forward * count, self.backward * count, self.repeat * count, self.weight * count)


def scales(efficiency: Efficiency, low: bool) -> Floats:
    """Factors for KINDS; `stall` and `host` become seconds."""
    e = efficiency
    linear = e.clock * (e.linear_low if low else e.linear)
    on_path = [e.links, e.links, e.links]
    return np.array(
        [linear, e.clock * e.linear, e.clock * e.routed, e.clock * e.core, e.moved, *on_path, e.kernel_s, e.kernel_s]
    )


def work_seconds(works: dict[str, Work], layout: ParallelLayout, cluster: Cluster) -> dict[str, Seconds]:
    """Seconds of each named piece of work; all matmuls are priced in two calls."""
    forward = {name: np.zeros(len(KINDS)) for name in works}
    backward = {name: np.zeros(len(KINDS)) for name in works}
    weight = _price_matmuls(works, layout, cluster, forward, backward)
    stream = cluster.device.memory_bytes_per_s * cluster.device.memory_efficiency
    for name, work in works.items():
        _price_core(work, layout, cluster, forward[name], backward[name])
        forward[name][MOVED] += work.moved_forward / stream
        backward[name][MOVED] += work.moved_backward / stream
        forward[name][ROUTED] += work.routed_forward / stream
        backward[name][ROUTED] += work.routed_backward / stream
        forward[name][STALL], backward[name][STALL] = work.stalls_forward, work.stalls_backward
        forward[name][HOST], backward[name][HOST] = work.kernels_forward, work.kernels_backward
        _price_links(work, layout, cluster, forward[name], backward[name])
        weight[name][MOVED] += work.moved_weight / stream
        for one in (forward[name], backward[name], weight[name]):
            one[HOST] *= host_share(name, layout)
    return {
        name: Seconds(forward[name], backward[name], _repeat(work, layout, name, forward[name], stream), weight[name])
        for name, work in works.items()
    }


def recomputed(
    works: dict[str, Work], seconds: dict[str, Seconds], layout: ParallelLayout, cluster: Cluster
) -> dict[str, Seconds]:
    """The same blocks with `layout`'s recompute; the layouts differ in nothing else."""
    stream = cluster.device.memory_bytes_per_s * cluster.device.memory_efficiency
    return {
        name: replace(one, repeat=_repeat(works[name], layout, name, one.forward, stream))
        for name, one in seconds.items()
    }


GRAPH_HOST = 0.05
"""Host time that is left of a captured block."""
ROUTER_SHARE = 0.5
"""Of an expert block's kernels, those before tokens go to experts."""


def host_share(name: str, layout: ParallelLayout) -> float:
    """Of a block's kernels, those the host still issues one by one."""
    kind = kind_of(name)
    if "all" in layout.graphed or kind in layout.graphed:
        return GRAPH_HOST
    return 1 - ROUTER_SHARE if kind == "moe" and "router" in layout.graphed else 1.0


def _price_matmuls(
    works: dict[str, Work],
    layout: ParallelLayout,
    cluster: Cluster,
    forward: dict[str, Floats],
    backward: dict[str, Floats],
) -> dict[str, Floats]:
    """Forward, and twice as long backward: the gradients of input and weight are products over the same three sides,
    for which the tables, measured in forward orientation, say nothing more. Frozen weights have no gradient.

    Returns the weight part of the backward: one product, one kernel, of each linear. All else is the input part: cores,
    norms, element-wise kernels, what is computed again, and collectives; the second gather of a sequence-sharded input
    is too, though the weight part may do it: with it there, others wait less.
    """
    weight = {name: np.zeros(len(KINDS)) for name in works}
    for kind in (LINEAR, PLAIN, ROUTED):
        rows: list[Gemm] = []
        names: list[str] = []
        for name, work in works.items():
            found = {LINEAR: work.linears, PLAIN: work.plains, ROUTED: work.grouped}[kind]
            rows += found
            names += [name] * len(found)
        if not rows:
            continue
        m, n, k, b = np.array(rows, dtype=np.float64).T
        seconds = cluster.matmul_s(m, n, k, cluster.device.sixteen, batch=b)
        if kind != PLAIN:
            seconds = seconds / rate_over_16_bit(layout, cluster, kind)
        is_frozen = layout.lora and kind != PLAIN
        for name, value in zip(names, seconds.tolist(), strict=True):
            forward[name][kind] += value
            backward[name][kind] += (1.0 if is_frozen else 2.0) * value
            if not is_frozen:
                weight[name][kind] += value
                weight[name][HOST] += 1
    return weight


FP4_RATE = 1.9
"""Matmul rate of linears in 4 bit over that in 8. Routed experts stay in 8."""


def rate_over_16_bit(layout: ParallelLayout, cluster: Cluster, kind: int = LINEAR) -> float:
    """How much faster linears run than in 16 bit, by the peaks; 1 on a device without narrow formats.

    Efficiency by shape comes from the 16-bit tables for every format: the 8-bit tables at hand were measured with the
    quantisation of the inputs, which is priced apart here, among the memory-bound kernels.
    """
    peaks = dict(cluster.device.peak)
    if not layout.low_precision or LOW not in peaks:
        return 1.0
    return (
        peaks[LOW]
        / peaks[cluster.device.sixteen]
        * (FP4_RATE if layout.precision == "nvfp4" and kind == LINEAR else 1.0)
    )


def _price_core(work: Work, layout: ParallelLayout, cluster: Cluster, forward: Floats, backward: Floats) -> None:
    if not work.core_flops:
        return
    device = cluster.device
    if layout.flash:
        flops = work.core_flops / layout.flash_rate
        forward[CORE] += float(cluster.attention_s(flops, work.core_bytes, device.sixteen))
        backward[CORE] += float(cluster.attention_s(2.5 * flops, 2 * work.core_bytes, device.sixteen))
        return
    product = work.core_flops / (device.peak_flops_per_s(device.sixteen) * device.matmul_efficiency * SCORE_MATMUL)
    stream = device.memory_bytes_per_s * device.memory_efficiency
    beyond = max(product - work.product_bytes / stream, 0.0)
    forward[CORE] += beyond
    backward[CORE] += 2 * beyond
    forward[MOVED] += work.core_bytes / stream
    more = SCORE_BACKWARD[layout.dropout] if work.fused_softmax else SCORE_BACKWARD_BY_OPS
    backward[MOVED] += more * work.core_bytes / stream


SCORE_BACKWARD = {False: 14 / 8, True: 19 / 13}
"""Bytes of the score matrix moved backward over those forward. Of one element forward: written, softmax 4, read; with
dropout 5 more. Backward: probabilities read, their gradient written, softmax 6, read twice; with dropout 5 more."""
SCORE_BACKWARD_BY_OPS = 1.25
"""The same where mask, scale and softmax are kernels of their own, most of whose bytes are forward."""
SCORE_MATMUL = 0.6
"""Share of a large matmul's rate that the narrow batched products of unfused attention reach, if the bytes of the score
matrix take no longer."""


def _price_links(work: Work, layout: ParallelLayout, cluster: Cluster, forward: Floats, backward: Floats) -> None:
    for calls, into in ((work.tp_forward, forward), (work.tp_backward, backward)):
        for kind, size in calls:
            into[HOST] += CALL_KERNELS
            into[TP] += cluster.collective(kind, size, layout.tp, 1).seconds
    if layout.overlap_tp and layout.tp <= memory_domain(cluster.tiers):
        # Piece by piece around the ring beside the products: the first or last of tp pieces shows, and what takes
        # longer than the products. Runtimes do it through each other's memory (Transformer Engine's user buffers).
        for into in (forward, backward):
            into[TP] = max(into[TP] / layout.tp, into[TP] - into[LINEAR])
    if work.ep_bytes:
        one = exchange_s(work, layout, cluster)
        forward[EP] += 2 * one
        backward[EP] += 2 * one
        if layout.overlap_ep:
            forward[EP] *= EP_EXPOSED
            backward[EP] *= EP_EXPOSED
    if work.cp_bytes and layout.cp_kind == "ulysses":
        exchange = cluster.collective("all_to_all", work.cp_heads_bytes, layout.cp, layout.tp).seconds
        forward[CP] += exchange
        backward[CP] += exchange
    elif work.cp_bytes:
        gather = cluster.collective("all_gather", work.cp_bytes * layout.cp, layout.cp, layout.tp).seconds
        scatter = cluster.collective("reduce_scatter", work.cp_bytes * layout.cp, layout.cp, layout.tp).seconds
        if layout.cp_kind == "ring":
            forward[CP] += max(gather - CP_HIDDEN * forward[CORE], (1 - CP_HIDDEN) * gather)
            backward[CP] += max(gather + scatter - CP_HIDDEN * backward[CORE], (1 - CP_HIDDEN) * (gather + scatter))
        else:
            forward[CP] += gather
            backward[CP] += gather + scatter


def exchange_s(work: Work, layout: ParallelLayout, cluster: Cluster) -> float:
    """One dispatch (or combine), with one copy of a token for each expert it goes to.

    A dispatcher that deduplicates sends one copy to each domain of a tier that has any of the token's experts, and
    copies inside; `parts_met` says how many domains that are.
    """
    if not layout.dedup:
        return cluster.collective("all_to_all", work.ep_bytes, layout.ep, layout.etp).seconds
    experts, k, *groups = work.ep_spread
    shape = cluster.shape(layout.ep, layout.etp)
    seconds, units = 0.0, layout.ep
    for tier, count in zip(cluster.tiers, shape.counts, strict=True):
        parents = count if count > 0 else units
        if units > parents:
            met = parts_met(units, experts, k, *groups)
            away = met * (1 - parents / units)
            seconds = max(seconds, tier.latency_s + work.ep_bytes / k * away / tier.rate)
        units = parents
    return cluster.device.collective_launch_s + seconds


CALL_KERNELS = 1.0
"""Host time of issuing a collective, in kernels."""
EP_EXPOSED, CP_HIDDEN = 0.4, 0.9
"""What stays visible of expert-parallel collectives that a runtime overlaps; what a ring hides."""


def _repeat(work: Work, layout: ParallelLayout, name: str, forward: Floats, stream: float) -> Floats:
    """Forward work the backward does again; `stream`: bytes a second of memory-bound kernels."""
    if name in ("head", "embedding") or layout.recompute == "none":
        return np.zeros(len(KINDS))
    if layout.recompute == "full":
        return forward * layout.recompute_share
    again = np.zeros(len(KINDS))
    parts, kind = layout.recompute_parts, kind_of(name)
    if "attention" in parts and kind != "mamba":
        again[CORE] += forward[CORE]
        again[MOVED] += 0.0 if layout.flash else forward[MOVED] * 0.5
    if "norm" in parts or "activation" in parts:
        again[MOVED] += 0.35 * forward[MOVED]
    if "activation" in parts and work.routed_forward:
        again[ROUTED] += work.routed_activation / stream
    if kind in parts and kind in ("mlp", "moe"):
        again = forward.copy()
    if "ops" in parts and kind in ("attention", "mlp"):
        again[LINEAR] += 0.5 * forward[LINEAR]
        again[MOVED] += forward[MOVED]
    if "mla_up" in parts and kind == "attention":
        again[LINEAR] += 0.3 * forward[LINEAR]
    return again
