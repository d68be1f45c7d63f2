"""Lower bounds of the seconds of many layouts at once, over every cut of the layers and every choice of recompute.

With chunk times t_s = f_s + b_s on stage s, a 1F1B pipeline of m micro-batches on p stages takes at least, for every s,

    sum_{i<s} t_i  +  m·t_s  +  2·s·hop                                                     (1)
    sum_i t_i  +  (m - 1 - d_s)·f_s  +  (m - 1)·b_s  +  2·(p - 1)·hop,     d_s = p - 1 - s     (2)
    sum_{i<s} t_i  +  (m - d_s)·t_s  +  2·sum_{i>s} t_i  +  2·(s + 2·d_s)·hop,  m > d_s + 1     (3)

(1) is the first micro-batch's way to s, all work of s, the last one's way back; (2) the first micro-batch's way through
all stages and back to s, what s has not done by then, the last one's way back; (3) the same with the last one's way
through the later stages too, for which s does less between. And t_s is at least

    base(layers of s)  +  rho·(bytes that do not fit) / (micro-batches in flight on s)

rho being the least seconds of recompute for a byte freed. GPipe takes at least what (1) says and

    sum_i t_i  +  (m - 1)·t_s  +  2·(p - 1)·hop                                             (4)

(all forwards go on to the last stage, where the first backward starts behind them). ZB-H1, with f, i, w of a forward,
an input part and a weight part, and stage s doing its weight parts s micro-batches late:

    sum_{i<s} f_i  +  m·t_s  +  s·hop                                                       (5)
    sum_{i<s} (f_i + i_i)  +  m·t_s  -  (1 + s)·w_s  +  w_0  +  2·s·hop                       (6)
    sum_i f_i  +  sum_{i>s} i_i  +  m·t_s  -  (p - s)·f_s  +  (2·(p - 1) - s)·hop             (7)

(5) all that s does from its first forward on; (6) the same up to the last input part, and that micro-batch's way back;
(7) the first micro-batch's way through all stages and back to s, and what s has not done by then.

`least_s` finds the smallest L under which the layers can be dealt out with every stage within L. Giving the first
stages as many layers as they may have is best: a stage that starts later has its own layers' seconds less to do, and at
most 1/m of them less time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate.parallel import AS_RUN
from hpsearch.schedule import KINDS, placement
from hpsearch.schedule.alive import surely_alive
from hpsearch.schedule.bound import chains
from hpsearch.space.tables import PREFIXES, Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PRECISION = 5e-4
"""How far below the least limit the bound may stay."""
WIDER = 1.2
"""Factor from one limit to the next while the bound is far away: most lie little above the one without memory."""
WHOLE = ("1f1b", "gpipe")
"""Schedules of one chunk a rank whose last backward goes all the way back."""


SCALARS = (
    "first_s", "last_s", "again_s_per_byte", "first_forward_s", "last_forward_s", "first_weight_s", "last_weight_s",
    "first_dense", "last_dense", "both_dense", "loss_bytes", "layer_bytes", "exchange_bytes", "hop_bytes", "total_s",
)  # fmt: skip


@dataclass(frozen=True)
class Stacked:
    """Tables side by side."""

    prefixes: Floats
    """[tables, layers + 1, PREFIXES]."""
    scalars: Floats
    """[tables, SCALARS and shares]."""
    is_uniform: bool

    @staticmethod
    def of(tables: tuple[Table, ...]) -> Stacked:
        prefixes = np.stack([one.prefixes for one in tables])
        scalars = np.array([[*(getattr(one, name) for name in SCALARS), *one.shares] for one in tables])
        return Stacked(prefixes, scalars, all(one.is_uniform for one in tables))


@dataclass(frozen=True)
class Pipes:
    """Layouts of one number of stages and one schedule, one entry each."""

    tables: tuple[Table, ...]
    table: Ints
    """Which table."""
    stages: int
    micro_batches: Floats
    hop_s: Floats
    room_bytes: Floats
    """For states, activations and buffers, on one device."""
    per_dense: Floats
    """State bytes of one parameter."""
    per_expert: Floats
    virtual: int = 1
    kind: str = "1f1b"
    """Of the schedule."""
    more: Mapping[int, Floats] = field(default_factory=dict)
    """Chains of the schedule's text that were found to be the longest for some times; by number of micro-batches."""

    def of(self, some: Ints) -> Pipes:
        """Some of them."""
        columns = (self.micro_batches, self.hop_s, self.room_bytes, self.per_dense, self.per_expert)
        m, hop_s, room, dense, expert = (column[some] for column in columns)
        return Pipes(
            self.tables, self.table[some], self.stages, m, hop_s, room, dense, expert, self.virtual, self.kind,
            self.more,
        )  # fmt: skip


@dataclass(frozen=True)
class Bounds:
    pipe_s: Floats
    """inf: does not fit, however cut and recomputed."""
    cuts: Ints
    """[layouts, stages]: layers of each stage in the cut that reaches the bound."""


def in_flight(stages: int, virtual: int, micro_batches: Floats, stage: Ints | int) -> Floats:
    """Chunk activations alive at once on a pipeline rank, as `estimate.memory.in_flight` counts them."""
    if stages == 1:
        return np.full_like(micro_batches, float(virtual))
    if virtual == 1:
        return np.minimum(micro_batches, stages - stage)
    return np.minimum(micro_batches * virtual, 2 * (stages - stage - 1) + (virtual - 1) * stages + 1)


def without_memory_s(whole_s: Floats | float, micro_batches: Floats, stages: Floats | int) -> Floats:
    """Least L with base times that add up to `whole_s`: t_s = (L - sum of those before)/m leaves (1 - 1/m)^p of L."""
    return np.asarray(whole_s / (1 - (1 - 1 / micro_batches) ** stages))


def even_s(pipes: Pipes, sizes: list[int], cutoff_s: Floats) -> Floats:
    """The bound of layouts of several chunks a rank, which have these `sizes`; inf where it is above the cutoff.

    At least what every rank has to do; and the longest of the schedule room's chains with base times, on which what
    recompute adds to a rank lies as often as the rank's chunk that lies there least.
    """
    stands = np.array(placement(pipes.kind, pipes.stages, pipes.virtual))
    mine = np.argsort(stands, kind="stable").reshape(pipes.stages, pipes.virtual)
    stacked = Stacked.of(pipes.tables)
    chunks = np.diff(stacked.prefixes[:, np.cumsum([0, *sizes])], axis=1)[pipes.table]
    held = _Held(pipes, chunks, stacked.scalars[pipes.table])
    ranks = held.ranks_s(mine)
    found = pipes.micro_batches * ranks.max(axis=1)
    # As many micro-batches as ranks, interleaved: frameworks run all forwards first, which is another schedule.
    is_text = pipes.micro_batches > (pipes.stages if pipes.kind == "interleaved" else 0)
    some = np.flatnonzero((found < cutoff_s) & is_text)
    if len(some):
        found[some] = np.maximum(found[some], held.of(some).on_chains(ranks[some], mine))
    return np.where(found < cutoff_s, found, np.inf)


@dataclass(frozen=True)
class _Held:
    """What the chunks of some layouts have."""

    pipes: Pipes
    chunks: Floats
    """[layouts, chunks, PREFIXES]."""
    scalars: Floats
    """[layouts, SCALARS and shares]."""

    def of(self, some: Ints) -> _Held:
        return _Held(self.pipes.of(some), self.chunks[some], self.scalars[some])

    def column(self, name: str) -> Floats:
        return np.asarray(self.scalars[:, SCALARS.index(name)])

    def ranks_s(self, mine: Ints) -> Floats:
        """[layouts, ranks]: least seconds of one micro-batch on each, with the chunks `mine` [ranks, virtual]; inf if
        they do not fit even recomputed."""
        pipes, last = self.pipes, 0 if KINDS[self.pipes.kind].vee else self.pipes.stages - 1
        base, saved, freed, dense, expert, owed = np.moveaxis(self.chunks[:, mine, :6], -1, 0)
        seconds, params = base.sum(axis=-1), dense.sum(axis=-1)
        seconds[:, 0] += self.column("first_s")
        seconds[:, last] += self.column("last_s")
        if last == 0:
            params[:, 0] += self.column("both_dense")
        else:
            params[:, 0] += self.column("first_dense")
            params[:, last] += self.column("last_dense")
        fixed = self.column("exchange_bytes") + (4 * self.column("hop_bytes") if pipes.stages > 1 else 0.0)
        states = params * pipes.per_dense[:, None] + expert.sum(axis=-1) * pipes.per_expert[:, None]
        states += (fixed - pipes.room_bytes)[:, None]
        found: Floats = np.zeros_like(seconds)
        for kept, left, moment, ranks in self._moments(last):
            alive = (saved[:, ranks] * kept + owed[:, ranks] * left).sum(axis=-1)
            excess = np.maximum(states[:, ranks] + alive + moment, 0.0)
            fits = excess <= (freed[:, ranks] * kept).sum(axis=-1) * (1 + 1e-9)
            again = self.column("again_s_per_byte")[:, None] * excess / np.maximum(kept.max(axis=-1), 1e-9)
            found[:, ranks] = np.maximum(found[:, ranks], np.where(fits, seconds[:, ranks] + again, np.inf))
        return found

    def _moments(self, last: int) -> Iterator[tuple[Floats, Floats, Floats, slice]]:
        """Forwards that keep what a backward reads, and input parts that keep what a weight part reads, [layouts,
        ranks, virtual] each; bytes beside them [layouts, ranks]; which ranks: all in a backward, and the last after a
        forward."""
        pipes, p, v, m = self.pipes, self.pipes.stages, self.pipes.virtual, self.pipes.micro_batches
        loss, layer, every = self.column("loss_bytes"), self.column("layer_bytes"), slice(0, p)
        moment = np.repeat(layer[:, None], p, axis=1)
        if pipes.kind in AS_RUN:
            moment[:, last] = np.maximum(layer, loss)
            kept = np.repeat(in_flight(p, v, m[:, None], np.arange(p))[..., None] / v, v, axis=-1)
            yield kept, np.zeros_like(kept), moment, every
            return
        after, within = (np.moveaxis(one, 0, -1) for one in surely_alive(pipes.kind, p, v, np.arange(p), m[:, None]))
        yield within[..., :v], within[..., v:], moment, every
        here = after[:, last : last + 1]
        yield here[..., :v], here[..., v:], (loss * here[:, 0, v - 1])[:, None], slice(last, last + 1)

    def on_chains(self, ranks: Floats, mine: Ints) -> Floats:
        """[layouts]: the longest chain; `ranks`: of `ranks_s`."""
        pipes, found = self.pipes, np.zeros(len(self.pipes.table))
        forward, both = (self._ways(name) for name in ("forward", "base"))
        weight = self._ways("weight") if KINDS[pipes.kind].split else np.zeros_like(both)
        again, count = ranks - both[:, mine].sum(axis=-1), both.shape[1]
        hops = np.repeat(pipes.hop_s[:, None], count - 1, axis=1)
        times = np.hstack([forward, both - forward - weight, weight, hops])
        for m in np.unique(pipes.micro_batches).tolist():
            some = pipes.micro_batches == m
            counts = chains(pipes.kind, pipes.stages, pipes.virtual, int(m))
            if m in pipes.more:
                counts = np.concatenate([counts, pipes.more[m]])
            rarest = counts[:, count + mine].min(axis=-1)
            found[some] = (times[some] @ counts.T + again[some] @ rarest.T).max(axis=1)
        return found * (1 - 1e-9)

    def _ways(self, which: str) -> Floats:
        """[layouts, chunks] seconds of one micro-batch: the forward, the weight part, or (base) both ways."""
        found = np.array(self.chunks[..., PREFIXES.index(f"{which}_s")])
        middle = "" if which == "base" else f"{which}_"
        found[:, 0] += self.column(f"first_{middle}s")
        found[:, -1] += self.column(f"last_{middle}s")
        return found
