"""The outer graph, cut at its calls: segments become pieces, and `Unit`s say what runs one after another.

A unit is a piece at work in one micro-batch: a segment, or a block for one of its calls, forward or backward. Units
exchange tensors by their names in the outer graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpsearch.errors import LoweringError
from hpsearch.lower.local_graph import LocalGraph
from hpsearch.lower.parameters import ParamUse
from hpsearch.lower.partition import Backward, Part, make_part, needed, split_backward
from hpsearch.lower.pieces import Piece, make_piece, sources_of
from hpsearch.lower.statement import Statement


@dataclass(frozen=True)
class Unit:
    """One step of a micro-batch."""

    piece: str
    phase: str
    call: int
    """Which call of the outer graph's forward it is, or belongs to; -1 for a segment."""
    instance: int
    """Index into the model's instances; -1 for a segment."""
    reads: tuple[str, ...]
    """Names of the outer graph that it takes, in order."""
    writes: tuple[str, ...]

    def __str__(self) -> str:
        return self.piece if self.instance < 0 else f"{self.piece}[{self.instance}]"


@dataclass(frozen=True)
class Outer:
    """The outer graph as pieces and units."""

    pieces: dict[str, Piece]
    units: tuple[Unit, ...]
    """In execution order: forward, then backward."""


@dataclass
class _Halves:
    """The forward and the backward of one segment."""

    forward: Part | None = None
    outputs: tuple[str, ...] = ()
    backward: Backward | None = None
    tangents: tuple[str, ...] = ()
    input_grads: tuple[str, ...] = ()
    param_grads: dict[str, str] = field(default_factory=dict)


def cut_outer(
    local: LocalGraph,
    uses: dict[str, ParamUse],
    block_names: dict[str, str],
    gives_back: Sequence[str] = (),
    prefix: str = "outer",
) -> Outer:
    """Cuts the outer graph at its calls. `block_names`: block class → its piece's name. `gives_back`: local names that
    backward leaves for another stage. Pieces are called `prefix` and their place.

    Works from the last unit to the first, because what a segment must leave is what later units read.
    """
    cutter = _Cutter(local, gives_back, prefix)
    units: list[Unit] = []
    for place, phase, group in reversed(_segments(local)):
        if group[0].kind == "call":
            call = local.graph.calls[group[0].call]
            unit = Unit(block_names[call.block], phase, place, call.instance, group[0].reads, group[0].writes)
        elif phase == "forward":
            unit = cutter.forward(place, group)
        else:
            unit = cutter.backward(place, group)
        if unit.instance >= 0 or unit.writes or (phase == "backward" and cutter.halves[place].param_grads):
            units.append(unit)
            cutter.later.update(unit.reads)
        else:
            cutter.drop(place, phase)
    cutter.check()
    pieces = {
        f"{prefix}_{place}": make_piece(f"{prefix}_{place}", local, uses, **vars(cutter.halves[place]))
        for place in sorted(cutter.halves)
    }
    return Outer(pieces, tuple(reversed(units)))


class _Cutter:
    def __init__(self, local: LocalGraph, gives_back: Sequence[str], prefix: str) -> None:
        graph, self.prefix = local.graph, prefix
        self.graph, self.sources = graph, sources_of(local)
        self.later = {*(local.name(value) for value in graph.outputs), *gives_back}
        """Names that units behind the present one read."""
        self.ahead = {w for s in local.statements if s.phase == "forward" for w in s.writes}
        self.ahead |= {local.name(value) for value in graph.inputs}
        self.param_grads = {key: local.name(value) for key, value in graph.param_grads.items() if value is not None}
        self.halves: dict[int, _Halves] = {}

    def _leaves(self, group: list[Statement]) -> tuple[str, ...]:
        return tuple(n for n in dict.fromkeys(w for s in group for w in s.writes) if n in self.later)

    def forward(self, place: int, group: list[Statement]) -> Unit:
        writes = self._leaves(group)
        half = self.halves.setdefault(place, _Halves())
        half.forward, half.outputs = make_part(needed(group, writes), writes, self.sources), writes
        return Unit(f"{self.prefix}_{place}", "forward", -1, -1, half.forward.reads, writes)

    def backward(self, place: int, group: list[Statement]) -> Unit:
        """Takes tensors of forward (`saved`) first, then gradients (`tangents`)."""
        writes = self._leaves(group)
        made = {w for s in group for w in s.writes}
        half = self.halves.setdefault(place, _Halves())
        half.param_grads = {key: value for key, value in self.param_grads.items() if value in made}
        half.backward = split_backward(group, writes, list(half.param_grads.values()), self.sources)
        half.tangents = tuple(n for n in half.backward.input.reads if n not in self.ahead)
        half.input_grads = writes
        saved = tuple(n for n in half.backward.input.reads if n in self.ahead)
        return Unit(f"{self.prefix}_{place}", "backward", -1, -1, (*saved, *half.tangents), writes)

    def drop(self, place: int, phase: str) -> None:
        """Forgets half a segment from which nothing follows."""
        half = self.halves[place]
        if phase == "forward":
            half.forward, half.outputs = None, ()
        else:
            half.backward, half.tangents, half.input_grads = None, (), ()
        if half.forward is None and half.backward is None:
            del self.halves[place]

    def check(self) -> None:
        found = {key for half in self.halves.values() for key in half.param_grads}
        for key in self.param_grads:
            if key not in found:
                raise LoweringError(
                    f"parameter {key}",
                    "its gradient comes straight out of a block that took the parameter as an argument",
                    "Let the block own the parameter, or use it outside as well.",
                )


def _segments(local: LocalGraph) -> list[tuple[int, str, list[Statement]]]:
    """(place, phase, statements) in order: a call alone, or the statements between two calls.

    The place of a segment is the number of forward calls in front of it; backward segments take the place of the
    forward segment that they differentiate: behind the backward of call n stands segment n. A call's place is its
    number among forward calls.
    """
    graph = local.graph
    forward_calls = [c for c in graph.calls if c.phase == "forward"]
    number = {c.instance: i for i, c in enumerate(forward_calls)}
    found: list[tuple[int, str, list[Statement]]] = []
    for phase in ("forward", "backward"):
        place = 0 if phase == "forward" else len(forward_calls)
        group: list[Statement] = []
        for statement in (s for s in local.statements if s.phase == phase):
            if statement.kind != "call":
                group.append(statement)
                continue
            call = graph.calls[statement.call]
            found += [(place, phase, group), (number[call.instance], phase, [statement])]
            place = number[call.instance] + (1 if phase == "forward" else 0)
            group = []
        found.append((place, phase, group))
    return [entry for entry in found if entry[2]]
