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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate.parallel import AS_RUN
from hpsearch.schedule import KINDS, placement
from hpsearch.schedule.alive import surely_alive
from hpsearch.schedule.bound import chains
from hpsearch.space.tables import ROUNDED, Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PRECISION = 5e-4
"""How far below the least limit the bound may stay."""
WIDER = 1.2
"""Factor from one limit to the next while the bound is far away: most lie little above the one without memory."""
LONGEST = 8.0
"""Times the bound without memory: what takes longer is said not to fit."""

WHOLE = ("1f1b", "gpipe")
"""Schedules of one chunk a rank whose last backward goes all the way back."""


PREFIXES = ("base_s", "saved_bytes", "freed_bytes", "dense", "expert", "owed_bytes", "forward_s", "weight_s")
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
        prefixes = np.array([[getattr(one, name) for name in PREFIXES] for one in tables]).transpose(0, 2, 1)
        scalars = np.array([[*(getattr(one, name) for name in SCALARS), *one.shares] for one in tables])
        return Stacked(np.ascontiguousarray(prefixes), scalars, all(one.is_uniform for one in tables))


@dataclass(frozen=True)
class Pipes:
    """Layouts of one number of stages, one entry each."""

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
    stacked: Stacked | None = None
    """The tables, where they are at hand."""

    def of(self, some: Ints) -> Pipes:
        """Some of them."""
        columns = (self.micro_batches, self.hop_s, self.room_bytes, self.per_dense, self.per_expert)
        m, hop_s, room, dense, expert = (column[some] for column in columns)
        return Pipes(
            self.tables, self.table[some], self.stages, m, hop_s, room, dense, expert, self.virtual, self.kind,
            self.stacked,
        )  # fmt: skip

    def alive(self, rank: int) -> list[tuple[Floats, Floats, bool]]:
        """Moments of a rank: forwards that keep what a backward reads, and input parts that keep what a weight part
        reads, [chunks, layouts] each; and whether it is the moment after a forward."""
        m, v = self.micro_batches, self.virtual
        if self.kind in AS_RUN:
            each = np.broadcast_to(in_flight(self.stages, v, m, rank) / v, (v, len(m)))
            return [(each, np.zeros_like(each), False)]
        after_forward, in_backward = surely_alive(self.kind, self.stages, v, rank, m)
        return [(in_backward[:v], in_backward[v:], False), (after_forward[:v], after_forward[v:], True)]


@dataclass(frozen=True)
class Bounds:
    pipe_s: Floats
    """inf: does not fit, however cut and recomputed."""
    cuts: Ints
    """[layouts, stages]: layers of each stage in the cut that reaches the bound."""


class _Stack:
    """Tables side by side: value of table k before layer l as one lookup."""

    def __init__(self, pipes: Pipes) -> None:
        held = pipes.stacked or Stacked.of(pipes.tables)
        self.k = pipes.table
        self.moments: dict[int, list[tuple[Floats, Floats, bool]]] = {}
        self.base: Floats = held.prefixes[:, :, 0]
        self.saved: Floats = held.prefixes[:, :, 1]
        self.freed: Floats = held.prefixes[:, :, 2]
        self.dense: Floats = held.prefixes[:, :, 3]
        self.expert: Floats = held.prefixes[:, :, 4]
        self.owed: Floats = held.prefixes[:, :, 5]
        self.forward: Floats = held.prefixes[:, :, 6]
        self.weight: Floats = held.prefixes[:, :, 7]
        self.packed = held.prefixes[:, :, :6]
        scalars = held.scalars[self.k]

        def column(name: str) -> Floats:
            return scalars[:, SCALARS.index(name)]

        self.first_s, self.last_s, self.rho = column("first_s"), column("last_s"), column("again_s_per_byte")
        self.first_forward_s, self.last_forward_s = column("first_forward_s"), column("last_forward_s")
        self.first_weight_s, self.last_weight_s = column("first_weight_s"), column("last_weight_s")
        self.first_dense, self.last_dense = column("first_dense"), column("last_dense")
        self.both_dense = column("both_dense")
        self.loss, self.layer = column("loss_bytes"), column("layer_bytes")
        self.fixed = column("exchange_bytes") + (4 * column("hop_bytes") if pipes.stages > 1 else 0.0)
        self.share, self.input_share, self.weight_share = scalars[:, len(SCALARS) :].T
        self.least_weight_s = np.diff(self.weight).min(axis=1)[self.k] / ROUNDED
        self.whole_s = column("total_s")
        self.whole_forward_s = self.forward[self.k, -1] + self.first_forward_s + self.last_forward_s
        weight = self.weight[self.k, -1] + self.first_weight_s + self.last_weight_s
        self.whole_input_s = self.whole_s - self.whole_forward_s - weight
        self.layers = self.base.shape[1] - 1
        self.is_uniform = held.is_uniform

    def alive(self, pipes: Pipes, rank: int) -> list[tuple[Floats, Floats, bool]]:
        """`pipes.alive`, worked out once for each rank."""
        if rank not in self.moments:
            self.moments[rank] = pipes.alive(rank)
        return self.moments[rank]


def in_flight(stages: int, virtual: int, micro_batches: Floats, stage: int) -> Floats:
    """Chunk activations alive at once on a pipeline rank, as `estimate.memory.in_flight` counts them."""
    if stages == 1:
        return np.full_like(micro_batches, float(virtual))
    if virtual == 1:
        return np.minimum(micro_batches, stages - stage)
    return np.minimum(micro_batches * virtual, 2 * (stages - stage - 1) + (virtual - 1) * stages + 1)


def stage_s(pipes: Pipes, stack: _Stack, stage: int, pieces: list[tuple[Ints, Ints]]) -> Floats:
    """Least seconds of one micro-batch on a stage that has the layers from i to j of each piece; inf if they do not fit
    even recomputed."""
    k, vee = stack.k, KINDS[pipes.kind].vee
    first, last = stage == 0, stage == (0 if vee else pipes.stages - 1)
    parts = [stack.packed[k, j] - stack.packed[k, i] for i, j in pieces]
    seconds, dense, expert = np.sum([part[:, [0, 3, 4]] for part in parts], axis=0).T
    if first and last:
        dense = dense + stack.both_dense
    else:
        dense = dense + (stack.first_dense if first else stack.last_dense if last else 0.0)
    seconds = seconds + (stack.first_s if first else 0.0) + (stack.last_s if last else 0.0)
    states = dense * pipes.per_dense + expert * pipes.per_expert + stack.fixed - pipes.room_bytes
    found = []
    for kept, owed, is_forward in stack.alive(pipes, stage):
        if is_forward and not last:
            continue
        saved, freed, left = (sum(part[:, column] * n for part, n in zip(parts, each, strict=True))
                              for column, each in ((1, kept), (2, kept), (5, owed)))  # fmt: skip
        moment = stack.loss * kept[-1] if is_forward else stack.layer
        if last and pipes.kind in AS_RUN:
            moment = np.maximum(stack.layer, stack.loss)
        excess = np.maximum(states + saved + left + moment, 0.0)
        fits = excess <= freed * (1 + 1e-9)
        again = stack.rho * excess / np.maximum(kept.max(axis=0), 1e-9)
        found.append(np.where(fits, seconds + again, np.inf))
    return np.asarray(np.max(found, axis=0))


def least_s(pipes: Pipes, cutoff_s: Floats) -> Bounds:
    """The bound of each layout over all cuts into stages of at least one layer each; inf where it is above the cutoff
    as well, without saying by how much."""
    stack, count, m = _Stack(pipes), len(pipes.table), pipes.micro_batches
    if pipes.stages == 1:
        zero, all_layers = np.zeros(count, dtype=np.int64), np.full(count, stack.layers, dtype=np.int64)
        return Bounds(m * stage_s(pipes, stack, 0, [(zero, all_layers)]), all_layers[:, None])
    low = stack.whole_s * m / pipes.stages + 0.0 * pipes.hop_s
    if pipes.kind in WHOLE:
        low = without_memory_s(stack.whole_s, m, pipes.stages) + 0.0 * pipes.hop_s
    cuts, reached = _deal(pipes, stack, cutoff_s)
    if reached.any():
        some = np.flatnonzero(reached)
        low[some], cuts[some] = _halved(pipes.of(some), low[some], cutoff_s[some], cuts[some])
    return Bounds(np.where(reached, low, np.inf), cuts)


def _halved(pipes: Pipes, low: Floats, high: Floats, cuts: Ints) -> tuple[Floats, Ints]:
    """The bound in (low, high], where `cuts` are within `high`; and the cuts within the last limit that had some."""
    stack = _Stack(pipes)
    while ((high - low) > PRECISION * low).any():
        middle = np.minimum((low + high) / 2, low * WIDER)
        more, now = _deal(pipes, stack, middle)
        cuts = np.where(now[:, None], more, cuts)
        low, high = np.where(now, low, middle), np.where(now, middle, high)
    return low, cuts


def without_memory_s(whole_s: Floats | float, micro_batches: Floats, stages: Floats | int) -> Floats:
    """Least L with base times that add up to `whole_s`: t_s = (L - sum of those before)/m leaves (1 - 1/m)^p of L."""
    return np.asarray(whole_s / (1 - (1 - 1 / micro_batches) ** stages))


def _deal(pipes: Pipes, stack: _Stack, limit: Floats) -> tuple[Ints, NDArray[np.bool_]]:
    """Layers of each stage if each takes as many as `limit` allows, and whether all are dealt out.

    A stage may take none: those before it may have taken a small layer that was its own, and left it one that only
    later stages have room for. The cuts then give it one of theirs.
    """
    count, p = len(limit), pipes.stages
    at, ends = np.zeros(count, dtype=np.int64), np.full((count, p), stack.layers, dtype=np.int64)
    fine = np.ones(count, dtype=np.bool_)
    for stage in range(p - 1):
        budget = _budget(pipes, stack, limit, stage, at)
        most = stack.layers - (p - 1 - stage) - at
        at = at + (_most_alike if stack.is_uniform else _most)(pipes, stack, stage, at, most, budget)
        fine &= at > stage
        ends[:, stage] = at
    seconds = stage_s(pipes, stack, p - 1, [(at, ends[:, -1])])
    fine &= np.isfinite(seconds) & (seconds <= _budget(pipes, stack, limit, p - 1, at))
    for stage in range(p - 2, -1, -1):
        ends[:, stage] = np.minimum(ends[:, stage], ends[:, stage + 1] - 1)
    return np.diff(ends, axis=1, prepend=0), fine


def _budget(pipes: Pipes, stack: _Stack, limit: Floats, stage: int, at: Ints) -> Floats:
    """Seconds that a stage which starts at layer `at` may take for a micro-batch, by the chains of its schedule."""
    p, m, hop_s = pipes.stages, pipes.micro_batches, pipes.hop_s
    if pipes.kind == "zb-h1":
        return _split_budget(pipes, stack, limit, stage, at)
    before_s = stack.base[stack.k, at] + (stack.first_s if stage else 0.0)
    first = _left((limit - before_s - 2 * stage * hop_s), m)
    whole = limit - stack.whole_s - 2 * (p - 1) * hop_s
    if pipes.kind == "gpipe":
        return np.minimum(first, _left(whole, m - 1))
    second = _left(whole, m - 1 - np.minimum(p - 1 - stage, m - 1) * stack.share)
    behind = p - 1 - stage
    hops = 2 * (stage + 2 * behind) * hop_s
    third = _left(limit - hops - 2 * stack.whole_s + before_s, m - behind - 2)
    return np.minimum(np.minimum(first, second), third)


def _left(seconds: Floats, times: Floats) -> Floats:
    """What `times` equal pieces of `seconds` may take; endless where there are none."""
    return np.where(times > 0, seconds / np.maximum(times, 1e-9), np.inf)


def _split_budget(pipes: Pipes, stack: _Stack, limit: Floats, stage: int, at: Ints) -> Floats:
    """`_budget` of ZB-H1. Shares of a stage are at most those of the layer, or end, that has the largest: what is
    computed again adds to input parts, which (6) and (7) have in full."""
    k, p, m, hop_s = stack.k, pipes.stages, pipes.micro_batches, pipes.hop_s
    ends = (stack.first_s, stack.first_forward_s, stack.first_weight_s) if stage else (0.0, 0.0, 0.0)
    base, forward, weight = stack.base[k, at] + ends[0], stack.forward[k, at] + ends[1], stack.weight[k, at] + ends[2]
    fifth = _left(limit - forward - stage * hop_s, m)
    sixth = _left(
        limit - (base - weight) - stack.least_weight_s - 2 * stage * hop_s, m - (1 + stage) * stack.weight_share
    )
    behind = stack.whole_input_s - (base - forward - weight)
    seventh = limit - stack.whole_forward_s - behind - (2 * (p - 1) - stage) * hop_s
    times = m - (p - stage) * stack.share - stack.input_share
    return np.minimum(np.minimum(fifth, sixth), _left(seventh, times))


def _most(pipes: Pipes, stack: _Stack, stage: int, at: Ints, most: Ints, budget: Floats) -> Ints:
    """Most layers from `at` on that take no longer than `budget`, by halving; 0: not even one."""
    low, high = np.zeros_like(at), np.maximum(most, 0)
    for _ in range(int(stack.layers).bit_length()):
        middle = (low + high + 1) // 2
        seconds = stage_s(pipes, stack, stage, [(at, at + middle)])
        good = np.isfinite(seconds) & (seconds <= budget)
        low, high = np.where(good, middle, low), np.where(good, high, np.maximum(middle - 1, low))
    return low


def _most_alike(pipes: Pipes, stack: _Stack, stage: int, at: Ints, most: Ints, budget: Floats) -> Ints:
    """`_most` where all layers are alike: n layers take the larger of n·base + c and the same with n·a + b bytes to
    free, and there must not be more to free than n layers have."""
    k, first = stack.k, stage == 0
    kept, owed, _ = stack.alive(pipes, stage)[0]
    alive, left = kept[0], owed[0]
    base, freed = stack.base[k, 1], alive * stack.freed[k, 1]
    c = stack.first_s if first else 0.0
    a = stack.dense[k, 1] * pipes.per_dense + stack.expert[k, 1] * pipes.per_expert + alive * stack.saved[k, 1]
    a = a + left * stack.owed[k, 1]
    b = (stack.first_dense if first else 0.0) * pipes.per_dense + stack.layer + stack.fixed - pipes.room_bytes
    rate = stack.rho / np.maximum(alive, 1e-9)
    slack = 1 + 1e-9
    by_time = (budget * slack - c) / base
    by_recompute = (budget * slack - c - rate * b) / (base + rate * a)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_memory = np.where(a > freed, -b / (a - freed) * slack, np.where(b > 0, 0.0, np.inf))
    found = np.floor(np.minimum(np.minimum(by_time, by_recompute), by_memory) + 1e-9)
    return np.asarray(np.clip(found, 0, np.maximum(most, 0)), dtype=np.int64)


def even_s(pipes: Pipes, sizes: list[int], cutoff_s: Floats) -> Floats:
    """The bound of layouts of several chunks a rank, which have these `sizes`; inf where it is above the cutoff.

    At least what every rank has to do; and the longest of the schedule room's chains with base times, on which what
    recompute adds to a rank lies as often as the rank's chunk that lies there least.
    """
    stack, p = _Stack(pipes), pipes.stages
    ends, stands = np.concatenate([[0], np.cumsum(sizes)]), placement(pipes.kind, p, pipes.virtual)
    mine = [[c for c, other in enumerate(stands) if other == rank] for rank in range(p)]
    pieces = [[_all(ends[c : c + 2], stack) for c in held] for held in mine]
    ranks = np.stack([stage_s(pipes, stack, rank, held) for rank, held in enumerate(pieces)], axis=1)
    found = pipes.micro_batches * ranks.max(axis=1)
    # As many micro-batches as ranks, interleaved: frameworks run all forwards first, which is another schedule.
    is_text = pipes.micro_batches > (p if pipes.kind == "interleaved" else 0)
    some = np.flatnonzero((found < cutoff_s) & is_text)
    if len(some):
        found[some] = np.maximum(found[some], _on_chains(pipes.of(some), sizes, ranks[some], mine))
    return np.where(found < cutoff_s, found, np.inf)


def _on_chains(pipes: Pipes, sizes: list[int], ranks: Floats, mine: list[list[int]]) -> Floats:
    stack, found = _Stack(pipes), np.zeros(len(pipes.table))
    forward, both = (_chunk_s(stack, sizes, which) for which in ("forward", "base"))
    weight = _chunk_s(stack, sizes, "weight") if KINDS[pipes.kind].split else np.zeros_like(both)
    again = ranks - np.stack([both[:, held].sum(axis=1) for held in mine], axis=1)
    hops = np.repeat(pipes.hop_s[:, None], len(sizes) - 1, axis=1)
    times = np.hstack([forward, both - forward - weight, weight, hops])
    for m in np.unique(pipes.micro_batches).tolist():
        some = pipes.micro_batches == m
        counts = chains(pipes.kind, pipes.stages, pipes.virtual, int(m))
        inputs = counts[:, len(sizes) : 2 * len(sizes)]
        rarest = np.stack([inputs[:, held].min(axis=1) for held in mine], axis=1)
        found[some] = (times[some] @ counts.T + again[some] @ rarest.T).max(axis=1)
    return found * (1 - 1e-9)


def _all(ends: Ints, stack: _Stack) -> tuple[Ints, Ints]:
    """The same first and last layer for every layout."""
    first, last = (np.full(len(stack.k), end, dtype=np.int64) for end in ends.tolist())
    return first, last


def _chunk_s(stack: _Stack, sizes: list[int], which: str) -> Floats:
    """[layouts, chunks] seconds of one micro-batch: the forward, or both ways."""
    values, first, last = {
        "forward": (stack.forward, stack.first_forward_s, stack.last_forward_s),
        "base": (stack.base, stack.first_s, stack.last_s),
        "weight": (stack.weight, stack.first_weight_s, stack.last_weight_s),
    }[which]
    found = np.diff(values[stack.k][:, np.concatenate([[0], np.cumsum(sizes)])], axis=1)
    found[:, 0] += first
    found[:, -1] += last
    return np.asarray(found)
