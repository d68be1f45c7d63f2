"""What stages take at least, before any of them is priced: seconds of a schedule and bytes of its fullest rank.

Every op in its cheapest state gives each stage the least seconds of its forward, and of the input and weight part of
its backward; the longest chain of the schedule through them is a bound for its cut. What communication adds to the
whole model's least work adds to some stage, wherever that is: on average over the ranks, a second of a micro-batch is
on the chains as often as the stage that is there least.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpsearch.cost import CostTable
from hpsearch.cost.op_time import Floats
from hpsearch.cost.saved import saved_bytes
from hpsearch.graph import ModelGraph
from hpsearch.plan.stages import Stage
from hpsearch.schedule import KINDS, lower_bounds_s, placement
from hpsearch.schedule.bound import ROUNDING, chains
from hpsearch.search.in_flight import Kept
from hpsearch.search.stage_prices import weight_ops
from hpsearch.solve import Problem
from hpsearch.strategy.search_space import NodeKey

PARTS = 3
"""Forward, input part, weight part."""
ROWS = 3
"""Ranks whose memory a bound asks for."""
LINES = 6
"""Chains that `schedule.bound` has of each rank."""


@dataclass(frozen=True, eq=False)
class Frame:
    """What stands on each stage of a cut."""

    cut: tuple[int, ...]
    calls: tuple[Counter[str], ...]
    """Block class → calls."""
    ops: tuple[tuple[tuple[str, ...], ...], ...]
    """Steps of the outer graph: those of forward, of the input part and of the weight part."""
    params: tuple[tuple[str, ...], ...]
    """Parameters of the outer graph, as values."""

    @staticmethod
    def of(stages: Sequence[Stage], cut: tuple[int, ...]) -> Frame:
        calls, ops, params = [], [], []
        for stage in stages:
            outer = stage.graph.outer
            weight = weight_ops(outer, stage)
            bins: tuple[list[str], ...] = ([], [], [])
            for op in outer.ops:
                bins[0 if op.phase == "forward" else 2 if op.name in weight else 1].append(op.name)
            calls.append(Counter(name for name, _ in stage.graph.instances))
            ops.append(tuple(map(tuple, bins)))
            params.append(tuple(outer.params.values()))
        return Frame(cut, tuple(calls), tuple(ops), tuple(params))


@dataclass(frozen=True, eq=False)
class Least:
    """Least seconds of one execution, by class of blocks and phase part, and by step of the outer graph."""

    blocks: dict[str, tuple[float, float, float]]
    outer: dict[str, float]

    @staticmethod
    def of(table: CostTable) -> Least:
        space, outer = table.space, table.space.model.outer.name
        blocks = {name: [0.0] * PARTS for name in space.model.blocks}
        ends: dict[str, float] = {}
        weight = {name: weight_ops(graph) for name, graph in space.model.blocks.items()}
        for key, seconds in table.seconds.items():
            graph, name = key
            least = float(seconds.min())
            if graph == outer:
                ends[name] = least
            else:
                is_forward = space.graphs[graph].step(name).phase == "forward"
                blocks[graph][0 if is_forward else 2 if name in weight[graph] else 1] += least
        return Least({name: (f, i, w) for name, (f, i, w) in blocks.items()}, ends)

    def of_call(self, block: str, recompute: frozenset[str]) -> tuple[float, float, float]:
        """A recomputed block runs forward again in the input part."""
        forward, backward_input, weight = self.blocks[block]
        return forward, backward_input + (forward if block in recompute else 0.0), weight

    def of_stages(self, frame: Frame, recompute: frozenset[str]) -> Floats:
        """[3, stages] of one micro-batch."""
        found = np.zeros((PARTS, len(frame.cut)))
        for stage, (calls, ops) in enumerate(zip(frame.calls, frame.ops, strict=True)):
            for block, count in calls.items():
                found[:, stage] += count * np.array(self.of_call(block, recompute))
            for part, names in enumerate(ops):
                found[part, stage] += sum(self.outer.get(name, 0.0) for name in names)
        return found

    def work_s(self, model: ModelGraph, recompute: frozenset[str]) -> float:
        """Seconds of one micro-batch through the whole model."""
        counts = Counter(name for name, _ in model.instances)
        inside = sum(count * sum(self.of_call(block, recompute)) for block, count in counts.items())
        return inside + sum(self.outer.values())


def rank_bound_s(kind: str, pp: int, virtual: int, micro_batches: int, times: Floats) -> float:
    """Seconds of a schedule at least, by the work of each rank alone: nothing comes to it before a forward has passed
    all stages before its first one, and after the last backward there the gradient has to pass them all again."""
    stands = placement(kind, pp, virtual)
    first, work = np.array([stands.index(rank) for rank in range(pp)]), np.zeros((PARTS, pp))
    for stage, rank in enumerate(stands):
        work[:, rank] += micro_batches * times[:, stage]
    before = np.concatenate([np.zeros((PARTS, 1)), np.cumsum(times, axis=1)], axis=1)[:, first]
    if not KINDS[kind].split:
        return float((work.sum(axis=0) + before.sum(axis=0)).max()) * (1 - ROUNDING)
    behind = np.maximum(work[2], before[1])
    return float((before[0] + work[0] + work[1] + behind).max()) * (1 - ROUNDING)


def schedule_bound_s(kind: str, pp: int, virtual: int, micro_batches: int, times: Floats) -> float:
    """Seconds of a schedule at least; `times`: [3, stages]."""
    rows = (times[part][None] for part in range(PARTS))
    return float(lower_bounds_s(kind, pp, virtual, micro_batches, *rows)[0])


def passing(table: CostTable) -> Problem:
    """The problem of what stages do before their update: its least is what all stages of a step take together at least,
    communication among it, wherever memory is not asked."""
    unary = list(table.problem.unary)
    for node, key in enumerate(table.keys):
        if key in table.storages:
            updates = [table.update_s(storage) for storage in table.storages[key]]
            unary[node] = np.maximum(unary[node] - table.space.nodes[key].count * np.array(updates), 0.0)
    return replace(table.problem, unary=tuple(unary), rows=())


def with_passing_s(kind: str, pp: int, virtual: int, micro_batches: int, times: Floats, passing_s: float) -> float:
    """The bound, where all stages of a step take `passing_s` together and each at least its `times`."""
    lines = chains(kind, pp, virtual, micro_batches)[:, : times.size].reshape(pp, LINES, times.size)
    each = lines @ times.ravel()
    mean = lines[np.arange(pp), each.argmax(axis=1)].mean(axis=0)
    more_s = max(0.0, passing_s / micro_batches - float(times.sum()))
    bound_s = float(mean @ times.ravel()) + float(mean.min()) * more_s
    return max(schedule_bound_s(kind, pp, virtual, micro_batches, times), bound_s * (1 - ROUNDING))


@dataclass(frozen=True, eq=False)
class StageBytes:
    """Bytes a device by node and state, without what only a stage of its own shows: what its neighbours send, pending
    halves, workspace. Of a class of blocks, those of all its calls."""

    keys: tuple[NodeKey, ...]
    counts: Counter[str]
    """Block class → calls in the model."""
    outer: str
    still: dict[int, Floats]
    flying: dict[int, Floats]
    """Of each micro-batch between its forward and the end of its backward."""

    @staticmethod
    def of(table: CostTable) -> StageBytes:
        model, job = table.space.model, table.job
        still = {node: np.array(nbytes) for node, nbytes in table.problem.rows[0].coefficients.items()}
        for node, nbytes in still.items():
            nbytes[~np.isfinite(table.problem.unary[node])] = np.inf
        flying, index = dict[int, Floats](), {key: node for node, key in enumerate(table.keys)}
        for key, nbytes in saved_bytes(table.space, job, table.mesh).items():
            is_kept = key[0] not in job.recompute or table.space.nodes[key].kind != "op"
            if is_kept and key[0] not in job.offload:
                node = index[key]
                flying[node] = nbytes
                still[node] = np.maximum(still[node] - nbytes, 0.0)
        counts = Counter(name for name, _ in model.instances)
        return StageBytes(table.keys, counts, model.outer.name, still, flying)

    def row(self, frame: Frame, moment: Kept) -> dict[int, Floats]:
        """At least the bytes of a pipeline rank at a moment, by node and state."""
        share, alive = defaultdict[str, float](float), defaultdict[str, float](float)
        for stage, flying, _ in moment:
            here = dict.fromkeys((*frame.params[stage], *(name for part in frame.ops[stage] for name in part)), 1.0)
            here |= {name: count / self.counts[name] for name, count in frame.calls[stage].items()}
            for name, weight in here.items():
                share[name] += weight
                alive[name] += weight * flying
        found = {}
        for node, nbytes in self.still.items():
            graph, name = self.keys[node]
            owner = name if graph == self.outer else graph
            if owner in share:
                found[node] = nbytes * share[owner]
                if node in self.flying:
                    found[node] = found[node] + self.flying[node] * alive[owner]
        return found

    def rows(self, frame: Frame, kept: Sequence[tuple[Kept, ...]]) -> list[dict[int, Floats]]:
        """Of the ranks that need most at least, each at its fullest moment; the first needs most."""
        fullest = []
        for rank, moments in enumerate(kept):
            each = [self.row(frame, moment) for moment in moments]
            least = [least_bytes(row) for row in each]
            at = max(range(len(each)), key=lambda i: least[i])
            fullest.append((-least[at], rank, each[at]))
        return [row for _, _, row in sorted(fullest, key=lambda one: one[:2])[:ROWS]]


def least_bytes(row: dict[int, Floats]) -> float:
    """Each node in the state that needs least."""
    return sum(float(nbytes.min()) for nbytes in row.values())
