"""The search with a pinned pipeline: meshes of one stage, micro-batches, recompute, and where to cut.

States are chosen for all stages together: the least seconds of all stages' work, within the memory of every pipeline
rank at every moment of its schedule. A candidate's price is its schedule on its stages' seconds (`schedule_s`). No
schedule is shorter than its fullest rank, and no rank emptier than the average: the least work of all stages over the
pipeline ranks is a lower bound, for any cut and any schedule.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hpsearch.cluster import Cluster
from hpsearch.cost import CostTable, build, check_batch, optimizer_states
from hpsearch.errors import InfeasibleError, LegalityError
from hpsearch.graph import ModelGraph
from hpsearch.layout import Mesh
from hpsearch.plan import Plan, Refusal
from hpsearch.plan.stages import check_cut, even
from hpsearch.schedule import KINDS, make_schedule, refusal
from hpsearch.search.assemble import Certificate, Found, plan_of
from hpsearch.search.candidates import Branch, Entry, branches_of
from hpsearch.search.fix import Fix
from hpsearch.search.job import job_of
from hpsearch.search.memory import usable_bytes
from hpsearch.search.pins import pinned
from hpsearch.search.priced_pipeline import PricedPipeline, fill
from hpsearch.search.spaces import Spaces
from hpsearch.search.stage_bound import Frame, Least
from hpsearch.search.stage_prices import StagePrices, price_stages
from hpsearch.solve import Row, solve

SPACE = (
    "pipelines of {pp} ranks, {vpp} stages on each, {kind}, blocks cut {cut}; inside a stage "
    "meshes of one or two axes out of dp_replicate, dp_shard, tp, and ep of experts, cp where pinned; every op the "
    "same rule on all stages; per parameter stored whole, ZeRO-2 or ZeRO-3; micro-batch count; recompute none or full "
    "per block class. The bound is the work of all stages over {pp}; memory is of each rank at each moment of its "
    "schedule"
)
TRIES = 8
"""How often the memory left for a candidate is tightened by what its workspace takes."""


@dataclass
class PipelineSearch:
    """One search; lives for one call."""

    model: ModelGraph
    cluster: Cluster
    global_batch: int
    optimizer: str
    fix: Fix
    deadline_s: float
    progress: Callable[[str, int, int], None] | None = None
    """(what is being looked at, candidates done, candidates known)."""
    given_spaces: Spaces | None = None
    """Of another search of the same model."""
    prices: dict[tuple[CostTable, tuple[int, ...]], tuple[StagePrices, ...]] = field(default_factory=dict)
    """Stages of a table and a cut."""
    refused: list[Refusal] = field(default_factory=list)
    lost: list[tuple[float, str, str]] = field(default_factory=list)
    considered: int = 0
    solved: int = 0
    pruned: int = 0
    best: Found | None = None
    least_bytes: tuple[float, str] = (float("inf"), "")

    @cached_property
    def spaces(self) -> Spaces:
        return self.given_spaces or Spaces(self.model)

    @property
    def kind(self) -> str:
        return self.fix.schedule or ("interleaved" if (self.fix.vpp or 1) > 1 else "1f1b")

    @property
    def virtual(self) -> int:
        return self.fix.vpp or KINDS[self.kind].least_virtual

    @property
    def stages(self) -> int:
        return self.fix.pp * self.virtual

    def run(self) -> Plan:
        optimizer_states(self.optimizer)
        if self.cluster.devices % self.fix.pp:
            problem = f"expected a divisor of the {self.cluster.devices} devices, but found {self.fix.pp}"
            raise LegalityError(f"fix pp={self.fix.pp}", problem, "Choose another degree, or other devices.")
        if self.fix.offloads("activations") and KINDS[self.kind].split:
            problem = f"expected a schedule with whole backwards beside offloaded activations, but found {self.kind}"
            raise LegalityError("fix offload", problem, "Pin schedule to gpipe, 1f1b or interleaved.")
        calls = sum(1 for call in self.model.outer.calls if call.phase == "forward")
        if self.fix.cut and len(self.fix.cut) != self.stages:
            each = f"{self.virtual} stage{'s'[: self.virtual > 1]}"
            problem = f"expected {self.stages} numbers for {self.fix.pp} ranks with {each} each"
            raise LegalityError(f"fix cut={self.fix.text['cut']}", problem, "One number for each stage.")
        check_cut(self.model, self.fix.cut or even(max(calls, 1), self.stages))
        queue = list(self.candidates())
        heapq.heapify(queue)
        bound_s = self.best_first(queue)
        if self.best is None:
            raise self.why_not()
        certificate = Certificate(
            bound_s,
            self.considered,
            self.solved,
            self.pruned,
            tuple(self.refused),
            tuple(self.lost),
            self.space_text(),
        )
        return plan_of(self.model, self.cluster, self.best, certificate, self.fix)

    def candidates(self) -> Iterator[Entry]:
        """Meshes of one stage, each with its micro-batch counts and recomputed blocks."""
        why = None
        for order, (branch, count) in enumerate(self.branches()):
            why = refusal(self.kind, self.fix.pp, self.virtual, count)
            label = f"pp={self.fix.pp} {branch.label(count)}"
            if why is not None:
                self.refused.append(Refusal(candidate=label, reason=f"{why.problem} ({why.subject})"))
                continue
            self.considered += 1
            table = self.table(branch, count)
            bound_s = table.least_parts_s / self.fix.pp
            if bound_s == float("inf"):
                self.refused.append(Refusal(candidate=label, reason="no layout satisfies the pins"))
                continue
            yield Entry(bound_s, order, table, label)
        if not self.considered and why is not None:
            raise why

    def branches(self) -> list[tuple[Branch, int]]:
        found = list(branches_of(self.model, self.cluster, self.global_batch, self.fix, self.fix.pp))
        if not found:
            devices = self.cluster.devices // self.fix.pp
            check_batch(self.global_batch, self.fix.micro_batches or 1, Mesh.of(dp_shard=devices))
            pins = " ".join(f"{key}={value}" for key, value in self.fix.text.items())
            problem = f"expected a mesh of {devices} devices a stage with {pins}, but there is none"
            raise LegalityError(f"{self.cluster.devices} devices", problem, "Loosen --fix.")
        return found

    def table(self, branch: Branch, micro_batches: int) -> CostTable:
        job = job_of(
            self.model, self.global_batch, micro_batches, self.optimizer, branch.recompute, self.fix, pipelined=True
        )
        return pinned(build(self.spaces.on(branch.mesh), self.cluster, branch.mesh, job, float("inf")), self.fix)

    def best_first(self, queue: list[Entry]) -> float:
        """Solves candidates until none can beat the best; returns the lower bound over all of them."""
        bound_s = float("inf")
        while queue:
            entry = heapq.heappop(queue)
            best_s = self.best.objective_s if self.best else float("inf")
            if entry.bound_s >= best_s or (time.monotonic() > self.deadline_s and self.best):
                bound_s, self.pruned = min(bound_s, entry.bound_s), len(queue) + 1
                self.lost += sorted((e.bound_s, e.label, "at least ") for e in [entry, *queue])[:3]
                break
            self.solved += 1
            if self.progress:
                self.progress(entry.label, self.solved, self.solved + len(queue))
            proven_s = entry.bound_s
            for cut in self.cuts(entry.table):
                found, least_s = self.solve(entry, cut)
                proven_s = max(proven_s, least_s) if self.fix.cut else proven_s
                if found is not None:
                    self.keep(found)
            bound_s = min(bound_s, proven_s)
        return min(bound_s, self.best.objective_s) if self.best else bound_s

    def keep(self, found: Found) -> None:
        if self.best is None or found.objective_s < self.best.objective_s:
            self.best, loser = found, self.best
        else:
            loser = found
        if loser is not None:
            self.lost.append((loser.objective_s, loser.label, ""))

    def cuts(self, table: CostTable) -> list[tuple[int, ...]]:
        """The pinned cut; or equal numbers of blocks, and equal seconds by each block's cheapest states."""
        if self.fix.cut:
            return [self.fix.cut]
        return cuts_of(self.model, Least.of(table), table.job.recompute, self.stages, self.frame)

    def frame(self, cut: tuple[int, ...]) -> Frame:
        return Frame.of(self.spaces.stages(cut), cut)

    def solve(self, entry: Entry, cut: tuple[int, ...]) -> tuple[Found | None, float]:
        """The candidate's optimum within every rank's memory, as its schedule prices it; and its proven lower bound."""
        table, limit = entry.table, float(usable_bytes(self.cluster))
        priced = self.priced(table, cut)
        allowed = [limit] * self.fix.pp
        proven_s = entry.bound_s
        for attempt in range(TRIES):
            rows = tuple(
                Row(f"memory of pipeline rank {rank}, moment {i}", coefficients, allowed[rank])
                for rank in range(self.fix.pp)
                for i, coefficients in enumerate(priced.rows(rank))
            )
            solution = solve(replace(table.problem, rows=rows))
            if attempt == 0:
                proven_s = max(proven_s, solution.bound / self.fix.pp)
            if solution.choice is None:
                self.least_bytes = min(self.least_bytes, (max(map(least_of, rows)), entry.label))
                break
            filled = [fill(priced, solution.choice, rank) for rank in range(self.fix.pp)]
            worst = max(sum(one.values()) for one in filled)
            self.least_bytes = min(self.least_bytes, (worst, entry.label))
            over = [sum(one.values()) - limit for one in filled]
            if max(over) <= 0:
                label = f"{entry.label} cut={'+'.join(map(str, cut))}"
                return priced.found(solution.choice, label, filled), proven_s
            allowed = [a - max(0.0, o) for a, o in zip(allowed, over, strict=True)]
        self.refused.append(Refusal(candidate=entry.label, reason="does not fit in the memory of every pipeline rank"))
        return None, proven_s

    def priced(self, table: CostTable, cut: tuple[int, ...]) -> PricedPipeline:
        schedule = make_schedule(self.kind, self.fix.pp, self.virtual, table.job.micro_batches)
        stages = self.spaces.stages(cut)
        if (table, cut) not in self.prices:
            self.prices[table, cut] = price_stages(table, stages)
        return PricedPipeline(table, stages, self.prices[table, cut], schedule, self.kind, self.cluster)

    def space_text(self) -> str:
        cut = "as pinned" if self.fix.cut else "evenly or by seconds"
        return SPACE.format(pp=self.fix.pp, vpp=self.virtual, kind=self.kind, cut=cut)

    def why_not(self) -> InfeasibleError:
        limit, (least, label) = usable_bytes(self.cluster), self.least_bytes
        subject = f"{self.model.name} on {self.cluster.devices} x {self.cluster.device.name} with pp={self.fix.pp}"
        unit, size = ("GB", 1e9) if limit >= 1e8 else ("MB", 1e6)
        found = f"at least {least / size:.2f} {unit} are needed ({label})" if label else "no layout satisfies the pins"
        problem = f"expected a plan within {limit / size:.2f} {unit} a device, but {found}"
        return InfeasibleError(subject, problem, "Use more devices, another pp, or a smaller micro-batch or sequence.")


def least_of(row: Row) -> float:
    """The least bytes a row can have, each node in the state that needs least."""
    return sum(float(nbytes.min()) for nbytes in row.coefficients.values())


def cuts_of(
    model: ModelGraph,
    least: Least,
    recompute: frozenset[str],
    stages: int,
    frame: Callable[[tuple[int, ...]], Frame | None],
) -> list[tuple[int, ...]]:
    """Equal numbers of blocks, and equal seconds by each block's cheapest states. `frame`: of a cut that there is."""
    blocks = [call.block for call in model.outer.calls if call.phase == "forward"]
    flat, ends = even(len(blocks), stages), [0.0, 0.0]
    if (equal := frame(flat)) is not None:
        for stage, ops in enumerate(equal.ops):
            ends[2 * stage >= stages] += sum(least.outer.get(name, 0.0) for part in ops for name in part)
    seconds = {block: sum(least.of_call(block, recompute)) for block in model.blocks}
    return list(dict.fromkeys([flat, balanced([seconds[block] for block in blocks], stages, ends)]))


def balanced(seconds: list[float], stages: int, ends: list[float]) -> tuple[int, ...]:
    """Blocks of each stage such that the longest is shortest; the first has `ends[0]` on top, the last `ends[1]`."""
    count = len(seconds)
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    spans = np.where(np.tri(count + 1, k=-1, dtype=bool), sums[:, None] - sums[None, :], np.inf)
    best, came = np.where(np.arange(count + 1) > 0, np.inf, 0.0), []
    for stage in range(1, stages + 1):
        extra = (ends[0] if stage == 1 else 0.0) + (ends[1] if stage == stages else 0.0)
        longest = np.maximum(best[None, :], spans + extra)
        came.append(longest.argmin(axis=1))
        best = longest.min(axis=1)
    cut, stop = [], count
    for starts in reversed(came):
        cut.append(stop - int(starts[stop]))
        stop = int(starts[stop])
    return tuple(reversed(cut))
