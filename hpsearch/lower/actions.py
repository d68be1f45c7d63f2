"""The step as a flat list of actions: what runs, what is gathered ahead of it, what is reduced behind it.

    gather.issue u     first collectives of u's parameters; unit u itself runs later
    gather.wait u      their results; further rounds too
    forward u          recompute u       backward_input u       backward_weight u
    free u             gathered parameters that no later unit of this phase reads
    offload.issue u    what u keeps for its backward, to host memory; offload.wait u: it has left the device
    fetch.issue u      back again; fetch.wait u: it is there
    reduce.issue u     gradients that are complete after u; reduce.next u: their next round; reduce.wait u: the last

What leaves is let go after the forward of the next unit that sends something, and called back one unit before its
backward. Gathers of the next unit that needs any are issued before a unit runs, and a reduction is waited for only
after the next one is issued, so both lie under compute. Parameters of residency `step` are gathered by the first
micro-batch alone, and gradients with reduce `step` are reduced by the last alone; their actions find nothing to do in
the others.
Every rank runs the same list in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpsearch.lower.outer import Unit
from hpsearch.lower.pieces import Piece


@dataclass(frozen=True)
class Action:
    verb: str
    unit: int
    """Index into the program's units."""
    text: str
    round: int = 0
    """For reduce.next and reduce.wait: which round of the reduction."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class UnitParams:
    """What a unit does about parameters, by their names in its graph."""

    reads: tuple[str, ...]
    gathers: tuple[str, ...]
    """Read here for the first time in this phase."""
    frees: tuple[str, ...]
    """Read here for the last time in this phase."""
    reduces: tuple[str, ...]
    """Gradients complete after this unit."""


def make_actions(
    units: Sequence[Unit],
    pieces: Mapping[str, Piece],
    unit_params: Sequence[UnitParams],
    recompute: Mapping[str, str],
    half: str = "",
    away: Collection[int] = (),
) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """(actions of forward, actions of backward) of one micro-batch. `half` of backward alone: input or weight, with the
    unit_params of that half. `away`: calls whose kept tensors wait in host memory."""
    found: dict[str, list[Action]] = {"forward": [], "backward": []}
    for phase, actions in found.items():
        places = [i for i, unit in enumerate(units) if unit.phase == phase]
        _phase(actions, places, units, pieces, unit_params, recompute, half)
    if half != "weight":
        found = {
            "forward": _with_departures(found["forward"], units, away),
            "backward": _with_returns(found["backward"], units, away),
        }
    return tuple(found["forward"]), tuple(found["backward"])


def _with_departures(actions: Sequence[Action], units: Sequence[Unit], away: Collection[int]) -> list[Action]:
    """Forward, with what leaves after its unit and is let go after the next unit of that kind."""
    found: list[Action] = []
    leaving: int | None = None
    for action in actions:
        found.append(action)
        if action.verb != "forward" or units[action.unit].instance < 0:
            continue
        if leaving is not None:
            found.append(_action("offload.wait", leaving, units))
            leaving = None
        if units[action.unit].call in away:
            found.append(_action("offload.issue", action.unit, units))
            leaving = action.unit
    return found if leaving is None else [*found, _action("offload.wait", leaving, units)]


def _with_returns(actions: Sequence[Action], units: Sequence[Unit], away: Collection[int]) -> list[Action]:
    """Backward, with what returns one unit before it is read."""
    starts: dict[int, int] = {}
    for index, action in enumerate(actions):
        if action.verb in ("recompute", "backward_input"):
            starts.setdefault(action.unit, index)
    order = sorted(starts, key=lambda unit: starts[unit])
    before: dict[int, list[Action]] = {}
    for place, unit in enumerate(order):
        if units[unit].instance >= 0 and units[unit].call in away:
            early = starts[order[place - 1]] if place else starts[unit]
            before.setdefault(early, []).append(_action("fetch.issue", unit, units))
            before.setdefault(starts[unit], []).insert(0, _action("fetch.wait", unit, units))
            if early == starts[unit]:
                before[early].reverse()
    return [one for index, action in enumerate(actions) for one in (*before.get(index, ()), action)]


def _action(verb: str, place: int, units: Sequence[Unit]) -> Action:
    return Action(verb, place, f"{verb} {units[place]}")


def _phase(
    actions: list[Action],
    places: Sequence[int],
    units: Sequence[Unit],
    pieces: Mapping[str, Piece],
    unit_params: Sequence[UnitParams],
    recompute: Mapping[str, str],
    half: str,
) -> None:
    def act(verb: str, place: int, round_: int = 0) -> None:
        actions.append(Action(verb, place, f"{verb} {units[place]}", round_))

    gathering = [p for p in places if unit_params[p].gathers]
    reducing: list[list[int]] = []  # [unit, rounds done]
    ahead = iter(gathering)
    issued = next(ahead, None)
    if issued is not None:
        act("gather.issue", issued)
    for place in places:
        unit, piece = units[place], pieces[units[place].piece]
        if place == issued:
            issued = next(ahead, None)
            if issued is not None:
                act("gather.issue", issued)
            act("gather.wait", place)
        if unit.phase == "forward":
            act("forward", place)
        if unit.phase == "backward" and half != "weight":
            if recompute.get(piece.graph) == "full":
                act("recompute", place)
            act("backward_input", place)
        if unit.phase == "backward" and half != "input":
            act("backward_weight", place)
        if unit_params[place].frees:
            act("free", place)
        if unit_params[place].reduces:
            act("reduce.issue", place)
            _advance(act, reducing, units, pieces)
            reducing.append([place, 1])
    while reducing:
        _advance(act, reducing, units, pieces)


def _advance(act, reducing: list[list[int]], units: Sequence[Unit], pieces: Mapping[str, Piece]) -> None:  # type: ignore[no-untyped-def]
    """One round further with every reduction that is under way."""
    for entry in list(reducing):
        place, done = entry
        rounds = len(pieces[units[place].piece].reduce)
        if done + 1 < rounds:
            act("reduce.next", place, done)
            entry[1] += 1
        else:
            act("reduce.wait", place, done)
            reducing.remove(entry)
