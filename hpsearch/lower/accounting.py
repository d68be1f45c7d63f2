"""What a program sends, by reading it; what it sent, by counting; and how much of it compute covers, by simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from hpsearch.lower.outer import Unit
from hpsearch.lower.program import ParallelProgram
from hpsearch.lower.statement import Sent, Statement
from hpsearch.plan.schema import CollectiveEntry
from hpsearch.schedule.timeline import Event, Timeline, simulate


def collectives_of(program: ParallelProgram) -> tuple[CollectiveEntry, ...]:
    """Every collective of one step on a rank, in the form of the plan's list, without prices (`seconds` is 0)."""
    counted: Counter[tuple[str, Sent]] = Counter()
    kept: set[tuple[str, Sent]] = set()
    for place, unit in enumerate(program.units):
        for phase, sent in _unit_sends(program, unit):
            counted[phase, sent] += program.micro_batches
        for phase, local, sent in _param_sends(program, place):
            slot = program.slot(program.fqn(unit, local))
            if phase == "reduce":
                counted[phase, sent] += 1 if slot.reduce == "step" else program.micro_batches
            elif slot.residency != "step":
                counted[phase, sent] += program.micro_batches
            elif (slot.fqn, sent) not in kept:  # gathered by the first unit that reads it, then kept
                kept.add((slot.fqn, sent))
                counted[phase, sent] += 1
    counted.update(("step", sent) for sent in _sends(program.loss_statements))
    return tuple(
        CollectiveEntry(
            kind=s.kind, axis=s.axis, phase=phase, what=s.what, dtype=s.dtype, nbytes=s.nbytes, calls=calls, seconds=0.0
        )
        for (phase, s), calls in counted.items()
    )


def _sends(statements: tuple[Statement, ...]) -> Iterator[Sent]:
    for statement in statements:
        if statement.sent is not None:
            yield statement.sent
        yield from statement.inside


def _unit_sends(program: ParallelProgram, unit: Unit) -> Iterator[tuple[str, Sent]]:
    """Collectives between ops, in one run of a unit; a forward run again in backward counts as forward."""
    piece = program.pieces[unit.piece]
    if piece.forward is not None and (unit.phase == "forward" or program.runs_again(unit)):
        yield from (("forward", sent) for sent in _sends(piece.forward.statements))
    if piece.backward is not None and unit.phase == "backward":
        for part in (piece.backward.input, piece.backward.weight):
            yield from (("backward", sent) for sent in _sends(part.statements))


def _param_sends(program: ParallelProgram, place: int) -> Iterator[tuple[str, str, Sent]]:
    """(gather or reduce, parameter's name in the graph, what is sent) of a unit."""
    piece, does = program.pieces[program.units[place].piece], program.unit_params[place]
    for phase, names in (("gather", does.gathers), ("reduce", does.reduces)):
        for local in names:
            rounds = piece.uses[local].gather if phase == "gather" else piece.uses[local].reduce
            yield from ((phase, local, sent) for statements in rounds for sent in _sends(statements))


class CollectiveCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is handed to functional collectives while it is open."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        """Kind → bytes, by the convention of layout/redistribute.py."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(str(func))
        if kind is not None:
            self.calls[kind] += 1
            self.nbytes[kind] += args[0].nbytes * (args[1] if kind == "all_gather" else 1)
        return func(*args, **(kwargs or {}))


_KINDS = {
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce_scatter",
    "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_to_all_single.default": "all_to_all",
}


@contextmanager
def count_collectives() -> Iterator[CollectiveCount]:
    """`with count_collectives() as count: bound.step(...)`: then `count.nbytes["all_gather"]`."""
    with CollectiveCount() as count:
        yield count


@dataclass(frozen=True)
class Overlap:
    """How one step of a program plays out if collectives and compute take the seconds they were priced at."""

    timeline: Timeline
    parameter_s: float
    """Seconds of parameter gathers and gradient reductions, summed."""
    uncovered_s: float
    """Seconds that compute stood still waiting for them."""

    @property
    def covered(self) -> float:
        """Share of gather and reduction seconds that lie under compute."""
        return 1.0 - self.uncovered_s / self.parameter_s if self.parameter_s else 1.0


CollectiveSeconds = Callable[[Sent], float]
OpSeconds = Callable[[str, str], float]
"""(graph, op) → seconds of the op on one rank."""


def overlap_of(program: ParallelProgram, collective_s: CollectiveSeconds, op_s: OpSeconds) -> Overlap:
    """Plays the actions of one step. Collectives of one axis are serial; those between ops hold compute up."""
    player = _Player(program, collective_s, op_s)
    for micro_batch in range(program.micro_batches):
        player.play(micro_batch)
    timeline = simulate(player.events)
    idle, free = 0.0, 0.0
    for span in timeline.spans:
        if span.event.resource == "compute":
            idle, free = idle + span.start_s - free, span.end_s
    # what remains after the collectives between ops is due to parameters, also where one of those queued behind them
    return Overlap(timeline, player.parameter_s, max(0.0, idle - player.between_s))


class _Player:
    """Turns actions into events: compute in order, collectives on their axis, a wait as an event of no length."""

    def __init__(self, program: ParallelProgram, collective_s: CollectiveSeconds, op_s: OpSeconds) -> None:
        self.program, self.collective_s, self.op_s = program, collective_s, op_s
        self.events: list[Event] = []
        self.parameter_s = 0.0
        self.between_s = 0.0
        self.last = "start"
        self.flying: dict[tuple[int, str], list[list[Sent]]] = {}
        self.landing: dict[tuple[int, str], list[str]] = {}
        self.add("start", "compute", 0.0, ())

    def add(self, name: str, resource: str, seconds: float, after: tuple[str, ...]) -> str:
        unique = f"{name} #{len(self.events)}"
        self.events.append(Event(unique, resource, seconds, after))
        if resource == "compute":
            self.last = unique
        return unique

    def play(self, micro_batch: int) -> None:
        final = micro_batch == self.program.micro_batches - 1
        for action in self.program.actions:
            unit, verb = self.program.units[action.unit], action.verb
            if verb in ("gather.issue", "reduce.issue"):
                self._issue(action.unit, verb.partition(".")[0], micro_batch == 0, final)
            elif verb in ("gather.wait", "reduce.wait"):
                self._wait(action.unit, verb.partition(".")[0], to_the_end=True)
            elif verb == "reduce.next":
                self._wait(action.unit, "reduce", to_the_end=False)
            elif verb in ("forward", "recompute", "backward_input", "backward_weight"):
                self._compute(unit, verb)

    def _issue(self, place: int, phase: str, first: bool, final: bool) -> None:
        program, unit = self.program, self.program.units[place]
        rounds: list[list[Sent]] = []
        does = program.unit_params[place]
        for local in does.gathers if phase == "gather" else does.reduces:
            use = program.pieces[unit.piece].uses[local]
            slot = program.slot(program.fqn(unit, local))
            if phase == "gather":
                due = slot.residency != "step" or (first and unit.phase == "forward")
            else:
                due = slot.reduce == "micro_batch" or final
            sends = [s for statements in (use.gather if phase == "gather" else use.reduce) for s in _sends(statements)]
            for index, sent in enumerate(sends if due else ()):
                if index == len(rounds):
                    rounds.append([])
                rounds[index].append(sent)
        self.flying[place, phase], self.landing[place, phase] = rounds, []
        self._send(place, phase)

    def _send(self, place: int, phase: str) -> None:
        rounds = self.flying[place, phase]
        for sent in rounds.pop(0) if rounds else ():
            seconds = self.collective_s(sent)
            self.parameter_s += seconds
            name = self.add(f"{phase} {sent.what}", sent.axis, seconds, (self.last,))
            self.landing[place, phase].append(name)

    def _wait(self, place: int, phase: str, to_the_end: bool) -> None:
        while True:
            landed, self.landing[place, phase] = self.landing[place, phase], []
            if landed:
                self.add(f"wait {phase} {self.program.units[place]}", "compute", 0.0, tuple(landed))
            self._send(place, phase)
            if not to_the_end or not self.landing[place, phase]:
                return

    def _compute(self, unit: Unit, verb: str) -> None:
        piece = self.program.pieces[unit.piece]
        part = {
            "forward": piece.forward,
            "recompute": piece.forward,
            "backward_input": piece.backward.input if piece.backward else None,
            "backward_weight": piece.backward.weight if piece.backward else None,
        }[verb]
        seconds = 0.0
        for statement in part.statements if part else ():
            if statement.op:
                seconds += self.op_s(piece.graph, statement.op)
            for sent in _sends((statement,)):
                sent_s = self.collective_s(sent)
                self.between_s += sent_s
                name = self.add(f"{verb} {sent.what}", sent.axis, sent_s, (self.last,))
                self.add(f"wait {verb} {sent.what}", "compute", 0.0, (name,))
        self.add(f"{verb} {unit}", "compute", seconds, ())
