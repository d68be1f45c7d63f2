"""The fullest moment of a step, by walking the program that a plan becomes: unit after unit, op after op.

A unit is a call of a block, or the steps of the outer graph between two calls. What lives between units is what later
ones read; inside a unit a tensor dies at its last reader, backward first makes gradients of inputs and then those of
weights, and these stay until the unit ends. Gathered parameters are those of a unit and the next; a gradient that is
reduced is there twice until the next unit is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hpsearch.cost import CostTable, Storage
from hpsearch.cost.context import exchanged_bytes
from hpsearch.cost.offload import moved, moving_calls
from hpsearch.cost.op_time import local_elements
from hpsearch.cost.saved import buffer_bytes
from hpsearch.graph import ITEM_BYTES, Call, Op, OpGraph
from hpsearch.layout import Placement
from hpsearch.search.memory import at_update


@dataclass
class Unit:
    """A call (`instance` of its class, in order) or a run of outer steps, in one phase."""

    graph: OpGraph
    phase: str
    ops: list[Op]
    call: Call | None = None
    instance: int = -1
    reads: set[str] = field(default_factory=set)
    """Roots of the outer graph."""
    makes: set[str] = field(default_factory=set)


def fullest(table: CostTable, choice: Sequence[int]) -> dict[str, int]:
    """Bytes a device by category at the fullest moment of a step; they add up to the peak."""
    best = within(table, choice)
    if table.job.states_on_host:
        later = at_update(table, choice)
        best = later if sum(later.values()) > sum(best.values()) else best
    return best


def within(table: CostTable, choice: Sequence[int]) -> dict[str, int]:
    """The same for forward and backward alone: without the optimizer's update."""
    best = max(_Walk(table, choice).moments(), key=lambda moment: sum(moment.values()))
    return {name: nbytes for name, nbytes in best.items() if nbytes or name != "buffers"}


class _Walk:
    def __init__(self, table: CostTable, choice: Sequence[int]) -> None:
        self.table, self.job, self.model = table, table.job, table.space.model
        self.outer = self.model.outer
        self.state = {key: choice[i] for i, key in enumerate(table.keys)}
        self.sizes: dict[tuple[str, str], int] = {}
        self.units = list(self._units())
        self.walks: dict[tuple[str, str], int] = {}

    # Units

    def _units(self) -> Iterator[Unit]:
        seen: Counter[tuple[str, str]] = Counter()
        group: list[Op] = []
        phase = "forward"
        for step in (*self.outer.steps, None):
            if step is None or isinstance(step, Call) or step.phase != phase:
                if group:
                    yield self._segment(phase, group)
                group = []
            if step is None:
                return
            phase = step.phase
            if isinstance(step, Op):
                group.append(step)
                continue
            block = self.model.blocks[step.block]
            place = seen[step.block, phase]
            seen[step.block, phase] += 1
            count = sum(1 for name, _ in self.model.instances if name == step.block)
            instance = place if phase == "forward" else count - 1 - place
            ops = [op for op in block.ops if op.phase == phase]
            yield self._with_ends(Unit(block, phase, ops, step, instance), [step])

    def _segment(self, phase: str, group: list[Op]) -> Unit:
        return self._with_ends(Unit(self.outer, phase, group), group)

    def _with_ends(self, unit: Unit, steps: Iterable[Op | Call]) -> Unit:
        for step in steps:
            unit.reads |= {self.outer.storage(v) for v in step.inputs}
            unit.makes |= {self.outer.storage(v) for v in step.outputs}
        return unit

    # Sizes

    def size(self, graph: OpGraph, root: str) -> int:
        """Bytes a device of the memory of a value; 0 for parameters and buffers, which are counted apart."""
        key = (graph.name, root)
        if key not in self.sizes:
            self.sizes[key] = self._size(graph, root)
        return self.sizes[key]

    def _size(self, graph: OpGraph, root: str) -> int:
        value = graph.values[root]
        if value.role in ("param", "buffer"):
            return 0
        step = graph.producer.get(root)
        name, slot, home = (step.name if step else root), 0, graph
        if isinstance(step, Call):
            home = self.model.blocks[step.block]
            given = home.outputs if step.phase == "forward" else [g for g in home.input_grads if g is not None]
            inner = given[step.outputs.index(root)]
            made = home.producer.get(inner)
            name, slot = (made.name, made.outputs.index(inner)) if made else (inner, 0)
        elif step is not None:
            slot = step.outputs.index(root)
        node = self.table.space.nodes[home.name, name]
        tp = node.given(slot)[self.state[node.key]]
        cuts = (*self.table.space.cuts(graph.name, root, self.table.mesh), (self.table.space.tp, tp))
        return local_elements(value, self.job.micro_rows(), cuts) * ITEM_BYTES[value.dtype]

    # Inside a unit

    def inside(self, unit: Unit) -> int:
        """The most that is alive at once in a unit, its inputs and what it keeps among it, without other units'."""
        key = (unit.graph.name, unit.phase) if unit.call else (unit.graph.name, unit.ops[0].name)
        if key not in self.walks:
            self.walks[key] = self._inside(unit)
        return self.walks[key]

    def _inside(self, unit: Unit) -> int:
        graph, ops = unit.graph, list(unit.ops)
        alive: set[str] = set()
        stay: set[str] = set()
        if unit.call is None:
            later = {r for other in self.units for r in other.reads if other is not unit}
            later |= {self.outer.storage(v) for v in self.outer.outputs}
            stay = {r for r in unit.makes if r in later}
        elif unit.phase == "forward":
            alive = {graph.storage(v) for v in graph.inputs}
            stay = {graph.storage(v) for v in graph.outputs}
            if graph.name not in self.job.recompute:
                stay |= {graph.storage(v) for v in graph.saved}
        else:
            alive = {graph.storage(v) for v in (*graph.saved, *graph.tangents)}
            stay = {graph.storage(v) for v in graph.input_grads if v is not None}
            if graph.name in self.job.recompute:
                alive = {graph.storage(v) for v in (*graph.inputs, *graph.tangents)}
                ops = [op for op in graph.ops if op.phase == "forward"] + ops
        if unit.phase == "backward":
            ops = self._in_order(unit, ops)
            stay |= {graph.storage(v) for v in graph.param_grads.values() if v is not None}
        return self._largest(graph, ops, alive, stay)

    def _in_order(self, unit: Unit, ops: list[Op]) -> list[Op]:
        """Forward again, then what gradients of inputs need, then the rest."""
        graph = unit.graph
        if unit.call is None:
            later = {r for other in self.units for r in other.reads if other is not unit}
            ends = {v for op in ops for v in op.outputs if graph.storage(v) in later}
        else:
            ends = {v for v in graph.input_grads if v is not None}
        first: list[Op] = []
        for op in reversed([op for op in ops if op.phase == "backward"]):
            if not ends.isdisjoint(op.outputs):
                ends.update(op.inputs)
                first.append(op)
        names = {op.name for op in first}
        again = [op for op in ops if op.phase == "forward"]
        return [*again, *reversed(first), *(op for op in ops if op.phase == "backward" and op.name not in names)]

    def _largest(self, graph: OpGraph, ops: list[Op], alive: set[str], stay: set[str]) -> int:
        last: dict[str, int] = {}
        for position, op in enumerate(ops):
            last.update((graph.storage(v), position) for v in (*op.inputs, *op.outputs))
        dying: dict[int, list[str]] = {}
        for root, position in last.items():
            dying.setdefault(position, []).append(root)
        copies = self._copies(graph, ops)
        now = sum(self.size(graph, root) for root in alive)
        most = now
        for position, op in enumerate(ops):
            for root in {graph.storage(v) for v in op.outputs} - alive:
                alive.add(root)
                now += self.size(graph, root)
            made = sum(nbytes for first, _, nbytes in copies if first == position)
            now += made
            most = max(most, now + made + self._exchanged(graph, op))  # copies are put in order by one more copy
            now -= sum(nbytes for _, end, nbytes in copies if end == position)
            for root in dying.get(position, ()):
                if root in alive and root not in stay:
                    alive.discard(root)
                    now -= self.size(graph, root)
        return most

    def _copies(self, graph: OpGraph, ops: Sequence[Op]) -> list[tuple[int, int, int]]:
        """(first op that reads it, last, bytes) of every redistributed copy: one for each layout and phase."""
        found: dict[tuple[str, str, str], tuple[int, int]] = {}
        for position, op in enumerate(ops):
            node = self.table.space.nodes[graph.name, op.name]
            for value, wanted in zip(op.inputs, node.rules[self.state[node.key]][0], strict=True):
                if self._made_as(graph, value) not in (None, wanted):
                    first, _ = found.get((value, wanted, op.phase), (position, position))
                    found[value, wanted, op.phase] = first, position
        return [(*span, self._copy_bytes(graph, value, wanted)) for (value, wanted, _), span in found.items()]

    def _exchanged(self, graph: OpGraph, op: Op) -> int:
        """What an attention over a cut sequence holds of other ranks."""
        node = self.table.space.nodes[graph.name, op.name]
        return exchanged_bytes(self.table.space, node.key, self.table.mesh, self.job, self.state[node.key])

    def _made_as(self, graph: OpGraph, value: str) -> str | None:
        """Placement on the free axis in which a value is there; None for parameters and what calls give."""
        step = graph.producer.get(value)
        if isinstance(step, Call) or graph.values[value].role in ("param", "buffer"):
            return None
        node = self.table.space.nodes[graph.name, step.name if step else value]
        return node.rules[self.state[node.key]][1][step.outputs.index(value) if step else 0]

    def _copy_bytes(self, graph: OpGraph, value: str, wanted: str) -> int:
        local = graph.values[value]
        cuts = (
            *self.table.space.cuts(graph.name, value, self.table.mesh),
            (self.table.space.tp, Placement.parse(wanted)),
        )
        return local_elements(local, self.job.micro_rows(), cuts) * ITEM_BYTES[local.dtype]

    # Between units

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Root of the outer graph → first and last unit that has it, with calls that keep it for their backward."""
        found: dict[str, tuple[int, int]] = {}
        for root in (self.outer.storage(v) for v in (*self.outer.inputs, *self.outer.tangents)):
            found[root] = (0, 0)
        back = {(u.graph.name, u.instance): i for i, u in enumerate(self.units) if u.call and u.phase == "backward"}
        for place, unit in enumerate(self.units):
            for root in unit.makes:
                found.setdefault(root, (place, place))
            ends = dict.fromkeys(unit.reads, place)
            if unit.call and unit.phase == "forward" and (unit.graph.name, unit.instance) in back:
                for value, slot in zip(unit.call.inputs, unit.graph.inputs, strict=True):
                    if self._keeps(unit.graph, slot) and not self._moves(unit, slot):
                        ends[self.outer.storage(value)] = back[unit.graph.name, unit.instance]
            for root, end in ends.items():
                start, before = found.get(root, (0, 0))
                found[root] = (start, max(before, end))
        return found

    def _keeps(self, graph: OpGraph, slot: str) -> bool:
        return graph.name in self.job.recompute or slot in {graph.storage(v) for v in graph.saved}

    def _gone(self, graph: OpGraph) -> frozenset[str]:
        if graph.name not in self.job.offload:
            return frozenset()
        return moved(self.model, graph, recompute=graph.name in self.job.recompute)

    def _moves(self, unit: Unit, slot: str) -> bool:
        return slot in self._gone(unit.graph) and self._is_away(unit.graph, unit.instance)

    def _is_away(self, graph: OpGraph, instance: int) -> bool:
        count = sum(1 for name, _ in self.model.instances if name == graph.name)
        return graph.name in self.job.offload and instance < moving_calls(count, self.job)

    def kept(self, graph: OpGraph, *, staying: bool = False) -> int:
        """What a call keeps for its backward, inputs apart; `staying`: of it what does not move."""
        if graph.name in self.job.recompute:
            return 0
        inputs = {graph.storage(v) for v in graph.inputs}
        roots = {graph.storage(v) for v in graph.saved} - inputs
        return sum(self.size(graph, root) for root in roots - (self._gone(graph) if staying else set()))

    def _waiting(self, place: int) -> int:
        """What calls other than that of a unit keep while it runs."""
        unit, total = self.units[place], 0
        started = [u for u in self.units[:place] if u.call and u.phase == "forward"]
        done = {(u.graph.name, u.instance) for u in self.units[: place + 1] if u.call and u.phase == "backward"}
        for other in started:
            if (other.graph.name, other.instance) in done:
                continue
            near = other.graph is unit.graph and other.instance == unit.instance - 1
            away = self._is_away(other.graph, other.instance)
            total += self.kept(other.graph, staying=away and not near)
            if away and near:  # its inputs on their way as well
                slots = [
                    slot for slot in other.graph.inputs if self._moves(other, slot) and self._keeps(other.graph, slot)
                ]
                total += sum(self.size(other.graph, slot) for slot in slots)
        return total

    def _between(self, place: int) -> int:
        """What other units made and will read."""
        unit, total = self.units[place], 0
        taken = unit.reads if unit.call else set()
        for root, (start, end) in self.spans.items():
            if root in taken:  # counted inside; where more steps read it, it stays behind a backward
                needed = end > place and unit.phase == "backward"
            else:
                needed = (start < place or root in self._given) and place <= end and root not in unit.makes
            total += self.size(self.outer, root) if needed else 0
        return total

    @cached_property
    def _given(self) -> set[str]:
        return {self.outer.storage(v) for v in self.outer.inputs}

    # Parameters

    def _storages(self, unit: Unit) -> Iterator[Storage]:
        """Of the parameters that a unit reads."""
        graph = unit.graph
        again = unit.phase == "backward" and unit.call and graph.name in self.job.recompute
        ops = graph.ops if again else unit.ops
        read = {graph.storage(v) for op in ops for v in op.inputs}
        for value in graph.params.values():
            if value in read:
                yield self.storage(graph, value)

    def storage(self, graph: OpGraph, value: str) -> Storage:
        return self.table.storages[graph.name, value][self.state[graph.name, value]]

    def gathered(self, place: int) -> int:
        """Copies for one unit, and for the next of its phase."""
        own = sum(s.passing_bytes(self.job, self.table.mesh) for s in self._storages(self.units[place]))
        after = self.units[place + 1] if place + 1 < len(self.units) else None
        if after is None or after.phase != self.units[place].phase:
            return own
        return own + sum(s.passing_bytes(self.job, self.table.mesh) for s in self._storages(after))

    def _gradients(self, unit: Unit) -> list[Storage]:
        graph = unit.graph
        if unit.phase != "backward":
            return []
        own = {v for op in unit.ops for v in op.outputs}
        names = [p for p, g in graph.param_grads.items() if g is not None and (unit.call or g in own)]
        return [self.storage(graph, graph.params[name]) for name in names]

    def moments(self) -> Iterator[Counter[str]]:
        job, mesh = self.job, self.table.mesh
        base: Counter[str] = Counter(parameters=0, optimizer=0, buffers=sum(buffer_bytes(self.table.space).values()))
        every = 0
        for key, kept in self.table.storages.items():
            storage, count = kept[self.state[key]], self.table.space.nodes[key].count
            static = storage.static_bytes(job, mesh)
            for name in ("parameters", "optimizer", "gathered"):
                base[name] += static.get(name, 0) * count
            every += static.get("gradients", 0) * count
        done = flying = 0
        for place, unit in enumerate(self.units):
            storages = self._gradients(unit)
            there = every if job.micro_batches > 1 else done
            extra, own, resting = (sum(f(s) for s in storages) for f in (self._fresh, self._flying, self._resting))
            found = Counter(base)
            found["gathered"] += self.gathered(place)
            found["gradients"] = there + extra + max(own, flying)
            found["activations"] = self._waiting(place) + self._between(place)
            found["workspace"] = self.inside(unit)
            yield found
            done, flying = done + resting, own

    def _fresh(self, storage: Storage) -> int:
        """Beside the gradient as ops make it: its cast, where dtypes differ."""
        recipe = self.job.recipe
        return storage.used_bytes(self.table.mesh, recipe.reduce) if recipe.compute != recipe.reduce else 0

    def _flying(self, storage: Storage) -> int:
        reduces = bool(storage.reductions(self.job, self.table.mesh))
        return storage.used_bytes(self.table.mesh, self.job.recipe.reduce) if reduces else 0

    def _resting(self, storage: Storage) -> int:
        return storage.static_bytes(self.job, self.table.mesh).get("gradients", 0)
