"""Seconds of `Work` on a cluster, as a vector over kinds of time, forward and backward.

The vector is kept apart from the efficiencies that scale it: a layout is priced once and fitted, or compared between
machines of one generation, by a product of two small arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpsearch.cluster import Cluster
from hpsearch.estimate.efficiency import Efficiency
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.work import Gemm, Work

Floats = NDArray[np.float64]
KINDS = ("matmul", "matmul16", "core", "moved", "tp", "cp", "ep", "host")
"""matmul: linears in the layout's precision; matmul16: head and router; core: attention; moved: memory-bound kernels;
tp, cp, ep: collectives on the path; host: kernels issued (a count, not seconds)."""
LINEAR, PLAIN, CORE, MOVED, TP, CP, EP, HOST = range(len(KINDS))
LOW = "float8_e4m3fn"


@dataclass(frozen=True)
class Seconds:
    """Vectors over KINDS at the rates of the tables."""

    forward: Floats
    backward: Floats
    repeat: Floats
    """Forward work done again in the backward (recompute)."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward, self.repeat + other.repeat)

    def __mul__(self, count: float) -> Seconds:
        return Seconds(self.forward * count, self.backward * count, self.repeat * count)


def scales(efficiency: Efficiency, low: bool) -> Floats:
    """Factors for KINDS; `host` becomes seconds."""
    e = efficiency
    linear = e.linear_low if low else e.linear
    return np.array([linear, e.linear, e.core, e.moved, e.links, e.links, e.links, e.kernel_s])


def work_seconds(works: dict[str, Work], layout: ParallelLayout, cluster: Cluster) -> dict[str, Seconds]:
    """Seconds of each named piece of work; all matmuls are priced in two calls."""
    forward = {name: np.zeros(len(KINDS)) for name in works}
    backward = {name: np.zeros(len(KINDS)) for name in works}
    _price_matmuls(works, layout, cluster, forward, backward)
    for name, work in works.items():
        _price_core(work, layout, cluster, forward[name], backward[name])
        stream = cluster.device.memory_bytes_per_s * cluster.device.memory_efficiency
        forward[name][MOVED] += work.moved_forward / stream
        backward[name][MOVED] += work.moved_backward / stream
        forward[name][HOST] = work.kernels_forward
        backward[name][HOST] = work.kernels_backward
        _price_links(work, layout, cluster, forward[name], backward[name])
    return {
        name: Seconds(forward[name], backward[name], _repeat(work, layout, name, forward[name]))
        for name, work in works.items()
    }


def _price_matmuls(
    works: dict[str, Work],
    layout: ParallelLayout,
    cluster: Cluster,
    forward: dict[str, Floats],
    backward: dict[str, Floats],
) -> None:
    for kind in (LINEAR, PLAIN):
        rows: list[Gemm] = []
        places: list[tuple[str, Floats]] = []
        for name, work in works.items():
            for m, n, k, batch in work.linears if kind == LINEAR else work.plains:
                rows += [(m, n, k, batch), (m, k, n, batch)]
                places += [(name, forward[name]), (name, backward[name])]
                if not layout.lora or kind == PLAIN:
                    rows.append((k, n, m, batch))
                    places.append((name, backward[name]))
        if not rows:
            continue
        m, n, k, b = np.array(rows, dtype=np.float64).T
        seconds = cluster.matmul_s(m, n, k, matmul_dtype(layout, cluster, kind), batch=b)
        if kind == LINEAR and layout.precision == "nvfp4":
            seconds = seconds * FP4_SHARE
        for (_, into), value in zip(places, seconds.tolist(), strict=True):
            into[kind] += value


FP4_SHARE = 0.75
"""Matmul seconds in 4 bit over those in 8: twice the rate, but weight gradients and some layers stay wider."""


def matmul_dtype(layout: ParallelLayout, cluster: Cluster, kind: int = LINEAR) -> str:
    """The dtype whose rate prices the linears (or the 16-bit products); 16 bit where a device has no 8-bit rate."""
    if kind == LINEAR and layout.low_precision and LOW in dict(cluster.device.peak):
        return LOW
    return "bfloat16"


def _price_core(work: Work, layout: ParallelLayout, cluster: Cluster, forward: Floats, backward: Floats) -> None:
    if not work.core_flops:
        return
    device = cluster.device
    if layout.flash:
        flops = work.core_flops / layout.flash_rate
        forward[CORE] += float(cluster.attention_s(flops, work.core_bytes, "bfloat16"))
        backward[CORE] += float(cluster.attention_s(2.5 * flops, 2 * work.core_bytes, "bfloat16"))
        return
    product = work.core_flops / (device.peak_flops_per_s("bfloat16") * device.matmul_efficiency * SCORE_MATMUL)
    stream = device.memory_bytes_per_s * device.memory_efficiency
    forward[CORE] += product
    backward[CORE] += 2 * product
    forward[MOVED] += work.core_bytes / stream
    backward[MOVED] += 1.25 * work.core_bytes / stream


SCORE_MATMUL = 0.6
"""Share of a large matmul's rate that the narrow batched products of unfused attention reach."""


def _price_links(work: Work, layout: ParallelLayout, cluster: Cluster, forward: Floats, backward: Floats) -> None:
    for calls, into in ((work.tp_forward, forward), (work.tp_backward, backward)):
        for kind, size in calls:
            into[TP] += cluster.collective(kind, size, layout.tp, 1).seconds
    if layout.overlap_tp:
        forward[TP] *= TP_EXPOSED
        backward[TP] *= TP_EXPOSED
    if work.ep_bytes:
        one = cluster.collective("all_to_all", work.ep_bytes, layout.ep, layout.etp).seconds
        forward[EP] += 2 * one
        backward[EP] += 2 * one
        if layout.overlap_ep:
            forward[EP] *= EP_EXPOSED
            backward[EP] *= EP_EXPOSED
    if work.cp_bytes:
        gather = cluster.collective("all_gather", work.cp_bytes * layout.cp, layout.cp, layout.tp).seconds
        scatter = cluster.collective("reduce_scatter", work.cp_bytes * layout.cp, layout.cp, layout.tp).seconds
        if layout.cp_kind == "ring":
            forward[CP] += max(gather - CP_HIDDEN * forward[CORE], (1 - CP_HIDDEN) * gather)
            backward[CP] += max(gather + scatter - CP_HIDDEN * backward[CORE], (1 - CP_HIDDEN) * (gather + scatter))
        else:
            forward[CP] += gather
            backward[CP] += gather + scatter


TP_EXPOSED, EP_EXPOSED, CP_HIDDEN = 0.5, 0.4, 0.9
"""What stays visible of tensor- and expert-parallel collectives that a runtime overlaps; what a ring hides."""


def _repeat(work: Work, layout: ParallelLayout, name: str, forward: Floats) -> Floats:
    """Forward work the backward does again."""
    if name in ("head", "embedding") or layout.recompute == "none":
        return np.zeros(len(KINDS))
    if layout.recompute == "full":
        return forward * layout.recompute_share
    again = np.zeros(len(KINDS))
    parts = layout.recompute_parts
    if "attention" in parts:
        again[CORE] += forward[CORE]
        again[MOVED] += 0.0 if layout.flash else forward[MOVED] * 0.5
    if "norm" in parts or "activation" in parts:
        again[MOVED] += 0.35 * forward[MOVED]
    if ("mlp" in parts and name == "mlp") or ("moe" in parts and name == "moe"):
        again = forward.copy()
    if "mla_up" in parts and name == "attention":
        again[LINEAR] += 0.3 * forward[LINEAR]
    return again
