"""The best cut of one layout: all cuts where there are few, else the bound's, polished; and what that proves.

Of a cut, the least recompute that fits is tried: `exact.simulated` says what more of it could gain at most. Where
activations are offloaded, recompute makes their copies shorter: more and more is tried, which is all there is on one
stage, and proves nothing on several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from math import comb

from hpsearch.cluster.efficiency import Efficiency
from hpsearch.estimate import ParallelLayout
from hpsearch.estimate.estimate import by_rank, price
from hpsearch.estimate.memory import stage_memory
from hpsearch.estimate.stages import chunks, filled_sizes, with_again
from hpsearch.estimate.stands import in_words, rooms_of
from hpsearch.estimate.uneven import ranks_of, shares, with_shares
from hpsearch.space.exact import Choice, fits, fitted, simulated
from hpsearch.space.space import Space
from hpsearch.space.tables import Inner
from hpsearch.space.unlike import Placed

Cut = tuple[int, ...]
MOST_CUTS = 40
"""So many are all tried."""
NEAR = 1.02
"""A layout this near to the best has its cut polished."""


@dataclass(frozen=True)
class Cutting:
    """One layout of a space, its inside priced."""

    space: Space
    layout: ParallelLayout
    """With the bound's cut, and nothing recomputed by layers."""
    priced: Inner
    rates: Efficiency
    ways: tuple[Placed, ...] = ()
    """To put the stages on groups of unlike nodes, the least bound first; (): all are alike."""
    goes_on: Callable[[], bool] = lambda: True
    """Asked before each simulation but the first; with False the best so far is the answer, and nothing is proven."""

    def solved(self, best_s: float) -> tuple[Choice | None, float | None]:
        """The best found, if any fits; and seconds that no cut or recompute of this layout is below, if that is proven:
        inf where none fits. Cuts that are not near `best_s` are not polished."""
        if not self.ways:
            return self._solved(best_s)
        found, least_s = None, float("inf")
        for i, way in enumerate(self.ways):
            if way.bound_s >= best_s or (i and not self.goes_on()):
                least_s = min(least_s, way.bound_s)
                break
            made, proven_s = self.on(way)._solved(best_s)
            if proven_s is None or ranks_of(self.space.cluster, self.layout):
                proven_s = way.bound_s
            least_s = min(least_s, max(proven_s, way.bound_s))
            if made is not None and (found is None or made.step_s < found.step_s):
                found, best_s = made, min(best_s, made.step_s)
        return found, least_s

    def on(self, way: Placed) -> Cutting:
        """With its stages where `way` has them."""
        placed = replace(self.layout, stage_groups=in_words(way.stands), cut=way.cut)
        ranks = by_rank(self.priced.layout, self.space.cluster, self.priced.works, way.stands)
        return replace(self, layout=placed, priced=replace(self.priced, ranks=ranks), ways=())

    @cached_property
    def rooms(self) -> tuple[int, ...]:
        """Memory of a device of each pipeline rank, in bytes."""
        return rooms_of(self.space.cluster, self.layout)

    def _solved(self, best_s: float) -> tuple[Choice | None, float | None]:
        """Where the layout says."""
        layout, layers = self.layout, self.space.shape.layers
        if self.space.cut:
            return self._best([self.space.cut], can_prove=True)
        if layout.pp == 1 or layout.vpp > 1:
            return self._best([layout.cut], can_prove=True)
        if comb(layers - 1, layout.pp - 1) <= MOST_CUTS:
            return self._best(every_cut(layers, layout.pp), can_prove=True)
        for cut in (layout.cut, tuple(filled_sizes(self.space.shape, layout.pp)), self._packed()):
            found, _ = self._best([cut] if cut else [], can_prove=False)
            if found is not None:
                return self._polished(found) if found.step_s < best_s * NEAR else found, None
        return None, None

    def _best(self, cuts: list[Cut], can_prove: bool) -> tuple[Choice | None, float | None]:
        found, least_s = None, float("inf")
        for cut in cuts:
            if found is not None and not self.goes_on():
                return found, None
            for made in self._shared(cut):
                step_s, floor_s = simulated(self.space.shape, made, self.space.cluster, self.priced, self.rates)
                least_s = min(least_s, floor_s)
                if found is None or step_s < found.step_s:
                    found = Choice(made, step_s)
        is_least = self.priced.layout.recompute != "full" or not self.layout.offload_share
        is_proven = can_prove and (is_least or self.layout.pp == 1)
        return found, least_s if is_proven else None

    def _shared(self, cut: Cut) -> Iterator[ParallelLayout]:
        """As fitted; and with fewer micro-batches for the data ranks of slow groups, where that may be."""
        for made in self._fitted(cut):
            yield made
            ranks, cluster = ranks_of(self.space.cluster, made), self.space.cluster
            if ranks:
                alone = [cluster.among((group.name,)) for group in cluster.groups]
                plain = replace(made, stage_groups=())
                seconds = [
                    sum(float(one.sum()) for one in price(self.space.shape, plain, one).chunk_seconds(self.rates))
                    for one in alone
                ]
                counts = shares(seconds, ranks, -(-self.space.global_batch // made.micro_batch))
                yield with_shares(made, ranks, counts)

    def _fitted(self, cut: Cut) -> Iterator[ParallelLayout]:
        """With the least recompute that fits; where activations are offloaded, with more and more too."""
        layout = replace(self.layout, cut=cut)
        made = fitted(self.space.shape, layout, self.priced, self.rooms)
        if made is None:
            return
        yield made
        if not layout.offload_share or self.priced.layout.recompute != "full":
            return
        least = made.recomputed or (0,) * len(cut)
        for more in range(1, max(cut) + 1):
            again = tuple(min(size, one + more) for size, one in zip(cut, least, strict=True))
            told = replace(layout, recompute="full", recomputed=again)
            if fits(self.space.shape, told, self.priced, self.rooms):  # one layer may take more
                yield told

    def _polished(self, choice: Choice) -> Choice:
        """Moves single layers between neighbouring stages as long as the simulated step gets shorter."""
        better = True
        while better:
            better = False
            for stage in range(choice.layout.pp - 1):
                for give in (1, -1):
                    if not self.goes_on():
                        return choice
                    cut = list(choice.layout.cut)
                    cut[stage] -= give
                    cut[stage + 1] += give
                    if min(cut) < 1:
                        continue
                    other, _ = self._best([tuple(cut)], can_prove=False)
                    if other is not None and other.step_s < choice.step_s * (1 - 1e-9):
                        choice, better = other, True
        return choice

    def _packed(self) -> Cut | None:
        """Each stage with as many layers as have room there: fits if any cut does, as far as more layers take more."""
        layers, stages, ends = self.space.shape.layers, self.layout.pp, [0]
        for stage in range(stages - 1):
            low, high = ends[-1], layers - (stages - 1 - stage)
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self._fits(stage, ends, middle) else (low, middle - 1)
            if low <= stage:
                return None
            ends.append(low)
        ends.append(layers)
        for stage in range(stages - 1, 0, -1):
            ends[stage] = min(ends[stage], ends[stage + 1] - 1)
        return tuple(after - before for before, after in pairwise(ends))

    def _fits(self, stage: int, ends: list[int], end: int) -> bool:
        """Whether `stage`, behind those that end at `ends`, has room for the layers up to `end`."""
        shape, room = self.space.shape, self.rooms[stage]
        sizes = [after - before for before, after in pairwise([*ends, end])]
        cut = (*sizes, *(0,) * (self.layout.pp - len(sizes) - 1), shape.layers - end)
        plain = replace(self.layout, cut=cut, recomputed=())
        chunk = chunks(shape, plain)[stage]
        ways = [(plain, chunk)]
        if self.priced.layout.recompute == "full" and chunk.layers:
            again = with_again(shape, chunk, ends[-1], chunk.layers)
            ways.append((replace(plain, recompute="full"), again))
        return any(stage_memory(shape, how, stage, (one,), self.priced.works).peak_bytes <= room for how, one in ways)


def every_cut(layers: int, stages: int) -> list[Cut]:
    """Into stages of at least one layer each."""
    ends = ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))
    return [tuple(after - before for before, after in pairwise(one)) for one in ends]
