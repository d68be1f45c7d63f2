"""`Table`: seconds and bytes of the first l layers of one inside, for every l; what bounds and cuts are computed from.

Seconds here never exceed what the estimate charges for the same layers. Device and host seconds combine by a norm,
compute and parameter gathers by a convex function; both are replaced by their tangent at the whole model, which lies
below them everywhere, touches them where all layers are alike, and is additive over layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency
from hpsearch.estimate.estimate import HOST_POWER, blocks, fsdp_s
from hpsearch.estimate.memory import loss_bytes, step_buffers
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.price import HOST, Seconds, recomputed, scales
from hpsearch.estimate.shape import ModelShape
from hpsearch.estimate.stages import Chunk, of_layers
from hpsearch.estimate.work import Work

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Inner:
    """One inside, priced: what `assembled` puts in chunks."""

    layout: ParallelLayout
    works: dict[str, Work]
    seconds: dict[str, Seconds]


def inner(shape: ModelShape, layout: ParallelLayout, cluster: Cluster, alike: Inner | None = None) -> Inner:
    """Prices the blocks of a layout; `alike`: those of one that differs in recompute alone."""
    if alike is None:
        return Inner(layout, *blocks(shape, layout, cluster))
    return Inner(layout, alike.works, recomputed(alike.works, alike.seconds, layout, cluster))


def whole_s(shape: ModelShape, priced: Inner, efficiency: Efficiency) -> float:
    """Forward and backward of one micro-batch through the whole model, at least: no links, no recompute by layers."""
    factor = scales(efficiency, priced.layout.low_precision)
    counts = [(priced.seconds[name], float(count)) for name, count in shape.counts.items()]
    if shape.vocab:
        counts += [(priced.seconds["embedding"], 1.0), (priced.seconds["head"], 1.0)]
    forward = sum((one.forward * count for one, count in counts), np.zeros(len(factor)))
    backward = sum((_behind(priced, one) * count for one, count in counts), np.zeros(len(factor)))
    return _norm(_split(forward * factor, 0.0)) + _norm(_split(backward * factor, 0.0))


@dataclass(frozen=True)
class Table:
    """Arrays over l = 0 … layers: of the layers before l. Seconds are of one micro-batch, bytes of one device."""

    base_s: Floats
    """Forward and backward without recompute of whole layers."""
    saved_bytes: Floats
    """Kept from forward to backward, nothing recomputed by whole layers."""
    freed_bytes: Floats
    """Of those, what recomputing the layers frees."""
    dense: Floats
    """Parameters."""
    expert: Floats
    first_s: float
    """Of the embedding."""
    last_s: float
    """Of what stands behind the last layer."""
    again_s_per_byte: float
    """Least seconds of recompute for a byte that it frees; 0 where recompute is not by layers."""
    first_dense: float
    last_dense: float
    """Parameters of embedding and output projection; the latter as if the former stood elsewhere."""
    both_dense: float
    """Of both on one stage."""
    loss_bytes: float
    """On the last stage at the loss, beyond activations."""
    layer_bytes: float
    """On any stage in the backward of a layer, at least."""
    exchange_bytes: float
    hop_bytes: float
    """Of an activation between stages; buffers of a pipeline hold four."""
    forward_share: float
    """Of a stage's seconds for a micro-batch, the forward is at most this."""
    is_uniform: bool
    """All layers are alike."""
    compute_s: tuple[float, float]
    """Of the whole model without links: forward, backward."""

    @property
    def layers(self) -> int:
        return len(self.base_s) - 1

    @cached_property
    def total_s(self) -> float:
        return float(self.base_s[-1]) + self.first_s + self.last_s


def table(
    shape: ModelShape,
    priced: Inner,
    efficiency: Efficiency,
    cluster: Cluster,
    outer: ParallelLayout,
    again: float = 0.0,
) -> Table:
    """The table of a priced inside. `outer`: any layout with it; its data ranks count under full sharding alone.

    `again`: where the tangents touch, as the share of layers recomputed. Every choice gives a bound; under full
    sharding gathers may be longer than the compute at 0 and shorter at 1, and the larger bound of the two counts.
    """
    kinds = sorted(set(shape.pattern))
    weights = _Weights.at_the_whole(shape, priced, efficiency, cluster, outer, again)
    seconds = {kind: weights.seconds(weights.layers[kind]) for kind in kinds}
    by_layers = priced.layout.recompute == "full"
    repeat_s = {kind: weights.again_s(kind) if by_layers else 0.0 for kind in kinds}
    entry = 2.0 * shape.hidden * _rows(priced.layout)
    saved = {kind: _saved(priced, kind) for kind in kinds}
    freed = {kind: max(saved[kind] - entry, 0.0) if by_layers else 0.0 for kind in kinds}
    params = {kind: _params(priced.works, kind) for kind in kinds}
    hidden, tp = shape.hidden, priced.layout.tp
    output, norm = shape.vocab * hidden / tp, hidden * (2.0 if shape.bias else 1.0)
    embedding = shape.embedding_params / tp
    return Table(
        _prefix([seconds[layer] for layer in shape.pattern]), _prefix([saved[layer] for layer in shape.pattern]),
        _prefix([freed[layer] for layer in shape.pattern]), _prefix([params[layer][0] for layer in shape.pattern]),
        _prefix([params[layer][1] for layer in shape.pattern]),
        weights.seconds(weights.embedding), weights.seconds(weights.behind),
        min((repeat_s[kind] / freed[kind] for kind in kinds if freed[kind]), default=0.0),
        embedding, output + norm, embedding + (0.0 if shape.tied else output) + norm,
        loss_bytes(shape, priced.layout, priced.works), *step_buffers(shape, outer, priced.works),
        2.0 * hidden * _rows(priced.layout), weights.forward_share, len(kinds) == 1,
        weights.compute_s,
    )  # fmt: skip


def _rows(layout: ParallelLayout) -> float:
    return layout.tokens / layout.tp if layout.sp else layout.tokens


def _prefix(values: list[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _saved(priced: Inner, layer: tuple[str, ...]) -> float:
    """Kept of one layer, less what selective recompute drops."""
    works, layout = [priced.works[name] for name in layer], priced.layout
    kept = sum(work.saved + work.copies for work in works)
    if layout.recompute == "selective":
        kept -= sum(work.saved_parts.get(part, 0.0) for work in works for part in layout.recompute_parts)
    return kept * (1 - layout.offload_share)


def _params(works: dict[str, Work], layer: tuple[str, ...]) -> tuple[float, float]:
    return sum(works[name].params for name in layer), sum(works[name].expert_params for name in layer)


Pair = tuple[Floats, Floats]
"""[device, host, link] seconds, forward and backward."""


@dataclass(frozen=True)
class _Weights:
    """Tangents: what a layer's device, host and link seconds count in the forward and the backward."""

    layers: dict[tuple[str, ...], Pair]
    repeat: dict[tuple[str, ...], Floats]
    embedding: Pair
    behind: Pair
    slopes: Pair
    compute_s: tuple[float, float]

    @staticmethod
    def at_the_whole(
        shape: ModelShape, priced: Inner, efficiency: Efficiency, cluster: Cluster, outer: ParallelLayout, again: float
    ) -> _Weights:
        """At the whole model with this share of its layers recomputed."""
        factor = scales(efficiency, priced.layout.low_precision)

        def pair(total: Seconds, chunk: Chunk | None = None) -> Pair:
            gather = reduce = 0.0
            if outer.fsdp and chunk is not None:
                gather, reduce = fsdp_s(shape, outer, cluster, chunk, priced.works)
            return (
                _split(total.forward * factor, efficiency.data * gather),
                _split(_behind(priced, total) * factor, efficiency.data * (gather + reduce)),
            )

        kinds = sorted(set(shape.pattern))
        layers = {kind: pair(_total(priced.seconds, kind), of_layers((kind,))) for kind in kinds}
        repeat = {kind: _split(_total(priced.seconds, kind).repeat * factor, 0.0) for kind in kinds}
        has_vocab = 1.0 if shape.vocab else 0.0
        ends = Chunk(of_layers(()).blocks, 0, shape.vocab > 0, 0)
        embedding = pair(priced.seconds["embedding"] * has_vocab, ends)
        head = priced.seconds["head"] * (has_vocab * (1.0 + shape.mtp_layers))
        if shape.mtp_layers:
            head = head + _total(priced.seconds, shape.pattern[-1]) * shape.mtp_layers
        behind = pair(head)
        forward = sum((layers[kind][0] for kind in shape.pattern), embedding[0] + behind[0])
        backward = sum((layers[kind][1] + again * repeat[kind] for kind in shape.pattern), embedding[1] + behind[1])
        overlap = cluster.device.overlap_efficiency if outer.prefetch else 0.0
        slopes = _slope(forward, overlap), _slope(backward, overlap)
        plain = sum((layers[kind][1] for kind in shape.pattern), embedding[1] + behind[1])
        return _Weights(layers, repeat, embedding, behind, slopes, (_norm(forward), _norm(plain)))

    def seconds(self, pair: Pair) -> float:
        return float(pair[0] @ self.slopes[0] + pair[1] @ self.slopes[1])

    def again_s(self, kind: tuple[str, ...]) -> float:
        return float(self.repeat[kind] @ self.slopes[1])

    @property
    def forward_share(self) -> float:
        """Largest share of the forward in any layer, or in what stands before and behind them."""
        pairs = [*self.layers.values(), *(end for end in (self.embedding, self.behind) if self.seconds(end))]
        return max(float(pair[0] @ self.slopes[0]) / self.seconds(pair) for pair in pairs)


def _total(seconds: dict[str, Seconds], layer: tuple[str, ...]) -> Seconds:
    first, *others = (seconds[name] for name in layer)
    for one in others:
        first = first + one
    return first


def _behind(priced: Inner, total: Seconds) -> Floats:
    """The backward; with the part that every layer computes again, unless recompute is by whole layers."""
    return total.backward if priced.layout.recompute == "full" else total.backward + total.repeat


def _split(vector: Floats, link: float) -> Floats:
    return np.array([vector.sum() - vector[HOST], vector[HOST], link])


def _norm(total: Floats) -> float:
    device, host, _ = total
    return float((device**HOST_POWER + host**HOST_POWER) ** (1 / HOST_POWER))


def _slope(total: Floats, overlap: float) -> Floats:
    """Gradient of h(norm(device, host), link) at `total`, for h(c, g) = max(c, g) + (1 - overlap)·min(c, g): convex and
    homogeneous, so its tangent there is below it everywhere."""
    device, host, link = total
    norm = _norm(total)
    if norm == 0.0:
        return np.zeros(3)
    inside = np.array([device, host]) ** (HOST_POWER - 1) / norm ** (HOST_POWER - 1)
    on_compute, on_link = (1.0, 1 - overlap) if norm >= link else (1 - overlap, 1.0)
    return np.array([*(on_compute * inside), on_link])
