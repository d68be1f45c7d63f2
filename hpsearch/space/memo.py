"""Blocks priced once for all insides that they are alike in: attention does not know experts, experts no sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency
from hpsearch.estimate.estimate import HOST_POWER, one_block
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.price import (
    CORE,
    HOST,
    LINEAR,
    PLAIN,
    ROUTED,
    Floats,
    Seconds,
    rate_over_16_bit,
    recomputed,
    scales,
)  # fmt: skip
from hpsearch.estimate.shape import Layer, ModelShape, kind_of
from hpsearch.estimate.work import Work
from hpsearch.space.space import Inside, Slot
from hpsearch.space.tables import Inner


@dataclass(frozen=True)
class Wholes:
    """Of every inside of a slot; arrays are [experts, kinds, recomputes], or 1 in place of what makes no difference."""

    both_s: Floats
    """[..., 2]: one micro-batch through the whole model at least, forward and backward, neither links of full sharding
    nor recompute by layers."""
    layer_s: Floats
    """Through a layer at least."""
    way_s: Floats
    """Through a layer and back at least, parts of the backward left out that nothing waits for."""
    counts: tuple[int, ...]
    """Of each kind of layer, how many there are."""
    dense: Floats
    """[kinds of layers, experts] parameters of one on one device."""
    expert: Floats
    kept: Floats
    """[kinds of layers, experts, kinds, recomputes] bytes of one from forward to backward at least."""


@dataclass(frozen=True)
class _Block:
    """One kind of block, for all recomputes of a slot."""

    work: Work
    seconds: Floats
    """[recomputes, 4]: device and host seconds, forward and backward."""
    weight: tuple[float, float]
    """Device and host seconds of the backward that no other stage waits for."""
    kept: Floats
    """[recomputes] bytes; all of them where layers are computed again."""


@dataclass
class Memo:
    shape: ModelShape
    cluster: Cluster
    rates: Efficiency
    base: ParallelLayout
    """Switches."""
    plain: dict[tuple[object, ...], tuple[Work, Seconds]] = field(default_factory=dict)
    blocks: dict[tuple[object, ...], _Block] = field(default_factory=dict)
    templates: dict[str, ParallelLayout] = field(default_factory=dict)

    def inner(self, inside: Inside) -> Inner:
        """The priced inside."""
        layout, slot = inside.layout(self.base), Slot.of(inside)
        found = {name: self._plain(name, slot, 0) for name in (*sorted(self.shape.counts), "head", "embedding")}
        works = {name: work for name, (work, _) in found.items()}
        return Inner(
            layout, works, recomputed(works, {name: one for name, (_, one) in found.items()}, layout, self.cluster)
        )

    def wholes(self, slot: Slot, below_s: float = np.inf) -> Wholes | None:
        """All insides of a slot at once; None once some blocks say that no inside is below so many seconds for a
        micro-batch."""
        counts = Counter(self.shape.counts) + Counter({"head": 1, "embedding": 1} if self.shape.vocab else {})
        shares = {name: slot.micro_batch / (slot.tp * slot.cp) * floor for name, floor in self.floors.items()}
        parts: dict[str, Floats] = {}
        for name in sorted(counts, key=lambda name: (ORDER.index(kind_of(name)), name)):
            parts[name] = self._sums(name, slot)
            shares.pop(name)
            total = _total({one: part * counts[one] for one, part in parts.items()})
            others = sum(share * counts[one] for one, share in shares.items())
            if max(float(_norm(total).min()), float(total[..., ::2].sum(axis=-1).min()) + others) >= below_s:
                return None
        layers = [_total({name: parts[name] for name in kind}) for kind in self.layers]
        least = np.min(np.broadcast_arrays(*layers), axis=0)
        ways = [layer - self._weight(kind, slot) for kind, layer in zip(self.layers, layers, strict=True)]
        way = _norm(np.maximum(np.min(np.broadcast_arrays(*ways), axis=0), 0.0))
        size = (len(slot.experts), len(slot.kinds), len(slot.recomputes))
        return Wholes(
            np.broadcast_to(_norms(total), (*size, 2)), np.broadcast_to(_norm(least), size), np.broadcast_to(way, size),
            tuple(self.layers.values()), self._params("params", slot), self._params("expert_params", slot),
            np.array([self._kept(kind, slot) for kind in self.layers]),
        )  # fmt: skip

    def _weight(self, layer: Layer, slot: Slot) -> Floats:
        """[experts, 1, 1, 4] of one layer: of the weight part, beside a forward without one."""
        each = [[(0.0, 0.0, *self._block(name, slot, 0, e).weight) for name in layer] for e in range(len(slot.experts))]
        return np.asarray(np.array(each).sum(axis=1).reshape(-1, 1, 1, 4))

    def _params(self, which: str, slot: Slot) -> Floats:
        """[kinds of layers, experts] on one device."""
        experts = range(len(slot.experts))
        each = [[[getattr(self._block(name, slot, 0, e).work, which) for name in kind] for e in experts]
                for kind in self.layers]  # fmt: skip
        return np.array([[sum(one) for one in kind] for kind in each])

    @cached_property
    def layers(self) -> dict[Layer, int]:
        """Kinds of layers, and how many there are of each."""
        return dict(sorted(Counter(self.shape.pattern).items()))

    @cached_property
    def floors(self) -> dict[str, float]:
        """Of each block, seconds of one row of the batch at least, wherever and however it is computed, if all devices
        shared one perfectly: its products at the rate of the fastest, and attention's core."""
        slot = Slot(1, False, 1, 1, ("ring",), ((1, 1),), ("full",))
        behind = ("head", "embedding") if self.shape.vocab else ()
        return {name: self._floor_s(self._plain(name, slot, 0)[0]) for name in (*sorted(self.shape.counts), *behind)}

    def _floor_s(self, work: Work) -> float:
        device, base, factor = self.cluster.device, self.base, scales(self.rates, self.base.low_precision)
        rate, seconds = device.fastest_matmul(device.sixteen), 0.0
        for kind, products in ((LINEAR, work.linears), (PLAIN, work.plains), (ROUTED, work.grouped)):
            both_ways = 2.0 if base.lora and kind != PLAIN else 3.0
            over = 1.0 if kind == PLAIN else rate_over_16_bit(base, self.cluster, kind)
            seconds += both_ways * factor[kind] * sum(2 * m * n * k * b for m, n, k, b in products) / (rate * over)
        if base.flash and work.core_flops:
            once = device.attention_s(work.core_flops / base.flash_rate, 0.0, device.sixteen) - device.launch_s
            seconds += 3.5 * factor[CORE] * float(once)
        return float(seconds)

    def _sums(self, name: str, slot: Slot) -> Floats:
        """[experts or 1, kinds or 1, recomputes, 4] of a block."""
        experts = range(len(slot.experts) if kind_of(name) == "moe" else 1)
        kinds = range(len(slot.kinds) if kind_of(name) == "attention" else 1)
        return np.array([[self._block(name, slot, kind, e).seconds for kind in kinds] for e in experts])

    def _kept(self, layer: Layer, slot: Slot) -> Floats:
        """[experts, kinds, recomputes] bytes of one layer at least. Code that is not fused keeps less where storage is
        fully sharded, and is not looked at."""
        size = (len(slot.experts), len(slot.kinds), len(slot.recomputes))
        found = np.zeros(size)
        if not self.base.fused:
            return found
        for name in layer:
            experts = range(len(slot.experts) if kind_of(name) == "moe" else 1)
            kinds = range(len(slot.kinds) if kind_of(name) == "attention" else 1)
            found = found + np.array([[self._block(name, slot, kind, e).kept for kind in kinds] for e in experts])
        whole = np.array([one == "full" for one in slot.recomputes])
        rows = self.base.seq_len * slot.micro_batch / (slot.cp * (slot.tp if slot.sp else 1))
        entry = 2.0 * self.shape.hidden * rows * (1 - self.base.offload_share)
        return np.where(whole, np.minimum(found, entry), found)

    def _block(self, name: str, slot: Slot, kind: int, experts: int) -> _Block:
        alike = (*self._alike(name, slot, kind, experts), slot.recomputes)
        if alike not in self.blocks:
            work, plain = self._plain(name, slot, self._number(slot, kind, experts))
            rows, kept = [], []
            for q in range(len(slot.recomputes)):
                layout = self._template(slot.recomputes[q])
                one = recomputed({name: work}, {name: plain}, layout, self.cluster)[name]
                factor = scales(self.rates, layout.low_precision)
                behind = one.backward if layout.recompute == "full" else one.backward + one.repeat
                rows.append((*_split(one.forward * factor), *_split(behind * factor)))
                kept.append(_kept_bytes(work, layout))
            self.blocks[alike] = _Block(work, np.array(rows), _split(plain.weight * factor), np.array(kept))
        return self.blocks[alike]

    def works(self, slot: Slot, experts: int) -> dict[str, Work]:
        """Of the blocks of layers."""
        return {name: self._block(name, slot, 0, experts).work for name in sorted(self.shape.counts)}

    def _template(self, recompute: str) -> ParallelLayout:
        """Any layout with this recompute."""
        if recompute not in self.templates:
            self.templates[recompute] = Inside(1, False, 1, "ring", 1, 1, 1, recompute).layout(self.base)
        return self.templates[recompute]

    def _plain(self, name: str, slot: Slot, number: int) -> tuple[Work, Seconds]:
        each = len(slot.kinds) * len(slot.recomputes)
        alike = self._alike(name, slot, number % each // len(slot.recomputes), number // each)
        if alike not in self.plain:
            layout = slot.inside(number).layout(self.base)
            self.plain[alike] = one_block(name, self.shape, layout, self.cluster)
        return self.plain[alike]

    def _number(self, slot: Slot, kind: int, experts: int) -> int:
        return (experts * len(slot.kinds) + kind) * len(slot.recomputes)

    def _alike(self, name: str, slot: Slot, kind: int, experts: int) -> tuple[object, ...]:
        """What the block's price depends on."""
        what = kind_of(name)
        if what == "attention":
            return name, slot.tp, slot.sp, slot.cp, slot.kinds[kind], slot.micro_batch
        own = self.shape.of(name).tokens if name in self.shape.counts else 0
        tokens = (slot.micro_batch, slot.cp) if own or what == "mamba" else slot.micro_batch / slot.cp
        return name, slot.tp, slot.sp, tokens, slot.experts[experts] if what == "moe" else ()


ORDER = ("embedding", "head", "mlp", "mamba", "attention", "moe")
"""Blocks that more insides have in common first."""


def _split(vector: Floats) -> tuple[float, float]:
    return float(vector.sum() - vector[HOST]), float(vector[HOST])


def _kept_bytes(work: Work, layout: ParallelLayout) -> float:
    """From forward to backward, less what selective recompute drops."""
    dropped = sorted(layout.recompute_parts) if layout.recompute == "selective" else []
    kept = work.saved + work.copies - sum(work.saved_parts.get(part, 0.0) for part in dropped)
    return kept * (1 - layout.offload_share)


def _total(parts: dict[str, Floats]) -> Floats:
    return sum(parts.values(), np.zeros((1, 1, 1, 4)))


def _norm(sums: Floats) -> Floats:
    """[…] seconds of […, 4] device and host seconds, forward and backward."""
    return np.asarray(_norms(sums).sum(axis=-1))


def _norms(sums: Floats) -> Floats:
    """[…, 2] seconds of the same, both ways apart."""
    device, host = sums[..., ::2], sums[..., 1::2]
    return np.asarray((device**HOST_POWER + host**HOST_POWER) ** (1 / HOST_POWER))
