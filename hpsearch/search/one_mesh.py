"""The search without a pipeline: all ranks have the whole model, and one mesh.

A *branch* is a mesh and a set of recomputed blocks; its candidates are micro-batch counts. Every op in its cheapest
state, with all redistribution and all exposure left out, is a lower bound of a candidate. Candidates are taken best
bound first and solved exactly until no bound is below the best plan found: then that plan is optimal over the space
(`candidates.SPACE`) for this cost model, and the remaining candidates are pruned by proof.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hpsearch.cluster import Cluster
from hpsearch.cost import CostTable, build
from hpsearch.graph import ModelGraph
from hpsearch.search.assemble import Found
from hpsearch.search.candidates import Branch, Entry, branches_of
from hpsearch.search.fix import Fix
from hpsearch.search.job import job_of
from hpsearch.search.memory import usable_bytes
from hpsearch.search.pins import pinned
from hpsearch.search.spaces import Spaces
from hpsearch.search.step_memory import fullest
from hpsearch.search.tally import Tally
from hpsearch.search.workspace import peak, row
from hpsearch.solve import Problem, Row, least, solve

TIGHTEST = 4
"""Candidates that are looked at when nothing fits."""

Progress = Callable[[str, int, int], None]
"""(what is being looked at, candidates done, candidates known)."""

UNLIMITED_S = 86_400.0
"""What a solve may take when the user set no limit: a plan must not depend on how busy the machine is."""


@dataclass
class OneMesh:
    """One search; lives for one call."""

    model: ModelGraph
    cluster: Cluster
    global_batch: int
    optimizer: str
    fix: Fix
    deadline_s: float
    tally: Tally
    spaces: Spaces
    progress: Progress | None = None

    def run(self) -> float:
        """Finds what is better than the best so far; returns the lower bound over all candidates, infinity for none.
        LegalityError: a pin that cannot be."""
        return self.best_first(self.bounds(self.candidates()))

    def table(self, branch: Branch, micro_batches: int) -> CostTable:
        job = job_of(self.model, self.global_batch, micro_batches, self.optimizer, branch.recompute, self.fix)
        space = self.spaces.on(branch.mesh)
        return pinned(build(space, self.cluster, branch.mesh, job, float(usable_bytes(self.cluster))), self.fix)

    def candidates(self) -> list[tuple[Branch, int]]:
        return list(branches_of(self.model, self.cluster, self.global_batch, self.fix))

    def label(self, branch: Branch, micro_batches: int) -> str:
        away = f" offload={self.fix.offload}" if self.fix.offload and "offload" not in self.fix.text else ""
        return branch.label(micro_batches) + away

    def bounds(self, candidates: list[tuple[Branch, int]]) -> list[Entry]:
        """Every candidate that its parts' least memory allows, with its lower bound, as a heap."""
        queue: list[Entry] = []
        tally, limit, tightest = self.tally, usable_bytes(self.cluster), list[tuple[float, int, CostTable]]()
        for order, (branch, count) in enumerate(candidates):
            label = self.label(branch, count)
            if self.progress:
                self.progress(label, order, len(candidates))
            if time.monotonic() > self.deadline_s and (queue or tally.best):
                tally.unseen += 1
                tally.refuse(label, "not looked at: the time limit was reached")
                continue
            tally.considered += 1
            table = self.table(branch, count)
            needed = table.least_parts_bytes
            tightest = sorted([*tightest, (needed, order, table)], key=lambda t: t[:2])[:TIGHTEST]
            bound_s = table.least_parts_s
            if bound_s == float("inf"):
                tally.refuse(label, "no layout satisfies the pins")
            elif needed > limit:
                tally.refuse(label, f"needs at least {needed / 1e9:.1f} GB a device, {limit / 1e9:.1f} GB are there")
            else:
                heapq.heappush(queue, Entry(bound_s, order, table, label))
        tally.tightest += [table for _, _, table in tightest]
        return queue

    def best_first(self, queue: list[Entry]) -> float:
        """Solves candidates until none can beat the best; returns the lower bound over all of them."""
        bound_s, tally = float("inf"), self.tally
        while queue:
            entry = heapq.heappop(queue)
            if entry.bound_s >= tally.best_s or (time.monotonic() > self.deadline_s and tally.best):
                bound_s = min(bound_s, entry.bound_s)
                tally.pruned += len(queue) + 1
                tally.lost += sorted((e.bound_s, e.label, "at least ") for e in [entry, *queue])[:3]
                break
            found, proven_s = self.solve(entry)
            bound_s = min(bound_s, proven_s)
            if found is not None:
                tally.keep(found)
        if tally.unseen:  # nothing is known of a candidate that was not looked at, so nothing is proven
            return 0.0
        return min(bound_s, tally.best_s)

    def solve(self, entry: Entry) -> tuple[Found | None, float]:
        """The candidate's optimum within memory, and its proven lower bound.

        Memory at the moment of the largest workspace becomes a row of its own when the optimum does not fit there.
        Rows are above or below the bytes of the walked step by what is redistributed; where only that breaks the limit,
        it is tightened by as much, and the gap to the last untightened bound tells what that may have cost. What needs
        least memory of all is the last try.
        """
        tally, limit = self.tally, float(usable_bytes(self.cluster))
        tally.solved += 1
        rows: dict[str, Row] = {}
        proven_s, tightened, allowed = entry.bound_s, False, limit
        for _ in range(12):
            limited = [replace(r, limit=allowed) for r in rows.values()]
            problem = replace(entry.table.problem, rows=(*entry.table.problem.rows, *limited))
            left_s = max(0.1, min(UNLIMITED_S, self.deadline_s - time.monotonic()))
            solution = solve(problem, upper_bound=tally.best_s, time_limit_s=left_s)
            if not tightened:
                proven_s = max(proven_s, solution.bound)
            if solution.choice is None:
                if solution.status == "stopped":
                    tally.refuse(entry.label, "not settled: the time limit was reached")
                elif solution.status != "cut off":
                    return self.smallest(entry, problem), proven_s
                return None, proven_s
            filled = sum(fullest(entry.table, solution.choice).values())
            if filled <= limit:
                return self.found(entry, solution.choice), proven_s
            added = row(entry.table, peak(entry.table, solution.choice)[1], limit)
            if added.name in rows:
                tightened, allowed = True, allowed - (filled - limit)
            rows[added.name] = added
        return self.smallest(entry, problem), proven_s

    def smallest(self, entry: Entry, problem: Problem) -> Found | None:
        """The candidate's plan of least memory where `problem`'s last row is, if that fits and beats the best; else why
        not is noted."""
        tally, limit = self.tally, usable_bytes(self.cluster)
        choice = least(problem, problem.rows[-1].name).choice
        needed = sum(fullest(entry.table, choice).values()) if choice is not None else 0
        if choice is None or needed > limit:
            more = f": {needed / 1e9:.2f} GB a device, {limit / 1e9:.2f} GB are there" if choice is not None else ""
            tally.refuse(entry.label, f"does not fit in memory{more}")
            return None
        found = self.found(entry, choice)
        return found if found.objective_s < tally.best_s else None

    def found(self, entry: Entry, choice: tuple[int, ...]) -> Found:
        workspace, _ = peak(entry.table, choice)
        return Found(entry.table, choice, entry.table.problem.evaluate(choice), entry.label, workspace)
