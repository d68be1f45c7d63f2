"""`Piece`: what is emitted once, and `Unit`: what runs once in each micro-batch.

A piece is a block class, or a segment of the outer graph between two calls. Its five callables are functions of the
emitted program: gather (rounds), forward, backward_input, backward_weight, reduce (rounds). A unit is a piece at work:
a segment, or a block for one of its calls; units exchange tensors by their names in the outer graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpsearch.errors import LoweringError
from hpsearch.lower.emit import emit_part, emit_rounds, name_list
from hpsearch.lower.local_graph import LocalGraph
from hpsearch.lower.parameters import ParamUse
from hpsearch.lower.partition import Backward, Part, Sources, make_part, needed, split_backward
from hpsearch.lower.statement import Statement


@dataclass(frozen=True)
class Piece:
    name: str
    """Python name, first word of its functions' names: `LlamaDecoderLayer`, `outer_0`."""
    graph: str
    """Name of the graph it is of."""
    uses: dict[str, ParamUse]
    """Parameters it reads or makes gradients of, by their names in the graph."""
    buffers: tuple[str, ...]
    """Buffers it reads, by their names in the graph."""
    forward: Part | None
    outputs: tuple[str, ...]
    """Local names of the results of forward."""
    saved: tuple[str, ...]
    """Local names that forward keeps for backward (block) or that backward takes from earlier units (segment)."""
    backward: Backward | None
    tangents: tuple[str, ...]
    """Local names of the gradients that come in."""
    input_grads: tuple[str, ...]
    param_grads: dict[str, str]
    """Parameter's name in the graph → local name of its gradient."""
    gather: tuple[str, ...]
    """Names of the functions of the gather, in order: issue, then waits."""
    reduce: tuple[str, ...]
    code: str

    def param_names(self, phase: str) -> tuple[str, ...]:
        """Parameters that a phase reads, by their names in the graph."""
        parts: list[Part] = []
        if phase == "forward" and self.forward is not None:
            parts = [self.forward]
        if phase == "backward" and self.backward is not None:
            parts = [self.backward.input, self.backward.weight]
        read = {name for part in parts for name in part.params}
        return tuple(local for local, use in self.uses.items() if use.name in read)


def make_piece(
    name: str,
    local: LocalGraph,
    uses: dict[str, ParamUse],
    forward: Part | None,
    outputs: Sequence[str],
    backward: Backward | None,
    tangents: Sequence[str],
    input_grads: Sequence[str],
    param_grads: dict[str, str],
) -> Piece:
    """Emits the functions of a piece."""
    graph = local.graph
    param_keys = {local.name(value): key for key, value in graph.params.items()}
    buffer_keys = {local.name(value): key for key, value in graph.buffers.items()}
    parts = [p for p in (forward, backward.input if backward else None, backward.weight if backward else None) if p]
    read = {n for p in parts for n in p.params} | {uses[key].name for key in param_grads}
    own = {key: use for key, use in uses.items() if use.name in read}
    saved = tuple(n for n in backward.input.reads if n not in tangents) if backward else ()
    gather, gather_code = emit_rounds(name, "gather", list(own.values()))
    reduce, reduce_code = emit_rounds(name, "reduce", [own[key] for key in param_grads])
    code = [gather_code]
    if forward is not None:
        gives = f"{name_list(outputs)}, {name_list(forward.writes[len(outputs) :])}"
        code.append(emit_part(f"{name}_forward", forward, param_keys, buffer_keys, {"inputs": forward.reads}, gives))
    if backward is not None:
        gives = f"{name_list(input_grads)}, {name_list(backward.kept)}"
        takes = {"saved": saved, "tangents": tangents}
        code.append(emit_part(f"{name}_backward_input", backward.input, param_keys, buffer_keys, takes, gives))
        grads = "{" + ", ".join(f'"{key}": {value}' for key, value in param_grads.items()) + "}"
        takes = {"kept": backward.kept}
        code.append(emit_part(f"{name}_backward_weight", backward.weight, param_keys, buffer_keys, takes, grads))
    code.append(reduce_code)
    buffers = tuple(dict.fromkeys(buffer_keys[n] for p in parts for n in p.buffers))
    return Piece(
        name, graph.name, own, buffers, forward, tuple(outputs), saved, backward, tuple(tangents),
        tuple(input_grads), param_grads, gather, reduce, "\n".join(c for c in code if c),
    )  # fmt: skip


def block_piece(name: str, local: LocalGraph, uses: dict[str, ParamUse]) -> Piece:
    """The piece of a block class."""
    graph = local.graph
    sources = _sources(local)
    param_grads = {key: local.name(value) for key, value in graph.param_grads.items() if value is not None}
    input_grads = [local.name(value) for value in graph.input_grads if value is not None]
    tangents = [local.name(value) for value in graph.tangents]
    outputs = [local.name(value) for value in graph.outputs]
    inputs = [local.name(value) for value in graph.inputs]
    ahead = [s for s in local.statements if s.phase == "forward"]
    behind = [s for s in local.statements if s.phase == "backward"]
    backward = split_backward(behind, input_grads, list(param_grads.values()), sources)
    saved = [n for n in backward.input.reads if n not in tangents]
    writes = [*outputs, *saved]
    forward = make_part(needed(ahead, writes), writes, sources)
    # every input is taken, in order, also those that nobody reads
    forward = Part(forward.statements, forward.params, forward.buffers, tuple(inputs), forward.writes)
    return make_piece(name, local, uses, forward, outputs, backward, tangents, input_grads, param_grads)


def _sources(local: LocalGraph) -> Sources:
    graph = local.graph
    return Sources.of(
        local.statements,
        [local.name(v) for v in graph.params.values()],
        [local.name(v) for v in graph.buffers.values()],
    )


@dataclass(frozen=True)
class Unit:
    """One step of a micro-batch: a segment, or one call of a block; forward or backward."""

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


def cut_outer(local: LocalGraph, uses: dict[str, ParamUse], block_names: dict[str, str]) -> Outer:
    """Cuts the outer graph at its calls. `block_names`: block class → its piece's name."""
    graph, sources = local.graph, _sources(local)
    param_grads = {key: local.name(value) for key, value in graph.param_grads.items() if value is not None}
    later = {local.name(value) for value in graph.outputs}
    made_forward = {w for s in local.statements if s.phase == "forward" for w in s.writes}
    made_forward |= {local.name(value) for value in graph.inputs}
    pieces: dict[str, Piece] = {}
    units: list[Unit] = []
    halves: dict[int, dict[str, object]] = {}
    for place, phase, group in reversed(_segments(local)):
        if len(group) == 1 and group[0].kind == "call":
            call = graph.calls[group[0].call]
            units.append(Unit(block_names[call.block], phase, place, call.instance, group[0].reads, group[0].writes))
            later.update(group[0].reads)
            continue
        made = [w for s in group for w in s.writes]
        writes = [n for n in dict.fromkeys(made) if n in later]
        if phase == "forward":
            part = make_part(needed(group, writes), writes, sources)
            half: dict[str, object] = {"forward": part, "outputs": writes}
            reads = part.reads
        else:
            grads = {key: value for key, value in param_grads.items() if value in made}
            backward = split_backward(group, writes, list(grads.values()), sources)
            tangents = [n for n in backward.input.reads if n not in made_forward]
            half = {"backward": backward, "tangents": tangents, "input_grads": writes, "param_grads": grads}
            reads = (*(n for n in backward.input.reads if n in made_forward), *tangents)
            if not grads and not writes:
                continue
        if phase == "forward" and not writes:
            continue
        halves.setdefault(place, {}).update(half)
        units.append(Unit(f"outer_{place}", phase, -1, -1, tuple(reads), tuple(writes)))
        later.update(reads)
    for place in sorted(halves):
        pieces[f"outer_{place}"] = _segment_piece(f"outer_{place}", local, uses, halves[place])
    return Outer(pieces, tuple(reversed(units)))


def _segment_piece(name: str, local: LocalGraph, uses: dict[str, ParamUse], half: dict[str, object]) -> Piece:
    return make_piece(
        name,
        local,
        uses,
        half.get("forward"),  # type: ignore[arg-type]
        half.get("outputs", ()),  # type: ignore[arg-type]
        half.get("backward"),  # type: ignore[arg-type]
        half.get("tangents", ()),  # type: ignore[arg-type]
        half.get("input_grads", ()),  # type: ignore[arg-type]
        half.get("param_grads", {}),  # type: ignore[arg-type]
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
    if len(number) != len(forward_calls):
        raise LoweringError("the model", "expected each instance of a block to be called once", "Report this model.")
    return [entry for entry in found if entry[2]]
