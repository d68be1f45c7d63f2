"""`estimate_all`: seconds and bytes of thousands of layouts of one model on one cluster.

Same prices as `estimate`, one by one (a test holds them equal); what layouts share is computed once: blocks do not
depend on the pipeline or the data ranks, and pipelines of one schedule are walked through together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency, efficiency_of
from hpsearch.estimate.estimate import Priced, assembled, blocks
from hpsearch.estimate.memory import memory
from hpsearch.estimate.parallel import AS_RUN, ParallelLayout
from hpsearch.estimate.pipeline import pipelines_s
from hpsearch.estimate.shape import ModelShape

Floats = NDArray[np.float64]
AROUND = ("devices", "global_batch", "pp", "vpp", "schedule", "zero", "shard_ranks", "overlap_grad_reduce",
          "overlap_param_gather", "offload_share", "trained_parts", "prefetch", "cut", "recomputed",
          "stage_groups", "uneven")  # fmt: skip
"""Fields of a layout that its blocks do not depend on."""
INSIDE = tuple(i for i, field in enumerate(fields(ParallelLayout)) if field.name not in AROUND)


@dataclass(frozen=True)
class Estimates:
    """One entry for each layout."""

    step_s: Floats
    peak_bytes: Floats


def estimate_all(
    shape: ModelShape, layouts: Sequence[ParallelLayout], cluster: Cluster, efficiency: Efficiency | None = None
) -> Estimates:
    """`estimate` of every layout; efficiencies of the cluster unless given."""
    rates = efficiency or efficiency_of(cluster.device.name, cluster.efficiency)
    priced = _priced(shape, layouts, cluster)
    step_s = np.zeros(len(layouts))
    for group in _schedules(layouts).values():
        members = [priced[i] for i in group]
        if members[0].layout.schedule_kind not in AS_RUN:
            step_s[group] = [one.step(rates)[0] for one in members]
            continue
        times = [one.chunk_seconds(rates) for one in members]
        hops = np.array([one.hop_s * rates.links for one in members])
        layout = members[0].layout
        forward, backward = np.array([f for f, _ in times]), np.array([b for _, b in times])
        pipes = pipelines_s(forward, backward, layout.pp, layout.micro_batches, hops)
        for i, one, pipe, (f, b) in zip(group, members, pipes.tolist(), times, strict=True):
            step_s[i] = one.around(pipe, f, b, rates)[0]
    return Estimates(step_s, np.array([memory(shape, layout).peak_bytes for layout in layouts]))


def _priced(shape: ModelShape, layouts: Sequence[ParallelLayout], cluster: Cluster) -> list[Priced]:
    known = {}
    found = []
    for layout in layouts:
        values = astuple(layout)
        key = tuple(values[i] for i in INSIDE)
        if key not in known:
            known[key] = blocks(shape, layout, cluster)
        found.append(assembled(shape, layout, cluster, *known[key]))
    return found


def _schedules(layouts: Sequence[ParallelLayout]) -> dict[tuple[str, int, int, int], list[int]]:
    groups: defaultdict[tuple[str, int, int, int], list[int]] = defaultdict(list)
    for i, layout in enumerate(layouts):
        groups[layout.schedule_kind, layout.pp, max(layout.vpp, 1), layout.micro_batches].append(i)
    return groups
