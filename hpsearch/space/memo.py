"""Blocks priced once for all insides that they are alike in: attention does not know experts, experts no sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency
from hpsearch.estimate.estimate import one_block
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.price import HOST, Floats, Seconds, recomputed, scales
from hpsearch.estimate.shape import ModelShape, kind_of
from hpsearch.estimate.work import Work
from hpsearch.space.tables import Inner, norm_s

Sums = tuple[float, float, float, float]
"""Device and host seconds, forward and backward."""


@dataclass
class Memo:
    shape: ModelShape
    cluster: Cluster
    rates: Efficiency
    plain: dict[tuple[object, ...], tuple[Work, Seconds]] = field(default_factory=dict)
    blocks: dict[tuple[object, ...], tuple[Work, Seconds, Sums]] = field(default_factory=dict)
    """With the recompute of the layout."""

    def inner(self, layout: ParallelLayout) -> tuple[Inner, float]:
        """The priced inside, and the seconds of one micro-batch through the whole model at least."""
        found = {name: self._block(name, layout) for name in (*sorted(self.shape.counts), "head", "embedding")}
        counts = {**self.shape.counts, **({"head": 1, "embedding": 1} if self.shape.vocab else {})}
        sums = [sum(found[name][2][i] * count for name, count in counts.items()) for i in range(4)]
        works = {name: work for name, (work, _, _) in found.items()}
        seconds = {name: one for name, (_, one, _) in found.items()}
        return Inner(layout, works, seconds), norm_s(sums[0], sums[1]) + norm_s(sums[2], sums[3])

    def _block(self, name: str, layout: ParallelLayout) -> tuple[Work, Seconds, Sums]:
        alike = self._alike(name, layout)
        key = (*alike, layout.recompute, layout.recompute_parts)
        if key not in self.blocks:
            if alike not in self.plain:
                self.plain[alike] = one_block(name, self.shape, layout, self.cluster)
            work, one = self.plain[alike]
            one = recomputed({name: work}, {name: one}, layout, self.cluster)[name]
            factor = scales(self.rates, layout.low_precision)
            behind = one.backward if layout.recompute == "full" else one.backward + one.repeat
            self.blocks[key] = work, one, (*_split(one.forward * factor), *_split(behind * factor))
        return self.blocks[key]

    def _alike(self, name: str, layout: ParallelLayout) -> tuple[object, ...]:
        """What the block's price depends on."""
        kind = kind_of(name)
        if kind == "attention":
            return name, layout.tp, layout.sp, layout.cp, layout.cp_kind, layout.micro_batch
        own = self.shape.of(name).tokens if name in self.shape.counts else 0
        tokens = (layout.micro_batch, layout.cp) if own or kind == "mamba" else layout.tokens
        experts = (layout.ep, layout.etp) if kind == "moe" else ()
        return name, layout.tp, layout.sp, tokens, experts


def _split(vector: Floats) -> tuple[float, float]:
    return float(vector.sum() - vector[HOST]), float(vector[HOST])
