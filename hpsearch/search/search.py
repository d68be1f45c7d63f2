"""From a model's facts and a cluster to a plan with a proven bound.

A *branch* is a mesh and a set of recomputed blocks; its candidates are micro-batch counts. Every op in its cheapest
state, with all redistribution and all exposure left out, is a lower bound of a candidate. Candidates are taken best
bound first and solved exactly until no bound is below the best plan found: then that plan is optimal over the space
(`candidates.SPACE`) for this cost model, and the remaining candidates are pruned by proof.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hpsearch.cluster import Cluster
from hpsearch.cost import CostTable, build, check_batch, optimizer_states
from hpsearch.errors import ClusterError, LegalityError
from hpsearch.graph import ModelGraph, with_capacity
from hpsearch.layout import Mesh
from hpsearch.plan import Plan, Refusal
from hpsearch.search.assemble import Certificate, Found, plan_of
from hpsearch.search.candidates import (
    Branch,
    Entry,
    meshes,
    micro_batch_counts,
    recompute_sets,
    refused_meshes,
    with_tiers,
)
from hpsearch.search.context import with_exchanges
from hpsearch.search.fix import Fix, parse_fix
from hpsearch.search.hops import with_hops
from hpsearch.search.infeasible import why_infeasible
from hpsearch.search.job import job_of
from hpsearch.search.memory import usable_bytes
from hpsearch.search.pins import pinned
from hpsearch.search.pipeline import PipelineSearch
from hpsearch.search.spaces import Spaces
from hpsearch.search.step_memory import fullest
from hpsearch.search.workspace import peak, row
from hpsearch.solve import Row, solve

TIGHTEST = 4
"""Candidates that are looked at when nothing fits."""

Progress = Callable[[str, int, int], None]
"""(what is being looked at, candidates done, candidates known)."""


UNLIMITED_S = 86_400.0
"""What a solve may take when the user set no limit: a plan must not depend on how busy the machine is."""


@dataclass
class _Search:
    """State of one search; lives for one call."""

    model: ModelGraph
    cluster: Cluster
    global_batch: int
    optimizer: str
    fix: Fix
    progress: Progress | None
    deadline_s: float
    spaces: Spaces = field(init=False)
    refused: list[Refusal] = field(default_factory=list)
    lost: list[tuple[float, str, str]] = field(default_factory=list)
    considered: int = 0
    solved: int = 0
    pruned: int = 0
    unseen: int = 0
    """Candidates that the time limit left unpriced."""
    best: Found | None = None
    tightest: list[tuple[float, int, CostTable]] = field(default_factory=list)
    """The candidates whose parts need least memory (bytes, order, table), for the message when nothing fits."""

    def __post_init__(self) -> None:
        self.spaces = Spaces(self.model)

    def table(self, branch: Branch, micro_batches: int) -> CostTable:
        job = job_of(self.model, self.global_batch, micro_batches, self.optimizer, branch.recompute, self.fix)
        space = self.spaces.on(branch.mesh)
        return pinned(build(space, self.cluster, branch.mesh, job, float(usable_bytes(self.cluster))), self.fix)


def search(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    global_batch: int,
    fix: Mapping[str, object] | None = None,
    optimizer: str = "adamw",
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan for `graph` on all devices of `cluster`, with its bound.

    `global_batch`: rows of one optimizer step. `fix`: pins (see search/fix.py). `time_limit_s`: stop then with the best
    plan so far and its honest gap.
    Raises LegalityError (a pin or batch that cannot be), InfeasibleError (nothing fits; says what would).
    """
    if cluster.groups:
        names = ", ".join(group.name for group in cluster.groups)
        raise ClusterError(
            f"cluster {cluster.name}", f"expected devices that are all alike, but it has groups of nodes: {names}",
            "`hpsearch search` puts stages on unlike nodes; here, state the weakest of them as [device].",
        )  # fmt: skip
    optimizer_states(optimizer)
    pins = parse_fix(fix)
    graph = with_capacity(graph, pins.capacity)
    deadline_s = time.monotonic() + time_limit_s if time_limit_s is not None else float("inf")
    if pins.pp > 1:
        return PipelineSearch(graph, cluster, global_batch, optimizer, pins, deadline_s, progress).run()
    state = _Search(graph, cluster, global_batch, optimizer, pins, progress, deadline_s)
    queue = _bounds(state, _candidates(state))
    bound_s = _best_first(state, queue)
    if state.best is None:
        raise why_infeasible(
            graph,
            cluster,
            [t for _, _, t in state.tightest],
            state.fix,
            state.refused,
            lambda: _fits_without_pins(state),
        )
    certificate = Certificate(
        bound_s, state.considered, state.solved, state.pruned, tuple(state.refused), tuple(state.lost)
    )
    return plan_of(graph, cluster, state.best, certificate, state.fix)


def _fits_without_pins(state: _Search) -> bool:
    """Whether any candidate fits when nothing is pinned."""
    free = _Search(state.model, state.cluster, state.global_batch, state.optimizer, Fix(), None, float("inf"))
    queue = _bounds(free, _candidates(free))
    while queue and free.best is None:
        found, _ = _solve(free, heapq.heappop(queue))
        free.best = found
    return free.best is not None


def _candidates(state: _Search) -> list[tuple[Branch, int]]:
    branches = []
    for degrees in meshes(state.model, state.cluster.devices, state.fix):
        for mesh in with_exchanges(with_tiers(Mesh.of(**degrees), state.cluster), state.model, state.fix):
            branches += [Branch(mesh, again) for again in recompute_sets(state.model, state.fix)]
    found = []
    for b in branches:
        for m in micro_batch_counts(state.model, state.global_batch, b.mesh, state.fix):
            mesh = with_hops(b.mesh, state.model, state.cluster, state.global_batch // m, state.fix)
            found.append((Branch(mesh, b.recompute), m))
    state.refused += refused_meshes(state.model, state.cluster.devices, state.global_batch, state.fix)
    if not branches:
        pins = " ".join(f"{k}={v}" for k, v in state.fix.text.items())
        raise LegalityError(
            f"{state.cluster.devices} devices",
            f"expected a mesh of at most two axes with {pins or 'legal degrees'}, but there is none",
            "Loosen --fix, or choose another number of devices.",
        )
    if not found:
        smallest = min(branches, key=lambda b: b.mesh.num_data_ranks).mesh
        check_batch(state.global_batch, state.fix.micro_batches or 1, smallest)
    return found


def _bounds(state: _Search, candidates: list[tuple[Branch, int]]) -> list[Entry]:
    """Every candidate that its parts' least memory allows, with its lower bound, as a heap."""
    queue: list[Entry] = []
    for order, (branch, count) in enumerate(candidates):
        label = branch.label(count)
        if state.progress:
            state.progress(label, order, len(candidates))
        if time.monotonic() > state.deadline_s and queue:
            state.unseen += 1
            state.refused.append(Refusal(candidate=label, reason="not looked at: the time limit was reached"))
            continue
        state.considered += 1
        table = state.table(branch, count)
        needed = table.least_parts_bytes
        state.tightest = sorted([*state.tightest, (needed, order, table)], key=lambda t: t[:2])[:TIGHTEST]
        bound_s = table.least_parts_s
        if bound_s == float("inf"):
            state.refused.append(Refusal(candidate=label, reason="no layout satisfies the pins"))
            continue
        if needed > usable_bytes(state.cluster):
            limit = usable_bytes(state.cluster)
            reason = f"needs at least {needed / 1e9:.1f} GB a device, {limit / 1e9:.1f} GB are there"
            state.refused.append(Refusal(candidate=label, reason=reason))
            continue
        heapq.heappush(queue, Entry(bound_s, order, table, label))
    return queue


def _best_first(state: _Search, queue: list[Entry]) -> float:
    """Solves candidates until none can beat the best; returns the lower bound over all of them."""
    bound_s = float("inf")
    while queue:
        entry = heapq.heappop(queue)
        best_s = state.best.objective_s if state.best else float("inf")
        if entry.bound_s >= best_s or (time.monotonic() > state.deadline_s and state.best):
            bound_s = min(bound_s, entry.bound_s)
            state.pruned = len(queue) + 1
            state.lost += sorted((e.bound_s, e.label, "at least ") for e in [entry, *queue])[:3]
            break
        found, proven_s = _solve(state, entry)
        bound_s = min(bound_s, proven_s)
        if found is None:
            continue
        if found.objective_s < best_s:
            state.best, found = found, state.best
        if found is not None:
            state.lost.append((found.objective_s, found.label, ""))
    if state.unseen:  # nothing is known of a candidate that was not looked at, so nothing is proven
        return 0.0
    return min(bound_s, state.best.objective_s) if state.best else bound_s


def _solve(state: _Search, entry: Entry) -> tuple[Found | None, float]:
    """The candidate's optimum within memory, and its proven lower bound.

    Memory at the moment of the largest workspace becomes a row of its own when the optimum does not fit there. Copies
    made for a redistribution are not in that row; where only they break the limit, it is tightened, and the gap to the
    last untightened bound tells what that may have cost.
    """
    state.solved += 1
    limit = float(usable_bytes(state.cluster))
    best_s = state.best.objective_s if state.best else float("inf")
    rows: dict[str, Row] = {}
    proven_s, tightened, allowed = entry.bound_s, False, limit
    for _ in range(12):
        limited = [replace(r, limit=allowed) for r in rows.values()]
        problem = replace(entry.table.problem, rows=(*entry.table.problem.rows, *limited))
        left_s = max(0.1, min(UNLIMITED_S, state.deadline_s - time.monotonic()))
        solution = solve(problem, upper_bound=best_s, time_limit_s=left_s)
        if not tightened:
            proven_s = max(proven_s, solution.bound)
        if solution.choice is None:
            if solution.status == "stopped":
                state.refused.append(Refusal(candidate=entry.label, reason="not settled: the time limit was reached"))
            elif solution.status != "cut off":
                state.refused.append(Refusal(candidate=entry.label, reason="does not fit in memory"))
            return None, proven_s
        workspace, moment = peak(entry.table, solution.choice)
        if sum(fullest(entry.table, solution.choice).values()) <= limit:
            return Found(entry.table, solution.choice, solution.objective, entry.label, workspace), proven_s
        added = row(entry.table, moment, limit)
        if added.name in rows:
            tightened, allowed = True, allowed - 0.02 * limit
        rows[added.name] = added
    state.refused.append(Refusal(candidate=entry.label, reason="its workspace does not fit beside what backward keeps"))
    return None, proven_s
