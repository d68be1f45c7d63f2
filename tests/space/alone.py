"""The bound of `dealing.py` of one layout alone, written for one number of stages and one schedule: a second way to the
same chains, with recompute only by its least seconds for a byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate.parallel import AS_RUN
from hpsearch.schedule import KINDS
from hpsearch.schedule.alive import surely_alive
from hpsearch.space.bound import PRECISION, SCALARS, WHOLE, WIDER, Bounds, Pipes, Stacked, in_flight, without_memory_s
from hpsearch.space.prices import Prices
from hpsearch.space.space import Row
from hpsearch.space.tables import ROUNDED

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def alone_s(prices: Prices, member: tuple[int, Row]) -> float:
    """Pipeline seconds of a layout of one chunk a rank at least."""
    found, endless = 0.0, np.array([np.inf])
    for again, chosen in prices._passes([member]):
        if chosen and np.isfinite(found):
            found = max(found, float(least_s(prices._pipes([member], again), endless).pipe_s[0]))
    return found


def moments(pipes: Pipes, rank: int) -> list[tuple[Floats, Floats, bool]]:
    """Moments of a rank: forwards that keep what a backward reads, and input parts that keep what a weight part
    reads, [chunks, layouts] each; and whether it is the moment after a forward."""
    m, v = pipes.micro_batches, pipes.virtual
    if pipes.kind in AS_RUN:
        each = np.broadcast_to(in_flight(pipes.stages, v, m, rank) / v, (v, len(m)))
        return [(each, np.zeros_like(each), False)]
    after_forward, in_backward = surely_alive(pipes.kind, pipes.stages, v, rank, m)
    return [(in_backward[:v], in_backward[v:], False), (after_forward[:v], after_forward[v:], True)]


class _Stack:
    """Tables side by side: value of table k before layer l as one lookup."""

    def __init__(self, pipes: Pipes) -> None:
        held = Stacked.of(pipes.tables)
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
        """`moments`, worked out once for each rank."""
        if rank not in self.moments:
            self.moments[rank] = moments(pipes, rank)
        return self.moments[rank]


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
