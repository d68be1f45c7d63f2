"""A look at memory before the bound of each pipeline: layouts of all pipelines at once, one rank or the average one.

Of several chunks a rank, the layers of the first and of the last rank are known, and so is the least that each computes
again. The first has as many alive as any; the last, p - 1, begins behind the forwards of the chunks before it, and its
last input part (a whole backward) is followed by those of the same chunks, so that

    sum_{i<p-1} (f_i + i_i)  +  m·t_{p-1}  -  (weight parts that may come later)  +  2·(p - 1)·hop

Where a stage may have any layers, all ranks together have to hold all layers: under gpipe each of them m times; under
zb-h1 stage s keeps p - 1 - s times what a backward reads and s + 1 times what a weight part reads, so that every layer
is there once for weight parts and p - 1 times for the smaller of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate.parallel import AS_RUN
from hpsearch.schedule import KINDS
from hpsearch.schedule.alive import surely_alive
from hpsearch.space.bound import SCALARS, Stacked, in_flight
from hpsearch.space.tables import PREFIXES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Pipeline = tuple[str, int, int]
"""Schedule, stages, chunks of each."""


@dataclass(frozen=True)
class Looks:
    """Layouts, one entry each."""

    tables: Stacked
    table: Ints
    """Which table."""
    pipelines: tuple[Pipeline, ...]
    pipeline: Ints
    """Which pipeline."""
    micro_batches: Floats
    hop_s: Floats
    room_bytes: Floats
    per_dense: Floats
    per_expert: Floats

    def told(self, values: list[float]) -> Floats:
        """Of each layout's pipeline, given those of each pipeline."""
        return np.array(values, dtype=np.float64)[self.pipeline]

    def has(self, *kinds: str) -> NDArray[np.bool_]:
        """Whether the schedule is one of these."""
        return np.array([kind in kinds for kind, _, _ in self.pipelines], dtype=np.bool_)[self.pipeline]

    @property
    def stages(self) -> Floats:
        return self.told([float(stages) for _, stages, _ in self.pipelines])

    def of(self, some: Ints) -> Looks:
        """Some of them."""
        columns = (self.micro_batches, self.hop_s, self.room_bytes, self.per_dense, self.per_expert)
        rest = (column[some] for column in columns)
        return Looks(self.tables, self.table[some], self.pipelines, self.pipeline[some], *rest)

    def column(self, name: str) -> Floats:
        return np.asarray(self.tables.scalars[self.table, SCALARS.index(name)])

    def prefixes(self, name: str) -> Floats:
        return self.tables.prefixes[:, :, PREFIXES.index(name)]


def rough_s(looks: Looks, sizes: dict[int, list[int]]) -> Floats:
    """Pipeline seconds at least; inf: does not fit. 0 of 1f1b. `sizes`: layers of each chunk, by number of chunks."""
    found = np.zeros(len(looks.table))
    many, other = looks.told([virtual for _, _, virtual in looks.pipelines]) > 1, looks.has("gpipe", "zb-h1")
    if many.any():
        some = np.flatnonzero(many)
        part = looks.of(some)
        found[some] = np.maximum(_one_rank(part, sizes, is_last=False), _one_rank(part, sizes, is_last=True))
    if other.any():
        found[other] = _average_rank(looks.of(np.flatnonzero(other)))
    return found


@dataclass(frozen=True)
class _Pieces:
    """Chunks of one rank, [layouts, chunks] each; none are of no layers."""

    starts: Ints
    ends: Ints
    kept: Floats
    owed: Floats
    before: Ints
    """[layouts] layers of the chunks before the last rank's first."""
    later: Floats
    """[layouts] weight parts that may come behind the rank's last input part."""

    def held(self, values: Floats, table: Ints) -> Floats:
        return np.asarray(values[table[:, None], self.ends] - values[table[:, None], self.starts])


def _pieces(looks: Looks, sizes: dict[int, list[int]], is_last: bool) -> _Pieces:
    ends_of = {chunks: np.cumsum([0, *one]) for chunks, one in sizes.items()}
    count, most = len(looks.table), max(looks.pipelines[i][2] for i in np.unique(looks.pipeline).tolist())
    starts, ends = (np.zeros((count, most), dtype=np.int64) for _ in range(2))
    kept, owed = (np.zeros((count, most)) for _ in range(2))
    before, later = np.zeros(count, dtype=np.int64), np.zeros(count)
    order = np.argsort(looks.pipeline, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(looks.pipeline[order])) + 1):
        kind, p, v = looks.pipelines[looks.pipeline[members[0]]]
        rank = p - 1 if is_last else 0
        chunks = [rank, 2 * p - 1 - rank] if KINDS[kind].vee else [rank + chunk * p for chunk in range(v)]
        cuts, m = ends_of[p * v], looks.micro_batches[members]
        starts[members, :v], ends[members, :v] = cuts[chunks], cuts[[chunk + 1 for chunk in chunks]]
        before[members] = cuts[p - 1]
        if kind in AS_RUN:
            kept[members, :v] = (in_flight(p, v, m, rank) / v)[:, None]
        else:
            _, alive = surely_alive(kind, p, v, rank, m)
            kept[members, :v], owed[members, :v] = alive[:v].T, alive[v:].T
            later[members] = np.minimum(p if kind == "interleaved-zb" else 2 * p, v * m)
    return _Pieces(starts, ends, kept, owed, before, later)


def _one_rank(looks: Looks, sizes: dict[int, list[int]], is_last: bool) -> Floats:
    pieces, k, m = _pieces(looks, sizes, is_last), looks.table, looks.micro_batches
    is_vee, is_split = (looks.has(*(name for name, kind in KINDS.items() if getattr(kind, how)))
                        for how in ("vee", "split"))  # fmt: skip
    first, last = (np.zeros_like(is_vee), ~is_vee) if is_last else (np.ones_like(is_vee), is_vee)
    ends_dense = np.where(first & last, looks.column("both_dense"), 0.0)
    ends_dense += np.where(first & ~last, looks.column("first_dense"), 0.0)
    ends_dense += np.where(last & ~first, looks.column("last_dense"), 0.0)
    dense, expert, saved, owed, freed, base, weight = (
        pieces.held(looks.prefixes(name), k)
        for name in ("dense", "expert", "saved_bytes", "owed_bytes", "freed_bytes", "base_s", "weight_s")
    )
    states = (dense.sum(axis=1) + ends_dense) * looks.per_dense + expert.sum(axis=1) * looks.per_expert
    alive_bytes = (pieces.kept * saved + pieces.owed * owed).sum(axis=1)
    excess = np.maximum(states + alive_bytes + _fixed(looks) - looks.room_bytes, 0.0)
    fits = excess <= (pieces.kept * freed).sum(axis=1) * (1 + 1e-9)
    seconds = base.sum(axis=1) + looks.column("first_s") * first + looks.column("last_s") * last
    again = looks.column("again_s_per_byte") * excess / np.maximum(pieces.kept.max(axis=1), 1e-9)
    pipe = m * (seconds + again)
    if is_last:
        way = looks.prefixes("base_s")[k, pieces.before] + looks.column("first_s")
        parts = looks.prefixes("weight_s")[k, pieces.before] + looks.column("first_weight_s")
        largest = weight.max(axis=1) + looks.column("last_weight_s") * last
        fill = way - np.where(is_split, parts + pieces.later * largest, 0.0)
        pipe = pipe + fill + 2 * (looks.stages - 1) * looks.hop_s
    return np.where(fits, pipe, np.inf)


def _average_rank(looks: Looks) -> Floats:
    k, m = looks.table, looks.micro_batches
    p = looks.stages
    is_split = looks.has("zb-h1")
    saved, owed = (np.diff(looks.prefixes(name), axis=1) for name in ("saved_bytes", "owed_bytes"))
    smaller = np.minimum(saved, owed).sum(axis=1)[k]
    alive_bytes = np.where(is_split, owed.sum(axis=1)[k] + (p - 1) * smaller, m * saved.sum(axis=1)[k])
    dense = looks.prefixes("dense")[k, -1] + looks.column("first_dense") + looks.column("last_dense")
    states = dense * looks.per_dense + looks.prefixes("expert")[k, -1] * looks.per_expert
    excess = np.maximum(states + alive_bytes - p * (looks.room_bytes - _fixed(looks)), 0.0)
    alive = np.where(is_split, p, m)
    fits = excess <= alive * looks.prefixes("freed_bytes")[k, -1] * (1 + 1e-9)
    seconds = looks.column("total_s") + looks.column("again_s_per_byte") * excess / alive
    return np.where(fits, m * seconds / p, np.inf)


def _fixed(looks: Looks) -> Floats:
    """Of every rank in the backward of a layer."""
    return looks.column("layer_bytes") + looks.column("exchange_bytes") + 4 * looks.column("hop_bytes")
