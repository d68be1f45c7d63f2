"""A pipeline with all its stages priced: bytes of each rank as linear rows, seconds as its schedule plays out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from hpsearch.cluster import Cluster
from hpsearch.cost import CostTable
from hpsearch.cost.op_time import Floats
from hpsearch.graph import ITEM_BYTES
from hpsearch.plan.pipeline import stage_entry
from hpsearch.plan.schema import PipelineEntry, StageEntry
from hpsearch.plan.stages import Stage
from hpsearch.schedule import Schedule
from hpsearch.schedule.flow import rank_ends_s
from hpsearch.search.assemble import Found, PipelineFound
from hpsearch.search.in_flight import Kept, most_kept
from hpsearch.search.memory import at_update
from hpsearch.search.stage_prices import StagePrices

Times = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class PricedPipeline:
    whole: CostTable
    places: tuple[Stage, ...]
    stages: tuple[StagePrices, ...]
    """Of each place."""
    schedule: Schedule
    kind: str
    cluster: Cluster

    @cached_property
    def kept(self) -> tuple[tuple[Kept, ...], ...]:
        return tuple(most_kept(self.schedule, rank) for rank in range(len(self.schedule.ranks)))

    def rows(self, rank: int) -> list[dict[int, Floats]]:
        """Bytes of a rank by node and state, for each moment at which it may be fullest; workspace is not in it."""
        found = []
        for moment in self.kept[rank]:
            total: defaultdict[int, Floats | float] = defaultdict(float)
            for stage, alive, pending in moment:
                prices = self.stages[stage]
                for part, times in ((prices.static, 1), (prices.resident, alive), (prices.pending, pending)):
                    for node, nbytes in part.items():
                        total[node] = total[node] + nbytes * times
            found.append({node: np.asarray(nbytes, dtype=np.float64) for node, nbytes in total.items()})
        return [*found, *self._at_update(rank)]

    def _at_update(self, rank: int) -> list[dict[int, Floats]]:
        """Where optimizer states rest on the host: bytes while they visit the device."""
        if not self.whole.job.states_on_host:
            return []
        total: defaultdict[int, Floats | float] = defaultdict(float)
        for prices in self.on(rank):
            for node, nbytes in prices.table.problem.rows[1].coefficients.items():
                total[prices.nodes[node]] = total[prices.nodes[node]] + nbytes
        return [{node: np.asarray(nbytes, dtype=np.float64) for node, nbytes in total.items()}]

    def on(self, rank: int) -> list[StagePrices]:
        """The stages of a rank."""
        return [prices for prices, holder in zip(self.stages, self.schedule.placement, strict=True) if holder == rank]

    @property
    def stride(self) -> int:
        """Ranks between neighbours of the pipeline axis."""
        return self.whole.mesh.num_ranks

    def hop_s(self, choice: Sequence[int], stage: int) -> float:
        """Seconds until a micro-batch's values are at the next stage: the longer of the two ways."""
        prices, ends = self.stages[stage], self.stages[stage].stage
        tier = self.cluster.tier_of(len(self.schedule.ranks), self.stride)
        found = []
        for values in (ends.gives, ends.takes_back):
            nbytes, messages = prices.passed_bytes(choice, values), len(values)
            found.append(messages * (tier.latency_s + self.cluster.device.collective_launch_s) + nbytes / tier.rate)
        return max(found)

    def shared_s(self, choice: Sequence[int], stage: int) -> float:
        """Seconds once a step of adding up the gradients of parameters that other stages hold too."""
        total_s, prices = 0.0, self.stages[stage]
        table, states = prices.table, dict(zip(prices.table.keys, prices.choice(choice), strict=True))
        for local in self.places[stage].shared:
            key = (prices.stage.graph.outer.name, prices.stage.graph.outer.params[local])
            storage = table.storages[key][states[key]]
            ranks = {self.schedule.placement[s.index] for s in self.places if local in s.shared}
            if storage.gradient is not None and len(ranks) > 1:
                count = prod(storage.stored.local_shape(storage.shape, table.mesh.sizes))
                nbytes = count * ITEM_BYTES[table.job.recipe.reduce]
                apart = (max(ranks) - min(ranks)) // (len(ranks) - 1) * self.stride
                apart = min(apart, self.cluster.devices // len(ranks))  # as groups of that size can lie
                total_s += self.cluster.collective("all_reduce", nbytes, len(ranks), apart).seconds
        return total_s

    def found(self, choice: tuple[int, ...], label: str, filled: list[Counter[str]]) -> Found:
        """The solved candidate with what the plan file says of it."""
        times = [prices.times_s(choice) for prices in self.stages]
        once = [t[3] + self.shared_s(choice, stage) for stage, t in enumerate(times)]
        hops = [self.hop_s(choice, stage) for stage in range(len(self.stages) - 1)]
        forward, backward_input, backward_weight = (np.array([[t[i] for t in times]]) for i in range(3))
        ends = rank_ends_s(self.schedule, forward, backward_input, backward_weight, np.array([hops]))[0]
        held = [[s for s, holder in enumerate(self.schedule.placement) if holder == r] for r in range(len(ends))]
        step_s = max(float(end) + sum(once[s] for s in own) for end, own in zip(ends, held, strict=True))
        compute_s = max(sum(self.stages[s].compute_s(choice) for s in own) for own in held)
        entries = tuple(
            self._entry(stage, times[stage], once[stage], hops[stage] if stage < len(hops) else 0.0, choice)
            for stage in range(len(self.stages))
        )
        tier = self.cluster.tier_of(len(self.schedule.ranks), self.stride)
        entry = PipelineEntry(
            ranks=len(self.schedule.ranks),
            tier=tier.name,
            kind=self.kind,
            actions=tuple(str(self.schedule).split("\n")),
            stages=entries,
        )
        fullest = max(filled, key=lambda one: sum(one.values()))
        pipeline = PipelineFound(entry, min(compute_s, step_s), dict(fullest))
        return Found(self.whole, choice, step_s, label, fullest["workspace"], pipeline)

    def _entry(self, stage: int, times: Times, once_s: float, hop_s: float, choice: tuple[int, ...]) -> StageEntry:
        moments = self.kept[self.schedule.placement[stage]]
        alive = max(n for moment in moments for s, n, _ in moment if s == stage)
        pending = max(n for moment in moments for s, _, n in moment if s == stage)
        filled = fill_stage(self.stages[stage], choice, alive, pending)
        return stage_entry(self.places[stage]).model_copy(
            update={
                "forward_s": times[0],
                "input_s": times[1],
                "weight_s": times[2],
                "step_s": once_s,
                "hop_s": hop_s,
                "bytes": dict(filled),
            }
        )


def fill_stage(prices: StagePrices, choice: Sequence[int], alive: int, pending: int) -> Counter[str]:
    """Bytes of a device by category while `alive` micro-batches of a stage are in flight."""
    found = Counter(prices.alone(choice))
    stage = prices.stage
    ends = (*stage.takes, *stage.gives, *stage.takes_back, *stage.gives_back)
    others = (prices.resident, max(alive, 1) - 1), (prices.pending, pending)
    found["activations"] += int(sum(_total(part, choice) * n for part, n in others) + prices.passed_bytes(choice, ends))
    return found


def fill(priced: PricedPipeline, choice: Sequence[int], rank: int) -> Counter[str]:
    """Bytes of a device of one pipeline rank by category, at its fullest moment."""
    fullest: Counter[str] = Counter()
    if priced.whole.job.states_on_host:
        for prices in priced.on(rank):
            fullest.update(at_update(prices.table, prices.choice(choice)))
    for moment in priced.kept[rank]:
        total: Counter[str] = Counter()
        for stage, alive, pending in moment:
            one = fill_stage(priced.stages[stage], choice, alive, pending)
            one["workspace"], total["workspace"] = 0, max(total["workspace"], one["workspace"])
            total.update(one)
        if sum(total.values()) > sum(fullest.values()):
            fullest = total
    return fullest


def _total(part: dict[int, Floats], choice: Sequence[int]) -> float:
    return sum(float(nbytes[choice[node]]) for node, nbytes in part.items())
