"""`Table`: seconds and bytes of the first l layers of one inside, for every l; what bounds and cuts are computed from.

Seconds here never exceed what the estimate charges for the same layers. Device and host seconds combine by a norm,
compute and parameter gathers by a convex function; both are replaced by their tangent at the whole model, which lies
below them everywhere, touches them where all layers are alike, and is additive over layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency
from hpsearch.estimate.estimate import HOST_POWER, blocks
from hpsearch.estimate.kept import owed_bytes
from hpsearch.estimate.memory import loss_bytes, step_buffers
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.price import HOST, Seconds, scales
from hpsearch.estimate.shape import Layer, ModelShape
from hpsearch.estimate.work import Work

Floats = NDArray[np.float64]


ROUNDED = 1 + 1e-12
"""What differences of sums over layers may be off by."""


PREFIXES = ("base_s", "saved_bytes", "freed_bytes", "dense", "expert", "owed_bytes", "forward_s", "weight_s")
"""Arrays of a table."""


@dataclass(frozen=True)
class Inner:
    """One inside, priced: what `assembled` puts in chunks."""

    layout: ParallelLayout
    works: dict[str, Work]
    seconds: dict[str, Seconds]
    ranks: tuple[dict[str, Seconds], ...] = ()
    """On each pipeline rank, where they stand on groups of unlike nodes."""


def inner(shape: ModelShape, layout: ParallelLayout, cluster: Cluster) -> Inner:
    """Prices the blocks of a layout."""
    return Inner(layout, *blocks(shape, layout, cluster))


@dataclass(frozen=True)
class Table:
    """Arrays over l = 0 … layers: of the layers before l. Seconds are of one micro-batch, bytes of one device."""

    base_s: Floats
    """Forward and backward without recompute of whole layers."""
    forward_s: Floats
    """Of those, the forward."""
    weight_s: Floats
    """Of those, the weight part of the backward."""
    saved_bytes: Floats
    """Kept from forward to backward, nothing recomputed by whole layers."""
    freed_bytes: Floats
    """Of those, what recomputing the layers frees."""
    owed_bytes: Floats
    """Kept from input part to weight part, where backwards are split."""
    dense: Floats
    """Parameters."""
    expert: Floats
    first_s: float
    """Of the embedding."""
    last_s: float
    """Of what stands behind the last layer."""
    first_forward_s: float
    last_forward_s: float
    first_weight_s: float
    last_weight_s: float
    again_s: Floats
    """Of the forward of layers computed again in the backward; 0 where recompute is not by layers."""
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
    is_uniform: bool
    """All layers are alike."""
    compute_s: tuple[float, float]
    """Of the whole model without links: forward, backward."""

    @property
    def layers(self) -> int:
        return len(self.base_s) - 1

    @cached_property
    def shares(self) -> tuple[float, float, float]:
        """Of a stage's seconds for a micro-batch, nothing computed again, forward, input part and weight part are
        at most these: the largest of any layer, and of what stands before and behind them."""
        ends = ((self.first_s, self.first_forward_s, self.first_weight_s),
                (self.last_s, self.last_forward_s, self.last_weight_s))  # fmt: skip
        found = [np.diff(one) for one in (self.base_s, self.forward_s, self.weight_s)]
        rows = np.vstack([np.stack(found, axis=1), [end for end in ends if end[0]] or np.zeros((0, 3))])
        base, forward, weight = rows.T
        forward_share, weight_share = forward / base, weight / base
        largest = (forward_share.max(), (1 - forward_share - weight_share).max(), weight_share.max())
        return float(largest[0]) * ROUNDED, float(largest[1]) * ROUNDED, float(largest[2]) * ROUNDED

    @cached_property
    def total_s(self) -> float:
        return float(self.base_s[-1]) + self.first_s + self.last_s

    @cached_property
    def prefixes(self) -> Floats:
        """[layers + 1, PREFIXES]."""
        return np.stack([getattr(self, name) for name in PREFIXES], axis=1)

    @cached_property
    def again(self) -> Again:
        return Again.of(self)


@dataclass(frozen=True)
class Again:
    """What computing layers again costs, two kinds of layers apart: the best and all others."""

    prefixes: Floats
    """[layers + 1, 2]: of the layers before l, bytes freed by those that take least for a byte, and how many of those
    take least there are."""
    scalars: tuple[float, float, float, float, float, float]
    """Least weight part of a layer; most bytes of one layer; seconds a byte of the cheap, of the others; seconds of the
    quick, of the others."""

    @staticmethod
    def of(table: Table) -> Again:
        freed, again = np.diff(table.freed_bytes), np.diff(table.again_s)
        rho = np.where(freed > 0, again / np.maximum(freed, 1e-9), np.inf)
        least, others = _two(rho)
        quickest, slower = _two(np.where(freed > 0, again, np.inf))
        cheap = np.where(rho <= least * (1 + 1e-9), freed, 0.0)
        quick = np.where((again <= quickest * (1 + 1e-9)) & (freed > 0), 1.0, 0.0)
        least_weight = float(np.diff(table.weight_s).min()) / ROUNDED
        scalars = least_weight, max(float(freed.max()), 1.0), least, others, quickest, slower
        before = np.cumsum(np.stack([cheap, quick], axis=1), axis=0)
        return Again(np.concatenate([np.zeros((1, 2)), before]), scalars)


def _two(values: Floats) -> tuple[float, float]:
    """The least, and the least of those above it; 0 for none."""
    least = float(values.min())
    above = values[values > least * (1 + 1e-9)]
    second = float(above.min()) if len(above) else np.inf
    return (least if least < np.inf else 0.0), (second if second < np.inf else 0.0 if least == np.inf else least)


def table(shape: ModelShape, priced: Inner, efficiency: Efficiency) -> Table:
    """The table of a priced inside, without gathers of fully sharded storage."""
    weights = _Weights.at_the_whole(shape, priced, efficiency)
    each = {kind: _of_layer(shape, priced, weights, kind) for kind in weights.layers}
    base_s, forward_s, weight_s, saved, freed, owed, dense, expert, again_s = _prefixes(shape, each)
    hidden, tp = shape.hidden, priced.layout.tp
    output, norm = shape.vocab * hidden / tp, hidden * (2.0 if shape.bias else 1.0)
    embedding = shape.embedding_params / tp
    if not shape.vocab:  # then nothing stands before or behind the layers
        norm = embedding = 0.0
    layer_bytes, exchange_bytes = step_buffers(shape, priced.layout, priced.works)
    return Table(
        base_s=base_s,
        forward_s=forward_s,
        weight_s=weight_s,
        saved_bytes=saved,
        freed_bytes=freed,
        owed_bytes=owed,
        dense=dense,
        expert=expert,
        first_s=weights.seconds(weights.embedding),
        last_s=weights.seconds(weights.behind),
        first_forward_s=weights.forward_s(weights.embedding),
        last_forward_s=weights.forward_s(weights.behind),
        first_weight_s=weights.weight_s(weights.embedding_weight),
        last_weight_s=weights.weight_s(weights.behind_weight),
        again_s=again_s,
        again_s_per_byte=min((one[8] / one[4] for one in each.values() if one[4]), default=0.0),
        first_dense=embedding,
        last_dense=output + norm,
        both_dense=embedding + (0.0 if shape.tied else output) + norm,
        loss_bytes=loss_bytes(shape, priced.layout, priced.works),
        layer_bytes=layer_bytes,
        exchange_bytes=exchange_bytes,
        hop_bytes=2.0 * hidden * _rows(priced.layout),
        is_uniform=len(each) == 1,
        compute_s=weights.compute_s,
    )


def _rows(layout: ParallelLayout) -> float:
    return layout.tokens / layout.tp if layout.sp else layout.tokens


def _of_layer(shape: ModelShape, priced: Inner, weights: _Weights, kind: Layer) -> tuple[float, ...]:
    """Of one layer: seconds, of the forward, of the weight part; bytes kept, freed, owed; dense and expert parameters;
    seconds of recompute."""
    layout, by_layers = priced.layout, priced.layout.recompute == "full"
    saved, entry = _saved(priced, kind), 2.0 * shape.hidden * _rows(layout) * (1 - layout.offload_share)
    return (
        weights.seconds(weights.layers[kind]), weights.forward_s(weights.layers[kind]),
        weights.weight_s(weights.weight[kind]), saved, max(saved - entry, 0.0) if by_layers else 0.0,
        sum(owed_bytes(priced.works[name], shape, layout) for name in kind), *_params(priced.works, kind),
        weights.again_s(kind) if by_layers else 0.0,
    )  # fmt: skip


def _prefixes(shape: ModelShape, each: Mapping[Layer, Sequence[float]]) -> Floats:
    """[values, layers + 1]: sums over the layers before l of what one of each kind has."""
    places = {kind: i for i, kind in enumerate(each)}
    values = np.array(list(each.values()), dtype=np.float64).T[:, [places[layer] for layer in shape.pattern]]
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)


def _saved(priced: Inner, layer: Layer) -> float:
    """Kept of one layer, less what selective recompute drops."""
    works, layout = [priced.works[name] for name in layer], priced.layout
    kept = sum(work.saved + work.copies for work in works)
    if layout.recompute == "selective":
        kept -= sum(work.saved_parts.get(part, 0.0) for work in works for part in sorted(layout.recompute_parts))
    return kept * (1 - layout.offload_share)


def _params(works: dict[str, Work], layer: Layer) -> tuple[float, float]:
    return sum(works[name].params for name in layer), sum(works[name].expert_params for name in layer)


Pair = tuple[Floats, Floats]
"""[device, host] seconds, forward and backward."""


@dataclass(frozen=True)
class _Weights:
    """Tangents: what a layer's device and host seconds count in the forward and the backward."""

    layers: dict[Layer, Pair]
    repeat: dict[Layer, Floats]
    weight: dict[Layer, Floats]
    """Of the backward, its weight part."""
    embedding: Pair
    behind: Pair
    embedding_weight: Floats
    behind_weight: Floats
    slopes: Pair
    compute_s: tuple[float, float]

    @staticmethod
    def at_the_whole(shape: ModelShape, priced: Inner, efficiency: Efficiency) -> _Weights:
        """At the whole model."""
        factor = scales(efficiency, priced.layout.low_precision)

        def pair(total: Seconds) -> Pair:
            return _split(total.forward * factor), _split(_behind(priced, total) * factor)

        kinds = sorted(set(shape.pattern))
        layers = {kind: pair(_total(priced.seconds, kind)) for kind in kinds}
        repeat = {kind: _split(_total(priced.seconds, kind).repeat * factor) for kind in kinds}
        weight = {kind: _split(_total(priced.seconds, kind).weight * factor) for kind in kinds}
        has_vocab = 1.0 if shape.vocab else 0.0
        embedding = pair(priced.seconds["embedding"] * has_vocab)
        head = priced.seconds["head"] * (has_vocab * (1.0 + shape.mtp_layers))
        if shape.mtp_layers:
            head = head + _total(priced.seconds, shape.pattern[-1]) * shape.mtp_layers
        behind = pair(head)
        counts = Counter(shape.pattern)
        forward, backward = (
            sum((layers[kind][i] * counts[kind] for kind in kinds), embedding[i] + behind[i]) for i in (0, 1)
        )
        return _Weights(
            layers, repeat, weight, embedding, behind,
            _split(priced.seconds["embedding"].weight * (has_vocab * factor)), _split(head.weight * factor),
            (_slope(forward), _slope(backward)), (_norm(forward), _norm(backward)),
        )  # fmt: skip

    def seconds(self, pair: Pair) -> float:
        return float(pair[0] @ self.slopes[0] + pair[1] @ self.slopes[1])

    def forward_s(self, pair: Pair) -> float:
        return float(pair[0] @ self.slopes[0])

    def weight_s(self, weight: Floats) -> float:
        """At the slope of the whole backward, which is below the norm of any part of it."""
        return float(weight @ self.slopes[1])

    def again_s(self, kind: Layer) -> float:
        return float(self.repeat[kind] @ self.slopes[1])


@dataclass(frozen=True)
class Links:
    """Gathers (forward) and gathers with reductions (backward) of fully sharded storage, for one micro-batch."""

    layers: dict[Layer, tuple[float, float]]
    embedding: tuple[float, float]
    layer_bytes: float
    """Of gathered parameters in the backward of a layer."""
    whole_s: tuple[float, float]


def sharded(plain: Table, shape: ModelShape, links: Links, again: float, overlap: float) -> Table:
    """`plain` with links beside its compute. h(c, g) = max(c, g) + (1 - overlap)·min(c, g) is convex and homogeneous;
    its tangent at the whole model with a share `again` of its layers recomputed is below it everywhere. Every share
    gives a bound: gathers may be longer than the compute at 0 and shorter at 1, and the larger bound counts."""
    repeat = again * plain.again_s_per_byte * float(plain.freed_bytes[-1])
    totals = plain.compute_s[0], plain.compute_s[1] + repeat
    slopes = [(1.0, 1 - overlap) if c >= g else (1 - overlap, 1.0) for c, g in zip(totals, links.whole_s, strict=True)]
    (f_c, f_g), (b_c, b_g) = slopes
    gathers, reductions = _prefixes(shape, links.layers)
    forward = f_c * plain.forward_s + f_g * gathers
    base = forward + b_c * (plain.base_s - plain.forward_s) + b_g * reductions
    first_forward = f_c * plain.first_forward_s + f_g * links.embedding[0]
    first = first_forward + b_c * (plain.first_s - plain.first_forward_s) + b_g * links.embedding[1]
    last_forward = f_c * plain.last_forward_s
    last = last_forward + b_c * (plain.last_s - plain.last_forward_s)
    weight = b_c * plain.weight_s + b_g * (reductions - gathers)
    first_weight = b_c * plain.first_weight_s + b_g * (links.embedding[1] - links.embedding[0])
    return replace(
        plain, base_s=base, forward_s=forward, first_s=first, last_s=last, first_forward_s=first_forward,
        last_forward_s=last_forward, weight_s=weight, first_weight_s=first_weight,
        last_weight_s=b_c * plain.last_weight_s, again_s=b_c * plain.again_s,
        again_s_per_byte=b_c * plain.again_s_per_byte,
        layer_bytes=plain.layer_bytes + links.layer_bytes,
    )  # fmt: skip


def _total(seconds: dict[str, Seconds], layer: Layer) -> Seconds:
    first, *others = (seconds[name] for name in layer)
    for one in others:
        first = first + one
    return first


def _behind(priced: Inner, total: Seconds) -> Floats:
    """The backward; with the part that every layer computes again, unless recompute is by whole layers."""
    return total.backward if priced.layout.recompute == "full" else total.backward + total.repeat


def _split(vector: Floats) -> Floats:
    return np.array([vector.sum() - vector[HOST], vector[HOST]])


def norm_s(device: float, host: float) -> float:
    """Seconds of device and host together, as the estimate combines them."""
    return float((device**HOST_POWER + host**HOST_POWER) ** (1 / HOST_POWER))


def _norm(total: Floats) -> float:
    return norm_s(*total.tolist())


def _slope(total: Floats) -> Floats:
    """Gradient of the norm at `total`: what a layer's device and host seconds count, at most as much as they do."""
    norm = _norm(total)
    return np.zeros(2) if norm == 0.0 else np.asarray((total / norm) ** (HOST_POWER - 1))
