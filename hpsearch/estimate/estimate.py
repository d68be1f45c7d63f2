"""`estimate`: seconds of one training step of a layout, with what they are made of.

The parts of a step: every chunk's forward and backward (device time, or the host's time to issue it, whichever is
longer), run by the pipeline's schedule; parameter gathers and gradient reductions that do not hide; the optimizer;
what comes once a step. `Priced` holds everything that does not depend on the fitted efficiencies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency, doubts_of, efficiency_of
from hpsearch.errors import ClusterError
from hpsearch.estimate.band import STATED, band
from hpsearch.estimate.memory import Memory
from hpsearch.estimate.optimizer import orthogonal_s, traffic_bytes
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.pipeline import Path, run_path
from hpsearch.estimate.price import HOST, KINDS, Floats, Seconds, scales, work_seconds
from hpsearch.estimate.shape import ModelShape
from hpsearch.estimate.stages import Chunk, chunks
from hpsearch.estimate.stands import Stand, stands_of, tightest
from hpsearch.estimate.work import Work, block_work, embedding, head

HOST_POWER = 3.0
"""How sharply the longer of device and host wins: t = (device^p + host^p)^(1/p)."""


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of a step and peak bytes of the fullest device."""

    step_s: float
    parts: tuple[tuple[str, float], ...]
    """(what, seconds), adding up to `step_s`."""
    memory: Memory
    room_bytes: int
    """Memory of a device where `memory` is."""
    low_s: float
    high_s: float
    """Of measured steps, 80 % should lie between them (`hpsearch.estimate.band`)."""

    @property
    def peak_bytes(self) -> float:
        return self.memory.peak_bytes

    def __str__(self) -> str:
        between = f"{self.low_s:.4g} to {self.high_s:.4g} s with {STATED:.0%}"
        rows = [f"step {self.step_s:.4g} s ({between})"] + [
            f"  {name:<12}{value:10.4g} s" for name, value in self.parts
        ]
        return "\n".join([*rows, str(self.memory)])


@dataclass(frozen=True)
class Priced:
    """A layout on a cluster at the rates of the tables."""

    shape: ModelShape
    layout: ParallelLayout
    overlap: float
    chunks: tuple[tuple[Seconds, float, float], ...]
    """Of each chunk in model order: seconds, FSDP gather of a forward, gather and reduction of a backward."""
    reduce_s: float
    gather_s: float
    """Once a step, of the rank with most parameters."""
    optimizer_s: float
    hop_s: float
    copies_s: tuple[float, ...] = ()
    """Of each chunk: activations of a micro-batch to the host, and as long back; none where nothing is offloaded."""

    @cached_property
    def arrays(self) -> tuple[Floats, Floats, Floats, Floats]:
        forward = np.array([c.forward for c, _, _ in self.chunks])
        backward = np.array([c.backward + c.repeat for c, _, _ in self.chunks])
        return forward, backward, np.array([g for _, g, _ in self.chunks]), np.array([g for _, _, g in self.chunks])

    def factors(self, efficiency: Efficiency) -> Floats:
        """Of KINDS."""
        return scales(efficiency, self.layout.low_precision)

    def split_seconds(self, efficiency: Efficiency) -> tuple[Floats, Floats, Floats]:
        """Forward, input part and weight part of one micro-batch through each chunk. Where a schedule splits no
        backward, it counts as its input part.

        Parameters are gathered for the forward and the input part, gradients reduced beside the weight part.
        """
        if not self.layout.is_split:
            f, b = self.chunk_seconds(efficiency)
            return f, b, np.zeros_like(b)
        factor = self.factors(efficiency)
        forward, backward, gather_f, gather_b = self.arrays
        weight = np.array([c.weight for c, _, _ in self.chunks])
        f = self._hidden(_longer(forward * factor), gather_f * efficiency.data)
        i = self._hidden(_longer((backward - weight) * factor), gather_f * efficiency.data)
        w = self._hidden(_longer(weight * factor), (gather_b - gather_f) * efficiency.data)
        if self.copies_s:
            copies = np.array(self.copies_s)
            f, i = np.maximum(f, copies), np.maximum(i, copies)
        return f, i, w

    def chunk_seconds(self, efficiency: Efficiency) -> tuple[Floats, Floats]:
        """Forward and backward of one micro-batch through each chunk."""
        if self.layout.is_split:
            f, i, w = self.split_seconds(efficiency)
            return f, i + w
        factor = self.factors(efficiency)
        forward, backward, gather_f, gather_b = self.arrays
        f = self._hidden(_longer(forward * factor), gather_f * efficiency.data)
        b = self._hidden(_longer(backward * factor), gather_b * efficiency.data)
        if self.copies_s:
            copies = np.array(self.copies_s)
            f, b = np.maximum(f, copies), np.maximum(b, copies)
        return f, b

    def path(self, efficiency: Efficiency) -> Path:
        """The longest chain through the pipeline under these efficiencies."""
        f, i, w = self.split_seconds(efficiency)
        parts, hop_s = (f.tolist(), i.tolist(), w.tolist()), self.hop_s * efficiency.links
        return run_path(self.layout.schedule_kind, parts, self.layout.pp, self.layout.micro_batches, hop_s)

    def step(self, efficiency: Efficiency, path: Path | None = None) -> tuple[float, tuple[tuple[str, float], ...]]:
        """Seconds and their parts under these efficiencies; along `path` if given, else along the longest chain."""
        f, i, w = self.split_seconds(efficiency)
        chain = path or self.path(efficiency)
        pipe = chain.seconds(f.tolist(), i.tolist(), self.hop_s * efficiency.links, w.tolist() if chain.weight else ())
        return self.around(pipe, f, i + w, efficiency)

    def around(
        self, pipe: float, f: Floats, b: Floats, efficiency: Efficiency
    ) -> tuple[float, tuple[tuple[str, float], ...]]:
        """`step` once the pipeline's seconds are known; `f` and `b` of each chunk.

        Where backwards are split, gradients are complete after weight parts: of the last ones, those alone hide the
        reduction.
        """
        layout, factor = self.layout, self.factors(efficiency)
        forward, backward, _, _ = self.arrays
        stages, m = layout.pp, layout.micro_batches
        mine = list(layout.chunks_of(0))
        reduce, gather = self.reduce_s * efficiency.data, self.gather_s * efficiency.data
        if layout.overlap_grad_reduce:
            behind = self.split_seconds(efficiency)[2] if layout.is_split else b
            window = self.overlap * float(behind[mine].sum())
            reduce = max(reduce - window, (1 - self.overlap) * reduce)
        if layout.overlap_param_gather:
            window = self.overlap * float(f[mine].sum())
            gather = max(gather - window, (1 - self.overlap) * gather)
        if layout.trained_parts == "layer":
            return pipe, (("layer", pipe),)
        optimizer = self.optimizer_s * efficiency.moved
        busy = (forward + backward) * factor
        busy[:, HOST] = 0.0
        parts = [(name, float(busy[:, i].sum()) * m / stages) for i, name in enumerate(KINDS) if i != HOST]
        rest = pipe - sum(value for _, value in parts)
        total = pipe + reduce + gather + optimizer + efficiency.step_s
        parts += [("bubble, host", rest), ("reduce", reduce), ("gather", gather), ("optimizer", optimizer)]
        return total, (*parts, ("once", efficiency.step_s))

    def _hidden(self, compute: Floats, link: Floats) -> Floats:
        """Compute with the gathers of fully sharded parameters beside it, prefetched one layer ahead."""
        overlap = self.overlap if self.layout.prefetch else 0.0
        return np.maximum(compute, link) + (1 - overlap) * np.minimum(compute, link)


def _longer(seconds: Floats) -> Floats:
    device = seconds.sum(axis=1) - seconds[:, HOST]
    return np.asarray((device**HOST_POWER + seconds[:, HOST] ** HOST_POWER) ** (1 / HOST_POWER))


def estimate(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, efficiency: Efficiency | None = None
) -> Estimate:
    """Step seconds and peak bytes of `layout` on `cluster`; efficiencies of its device generation unless given."""
    priced = price(shape, layout, cluster)
    seconds, parts = priced.step(efficiency or efficiency_of(cluster.device.name, cluster.efficiency))
    low, high = band(seconds, parts, doubts_of(cluster.device.name, cluster.efficiency), layout.low_precision)
    return Estimate(seconds, parts, *tightest(shape, layout, cluster), low, high)


def price(shape: ModelShape, layout: ParallelLayout, cluster: Cluster) -> Priced:
    """Everything about the step that comes from tables."""
    works, seconds = blocks(shape, layout, cluster)
    return assembled(shape, layout, cluster, works, seconds)


def blocks(shape: ModelShape, layout: ParallelLayout, cluster: Cluster) -> tuple[dict[str, Work], dict[str, Seconds]]:
    """Work and seconds of each kind of block, of head and embedding; they do not depend on pipeline or data ranks."""
    works = {name: _work(name, shape, layout) for name in (*sorted(shape.counts), "head", "embedding")}
    return works, work_seconds(works, layout, cluster)


def one_block(name: str, shape: ModelShape, layout: ParallelLayout, cluster: Cluster) -> tuple[Work, Seconds]:
    """One of `blocks`, or head or embedding."""
    work = _work(name, shape, layout)
    return work, work_seconds({name: work}, layout, cluster)[name]


def _work(name: str, shape: ModelShape, layout: ParallelLayout) -> Work:
    """With the traffic of accumulating its gradients."""
    if name not in shape.counts:
        return head(shape, layout) if name == "head" else embedding(shape, layout)
    work = block_work(name, shape, layout)
    if not layout.lora:
        work.moved_weight = 2 * layout.grad_bytes * (work.params + work.expert_params)
        work.moved_backward += work.moved_weight
    return work


def by_rank(
    layout: ParallelLayout, cluster: Cluster, works: dict[str, Work], stands: tuple[Stand, ...]
) -> tuple[dict[str, Seconds], ...]:
    """Seconds of blocks on pipeline ranks that stand so; they do not depend on pipeline or data ranks of `layout`."""
    each = {stand: work_seconds(works, layout, cluster.among(stand)) for stand in dict.fromkeys(stands)}
    return tuple(each[stand] for stand in stands)


def assembled(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, works: dict[str, Work], alike: dict[str, Seconds],
    ranks: tuple[dict[str, Seconds], ...] = (),
) -> Priced:  # fmt: skip
    """The blocks put in their chunks, and what is paid once a step. `alike`: seconds of blocks on the cluster's device;
    `ranks`: on each pipeline rank where groups differ, if they are known already."""
    cut = chunks(shape, layout)
    found = []
    ranks = ranks or by_rank(layout, cluster, works, stands_of(cluster, layout)) or (alike,) * layout.pp
    rank_of = {i: rank for rank in range(layout.pp) for i in layout.chunks_of(rank)}
    for i, chunk in enumerate(cut):
        total = _through(chunk, ranks[rank_of[i]])
        if layout.uneven:
            total = _last(layout, cluster, chunk, works)
        gather = reduce = 0.0
        if layout.fsdp:
            gather, reduce = fsdp_s(shape, layout, cluster, chunk, works)
        found.append((total, gather, gather + reduce))
    reduce_s, gather_s, optimizer_s = _once(shape, layout, cluster, cut, works)
    hop = 2.0 * shape.hidden * layout.tokens / (layout.tp if layout.sp else 1)
    hop_s = 0.0
    if layout.pp > 1:
        hop_s = hop_seconds(cluster, layout, hop)
    copies = offloaded_s(shape, layout, cluster, cut, works)
    overlap = cluster.device.overlap_efficiency
    return Priced(shape, layout, overlap, tuple(found), reduce_s, gather_s, optimizer_s, hop_s, copies)


def _through(chunk: Chunk, seconds: dict[str, Seconds]) -> Seconds:
    """One micro-batch through a chunk."""
    total = seconds["embedding"] * (1.0 if chunk.embedding else 0.0) + seconds["head"] * float(chunk.heads)
    for name, count in chunk.blocks.items():
        total = total + seconds[name] * count
    if chunk.again is not None:
        repeat = sum((seconds[name].repeat * count for name, count in chunk.again.items()), np.zeros(len(KINDS)))
        total = replace(total, repeat=repeat)
    return total


def _last(layout: ParallelLayout, cluster: Cluster, chunk: Chunk, works: dict[str, Work]) -> Seconds:
    """Of data ranks with different numbers of micro-batches those that are done last: their share of as many as the
    most have, since all micro-batches of a step are counted so."""
    groups = by_rank(layout, cluster, works, tuple((group.name,) for group in cluster.groups))
    counts = [count / layout.micro_batches for _, count in layout.uneven]
    each = [_through(chunk, seconds) * share for seconds, share in zip(groups, counts, strict=True)]
    return max(each, key=lambda one: one_s(one, cluster, layout))


def one_s(total: Seconds, cluster: Cluster, layout: ParallelLayout) -> float:
    """Forward and backward, by the cluster's efficiencies."""
    factor = scales(efficiency_of(cluster.device.name, cluster.efficiency), layout.low_precision)
    both = np.array([total.forward, total.backward + total.repeat]) * factor
    return float(_longer(both).sum())


def offloaded_s(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, cut: tuple[Chunk, ...], works: dict[str, Work]
) -> tuple[float, ...]:
    """Copies of one micro-batch's offloaded activations to host memory, by chunk. ClusterError: no known host link."""
    if not layout.offload_share:
        return ()
    if cluster.device.host_bytes_per_s is None:
        name = cluster.device.name
        raise ClusterError(f"device {name}", "expected host_bandwidth, to price offload, but found none", "Add it.")
    rows = layout.tokens / layout.tp if layout.sp else layout.tokens
    found = []
    for chunk in cut:
        kept = sum(works[name].saved * count for name, count in chunk.blocks.items())
        entry = 2.0 * shape.hidden * rows
        if chunk.again is not None:
            kept += entry * chunk.layers_again - sum(works[name].saved * count for name, count in chunk.again.items())
        elif layout.recompute == "full":
            kept = layout.recompute_share * entry * chunk.layers + (1 - layout.recompute_share) * kept
        found.append(layout.offload_share * kept / cluster.device.host_bytes_per_s)
    return tuple(found)


def hop_seconds(cluster: Cluster, layout: ParallelLayout, nbytes: float) -> float:
    """One message to the next stage, whose rank stands tp·cp·dp away."""
    tier = cluster.tier_of(layout.pp, layout.tp * layout.cp * layout.dp)
    return tier.latency_s + cluster.device.collective_launch_s + nbytes / tier.rate


def chunk_params(
    shape: ModelShape, layout: ParallelLayout, chunk: Chunk, works: dict[str, Work]
) -> tuple[float, float]:
    """(dense, expert) parameters of one chunk on one device."""
    dense = sum(works[name].params * count for name, count in chunk.blocks.items())
    expert = sum(works[name].expert_params * count for name, count in chunk.blocks.items())
    if chunk.embedding:
        dense += shape.embedding_params / layout.tp
    if chunk.heads and not (shape.tied and chunk.embedding):
        dense += shape.vocab * shape.hidden / layout.tp
    return dense, expert


def fsdp_s(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, chunk: Chunk, works: dict[str, Work]
) -> tuple[float, float]:
    """Gather of all layers of a chunk in 16 bit, and reduce-scatter of their gradients, layer by layer."""
    gather = reduce = 0.0
    ranks = layout.shards
    dense = (ranks, layout.tp, layout.data_ranks // ranks)
    sizes = [(sum(works[name].params for name in kind), float(count), *dense) for kind, count in chunk.kinds.items()]
    if chunk.embedding:
        sizes.append((shape.embedding_params / layout.tp, 1.0, *dense))
    shards = min(layout.expert_data_ranks, ranks)
    experts = (shards, layout.ep * layout.etp, layout.expert_data_ranks // shards)
    sizes += [
        (sum(works[name].expert_params for name in kind), float(count), *experts) for kind, count in chunk.kinds.items()
    ]
    for params, count, shards, apart, copies in sizes:
        if not params:
            continue
        if shards > 1:
            gather += count * cluster.collective("all_gather", 2 * params, shards, apart).seconds
            reduce += count * cluster.collective("reduce_scatter", layout.grad_bytes * params, shards, apart).seconds
        if copies > 1:
            part = layout.grad_bytes * params / shards
            reduce += count * cluster.collective("all_reduce", part, copies, apart * shards).seconds
    slower = 1.0 if layout.prefetch else UNPREFETCHED
    return gather * slower, reduce * slower


UNPREFETCHED = 4.2
"""Time of gathers parameter by parameter over that of whole layers: six steps of 384 to 2,240 A100 with the ZeRO-3 of
2021 (arXiv 2104.04473, table 2) follow it within 15 %."""


def _once(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, cut: tuple[Chunk, ...], works: dict[str, Work]
) -> tuple[float, float, float]:
    """(gradient reduction, parameter gather, optimizer) of the slowest pipeline rank."""
    worst = (0.0, 0.0, 0.0)
    stands = stands_of(cluster, layout) or ((),) * layout.pp
    for rank in range(layout.pp):
        here_on = cluster.among(stands[rank])
        stream = here_on.device.memory_bytes_per_s * here_on.device.memory_efficiency
        here = tuple(cut[i] for i in layout.chunks_of(rank))
        mine = [chunk_params(shape, layout, chunk, works) for chunk in here]
        dense, expert = sum(d for d, _ in mine), sum(e for _, e in mine)
        if shape.tied and layout.is_vee and rank == 0:  # one tensor, in the first and in the last chunk
            dense -= shape.vocab * shape.hidden / layout.tp
        if layout.lora:
            dense, expert = LORA_SHARE * dense, LORA_SHARE * expert
        groups = [(dense, layout.data_ranks, layout.tp), (expert, layout.expert_data_ranks, layout.ep * layout.etp)]
        reduce = gather = held = 0.0
        for params, ranks, stride in groups:
            shards = min(ranks, layout.shards) if layout.zero else 1
            held += params / max(shards, 1)
            if ranks > 1 and params and not layout.fsdp:
                if layout.zero:
                    reduce += cluster.collective("reduce_scatter", layout.grad_bytes * params, ranks, stride).seconds
                    gather += cluster.collective("all_gather", 2 * params, ranks, stride).seconds
                else:
                    reduce += cluster.collective("all_reduce", layout.grad_bytes * params, ranks, stride).seconds
        update = traffic_bytes(layout) * held / stream
        if layout.optimizer == "muon":
            update += orthogonal_s(shape, layout, here_on, here)
        found = (reduce, gather, update)
        if sum(found) > sum(worst):
            worst = found
    return worst


LORA_SHARE = 0.002
"""Adapter parameters over those they adapt, at rank 16."""
