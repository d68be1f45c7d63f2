"""The arrays of one `Problem` from prices: see cost_table.py for what they mean."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from hpsearch.cluster import Cluster
from hpsearch.cost.context import exchange_s
from hpsearch.cost.host import copies_s, hinge, states_s, unhidden_s
from hpsearch.cost.job import Job, optimizer_states
from hpsearch.cost.op_time import Floats, NodeKey, local_elements
from hpsearch.cost.saved import buffer_bytes, saved_bytes
from hpsearch.cost.scales import scales_s
from hpsearch.cost.storage import Storage
from hpsearch.cost.tokens import tokens_s
from hpsearch.graph import ITEM_BYTES
from hpsearch.layout import PARTIAL, ROLES, Collective, Layout, Mesh, Placement, redistribute
from hpsearch.layout.redistribute import is_blocked, is_reachable, kind_between
from hpsearch.solve import Flow, Hinge, Problem, Row
from hpsearch.strategy import Edge, SearchSpace


def update_s(storage: Storage, cluster: Cluster, job: Job, mesh: Mesh) -> float:
    """Seconds of the optimizer's update: it reads parameter, gradient and states of a shard, and writes all but one."""
    if storage.gradient is None:
        return 0.0
    accesses = 3 + 2 * optimizer_states(job.optimizer)
    moved = accesses * storage.static_bytes(job, mesh)["parameters"]
    return float(cluster.memory_bound_s(np.array([float(moved)]))[0])


class Assembly:
    """Turns prices into the arrays of one Problem; lives for one call of `build`."""

    def __init__(
        self,
        space: SearchSpace,
        cluster: Cluster,
        mesh: Mesh,
        job: Job,
        seconds: dict[NodeKey, Floats],
        kept: dict[NodeKey, tuple[Storage, ...]],
    ) -> None:
        self.space, self.cluster, self.mesh, self.job = space, cluster, mesh, job
        self.seconds, self.kept = seconds, kept
        self.rows = job.micro_rows()
        self.tp = space.tp
        self.eta = cluster.device.overlap_efficiency
        self._price: dict[Collective, float] = {}
        self.copies = copies_s(space, cluster, mesh, job)
        self.uncovered = unhidden_s(self.copies, space, job, self.eta)

    def problem(self, limit_bytes: float) -> Problem:
        """The problem, with `limit_bytes` of memory a device; nodes in the order of the space."""
        keys = tuple(self.space.nodes)
        index = {key: i for i, key in enumerate(keys)}
        unary = tuple(self.unary(key) + self.uncovered.get(key, 0.0) for key in keys)
        return Problem(
            sizes=tuple(len(u) for u in unary),
            names=tuple(f"{graph}/{name}" for graph, name in keys),
            unary=unary,
            flows=tuple(self.flows(index)),
            rows=(Row("memory", self.memory(index), limit_bytes), *self.at_update(index, limit_bytes)),
            hinges=tuple(self.hinges(index)),
        )

    def collective_s(self, collective: Collective) -> float:
        if collective not in self._price:
            axis = self.mesh.axis(collective.axis)
            self._price[collective] = self.cluster.collective(
                collective.kind, collective.nbytes, axis.size, axis.stride
            ).seconds
        return self._price[collective]

    def total_s(self, collectives: tuple[Collective, ...]) -> float:
        return sum(self.collective_s(c) for c in collectives)

    def on_path_s(self, collectives: tuple[Collective, ...]) -> float:
        """Seconds of collectives that compute waits for, with what such a wait costs in groups of that shape."""
        axes = [self.mesh.axis(collective.axis) for collective in collectives]
        return self.total_s(collectives) + sum(self.cluster.device.arrival_of(a.size, a.stride) for a in axes)

    def unary(self, key: NodeKey) -> Floats:
        node, m = self.space.nodes[key], self.job.micro_batches
        if node.kind == "op":
            op = self.space.graphs[key[0]].step(key[1])
            waits_s = exchange_s(self.space, key, self.seconds[key], self.mesh, self.job, self.eta, self.on_path_s)
            waits_s = waits_s + tokens_s(self.space, key, self.mesh, self.job, self.on_path_s)
            waits_s = waits_s + scales_s(self.space, key, self.mesh, self.job, self.on_path_s)
            return (self.seconds[key] + waits_s) * (node.count * m * self.job.runs(key[0], op.phase))
        if node.kind == "param":
            return np.array([node.count * self.param_s(key, storage) for storage in self.kept[key]])
        return np.zeros(len(node.rules))

    def gather_s(self, storage: Storage) -> float:
        return self.total_s(storage.gathers(self.job, self.mesh))

    def reduce_s(self, storage: Storage) -> float:
        return self.total_s(storage.reductions(self.job, self.mesh))

    def passes(self, key: NodeKey, storage: Storage) -> int:
        return 2 if key[0] in self.job.recompute else storage.passes

    def param_s(self, key: NodeKey, storage: Storage) -> float:
        """Seconds a step of one parameter that nothing can hide, and its optimizer update."""
        gathers = {"stored": 0, "step": 1, "micro_batch": self.passes(key, storage) * self.job.micro_batches}
        hideable = gathers[storage.residency] * self.gather_s(storage)
        hideable += storage.reductions_per_step(self.job) * self.reduce_s(storage)
        hideable *= 1 - self.eta
        update = update_s(storage, self.cluster, self.job, self.mesh)
        return hideable + update + states_s(storage, self.cluster, self.job, self.mesh)

    def flows(self, index: dict[NodeKey, int]) -> list[Flow]:
        found = []
        for edge in self.space.edges:
            flow = self.reduction(edge, index) if edge.phase == "reduce" else self.redistribution(edge, index)
            if flow is not None:
                found.append(flow)
        return found

    def states_of(self, key: NodeKey, given: bool, slot: int) -> tuple[Placement, ...]:
        """Placement on tp in each state of a node; a parameter has several storages for one placement."""
        node = self.space.nodes[key]
        if node.kind == "param":
            return tuple(storage.used["tp"] for storage in self.kept[key])
        return node.given(slot) if given else node.needed(slot)

    def redistribution(self, edge: Edge, index: dict[NodeKey, int]) -> Flow | None:
        made = self.states_of(edge.producer, True, edge.output)
        reads = [(r.node, self.states_of(r.node, False, r.argument)) for r in edge.readers]
        sources = sorted(set(made))
        targets = sorted({p for _, states in reads for p in states})
        price = self.price_matrix(edge, sources, targets)
        if not price.any():
            return None
        inner = all(r.node[0] == edge.value[0] and self.space.nodes[r.node].kind == "op" for r in edge.readers)
        runs = self.job.runs(edge.value[0], edge.phase) if inner else 1
        return Flow(
            name=f"{edge.value[0]}/{edge.value[1]}",
            producer=index[edge.producer],
            producer_class=np.array([sources.index(p) for p in made]),
            consumers=tuple((index[key], np.array([targets.index(p) for p in states])) for key, states in reads),
            price=price,
            weight=float(edge.count * self.job.micro_batches * runs),
        )

    def price_matrix(self, edge: Edge, sources: list[Placement], targets: list[Placement]) -> Floats:
        value = self.space.value(*edge.value)
        kept, wanted = self.followed_change(edge)
        shape, item, sizes = value.shape(self.rows), ITEM_BYTES[value.dtype], self.mesh.sizes
        fixed = edge.value[1] in self.space.graphs[edge.value[0]].routed
        price = np.empty((len(sources), len(targets)))
        if kept == wanted and self.tp == 1:
            price.fill(0.0)
            return price
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                if not is_reachable(source, target) or (fixed and source != target):
                    price[i, j] = np.inf
                elif kept == wanted:
                    price[i, j] = self.tp_change_s(value.name, edge, source, target)
                else:
                    ends = self.layout(kept, source), self.layout(wanted, target)
                    blocked = is_blocked(shape, item, *ends, sizes)
                    price[i, j] = np.inf if blocked else self.on_path_s(redistribute(shape, item, *ends, sizes))
        return price

    def tp_change_s(self, name: str, edge: Edge, source: Placement, target: Placement) -> float:
        kind = kind_between(source, target)
        if kind is None:
            return 0.0
        value = self.space.value(*edge.value)
        large = local_elements(value, self.rows, self.space.cuts(*edge.value, self.mesh)) * ITEM_BYTES[value.dtype]
        nbytes = large // self.tp if kind == "all_to_all" else large
        return self.on_path_s((Collective(kind, "tp", nbytes),))

    def layout(self, followed: Mapping[str, Placement], tp: Placement) -> Layout:
        return Layout(tuple((axis, tp if axis == "tp" else followed[ROLES[axis]]) for axis in self.mesh.names))

    def followed_change(self, edge: Edge) -> tuple[dict[str, Placement], dict[str, Placement]]:
        """By role: the placement in which a value is made, and the one its readers need (the first that differs)."""
        graph, name = edge.value
        made = {role: self.space.followed[role][graph].values[name] for role in self.mesh.followed}
        return made, {role: self._needed(edge, role, source) for role, source in made.items()}

    def _needed(self, edge: Edge, role: str, source: Placement) -> Placement:
        for reader in edge.readers:
            placed = self.space.followed[role][reader.node[0]]
            node = self.space.nodes[reader.node]
            needed = (
                Placement.parse(placed.rules[reader.node[1]][0][reader.argument])
                if node.kind == "op"
                else placed.values[reader.node[1]]
            )
            if needed != source and not (source.is_replicate and needed == PARTIAL):
                return needed
        return source

    def reduction(self, edge: Edge, index: dict[NodeKey, int]) -> Flow | None:
        """A gradient on its way to its parameter, on tp: once a step, or after each backward, by the storage."""
        (reader,) = edge.readers
        made = self.states_of(edge.producer, True, edge.output)
        kept = self.kept[reader.node]
        sources = sorted(set(made))
        price = np.zeros((len(sources), len(kept)))
        value = self.space.value(*edge.value)
        nbytes = int(np.prod(value.fixed)) * ITEM_BYTES[self.job.recipe.reduce]
        for i, source in enumerate(sources):
            for j, storage in enumerate(kept):
                kind = kind_between(source, storage.used["tp"]) if is_reachable(source, storage.used["tp"]) else "none"
                moved = nbytes // self.tp if kind == "all_to_all" else nbytes
                times = storage.reductions_per_step(self.job)
                price[i, j] = self.collective_s(Collective(kind, "tp", moved)) * times if kind else 0.0
        if not price.any():
            return None
        return Flow(
            name=f"{edge.value[0]}/{edge.value[1]} reduce",
            producer=index[edge.producer],
            producer_class=np.array([sources.index(p) for p in made]),
            consumers=((index[reader.node], np.arange(len(kept))),),
            price=price,
            weight=float(edge.count),
        )

    def hinges(self, index: dict[NodeKey, int]) -> list[Hinge]:
        """Two terms a phase and graph: every micro-batch but one hides its own traffic, that one the step's as well."""
        found: list[Hinge] = []
        if self.eta == 0:
            return found
        for graph, count in self.space.model.pieces():
            for phase in ("forward", "backward"):
                budget = self.budget(graph.name, phase, index)
                each, once = self.traffic(graph.name, phase, index)
                for name, terms, times in (
                    ("each", (each,), self.job.micro_batches - 1),
                    ("last", (each, once), 1),
                ):
                    if times and any(terms):
                        coefficients = {n: -seconds for n, seconds in budget.items()}
                        for term in terms:
                            for n, seconds in term.items():
                                coefficients[n] = coefficients.get(n, 0.0) + seconds
                        weight = self.eta * count * times
                        found.append(Hinge(f"{graph.name} {phase} {name}", coefficients, 0.0, weight))
                copies = {index[key]: seconds for key, seconds in self.copies.items() if key[0] == graph.name}
                if copies:
                    found.append(hinge(graph.name, phase, copies, budget, self.space, self.job, self.eta))
        return found

    def budget(self, graph: str, phase: str, index: dict[NodeKey, int]) -> dict[int, Floats]:
        """Compute seconds of one execution of a phase; a recomputed forward counts into backward."""
        counted = {phase, "forward"} if phase == "backward" and graph in self.job.recompute else {phase}
        return {
            index[key]: seconds
            for key, seconds in self.seconds.items()
            if key[0] == graph and self.space.graphs[graph].step(key[1]).phase in counted and seconds.any()
        }

    def traffic(self, graph: str, phase: str, index: dict[NodeKey, int]) -> tuple[dict[int, Floats], dict[int, Floats]]:
        """Seconds to hide in one execution: in each micro-batch, and once a step."""
        each: dict[int, Floats] = {}
        once: dict[int, Floats] = {}
        for key, kept in self.kept.items():
            if key[0] != graph:
                continue
            in_each, in_once = np.zeros(len(kept)), np.zeros(len(kept))
            for state, storage in enumerate(kept):
                every = storage.residency == "micro_batch"
                again = self.passes(key, storage) == 2
                gather = self.gather_s(storage) if phase == "forward" or (every and again) else 0.0
                seconds = gather + (self.reduce_s(storage) if phase == "backward" else 0.0)
                (in_each if every else in_once)[state] = seconds
            if in_each.any():
                each[index[key]] = in_each
            if in_once.any():
                once[index[key]] = in_once
        return each, once

    def at_update(self, index: dict[NodeKey, int], limit_bytes: float) -> list[Row]:
        """Where states come to the device for the update: bytes then."""
        if not self.job.states_on_host:
            return []
        found: dict[int, Floats] = {}
        for key, kept in self.kept.items():
            count = self.space.nodes[key].count
            nbytes = [float(count * sum(s.update_bytes(self.job, self.mesh).values())) for s in kept]
            found[index[key]] = np.array(nbytes)
        for key, size in buffer_bytes(self.space).items():
            found[index[key]] = np.array([float(size)])
        return [Row("memory at the update", found, limit_bytes)]

    def memory(self, index: dict[NodeKey, int]) -> dict[int, Floats]:
        """Bytes a device by node and state: parameters with all that follows them, and what backward keeps."""
        found: defaultdict[int, Floats | float] = defaultdict(float)
        for key, kept in self.kept.items():
            node = self.space.nodes[key]
            found[index[key]] = np.array(
                [
                    float(
                        node.count * sum(s.static_bytes(self.job, self.mesh).values())
                        + min(2, node.count) * s.passing_bytes(self.job, self.mesh)
                    )
                    for s in kept
                ]
            )
        for key, nbytes in saved_bytes(self.space, self.job, self.mesh).items():
            found[index[key]] = found[index[key]] + nbytes
        for key, size in buffer_bytes(self.space).items():
            found[index[key]] = found[index[key]] + np.array([float(size)])
        return {n: np.asarray(b, dtype=np.float64) for n, b in found.items() if np.any(b)}
