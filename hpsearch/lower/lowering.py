"""`lower(captured, plan)`: from a captured graph and a plan to the program that every rank runs.

localise     each graph as one rank runs it, redistributions put in            local_graph, redistribution
partition    forward, backward_input, backward_weight; the outer graph cut      partition, pieces
parameters   gather and reduce of each, in rounds                               parameters
emit         Python source                                                      emit
actions      what runs when: gathers ahead, reductions behind                   actions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import fx

from hpsearch.errors import LoweringError
from hpsearch.graph import ModelGraph, OpGraph
from hpsearch.layout import Layout, Mesh
from hpsearch.lower.actions import UnitParams, make_actions
from hpsearch.lower.emit import HEADER, emit_reduce_loss
from hpsearch.lower.local_graph import LocalGraph, localize_graph
from hpsearch.lower.outer import Outer, Unit, cut_outer
from hpsearch.lower.parameters import ParamUse, make_slot, make_use, torch_dtype
from hpsearch.lower.pieces import Piece, block_piece
from hpsearch.lower.program import BufferSlot, InputSlot, ParallelProgram
from hpsearch.lower.randomness import refuse_random
from hpsearch.lower.redistribution import redistribute_value
from hpsearch.plan import Plan
from hpsearch.plan.decisions import decisions_of
from hpsearch.plan.schema import ParamEntry
from hpsearch.strategy import check_micro_batches


class Captured(Protocol):
    """What lowering reads of a `CapturedGraph`."""

    @property
    def graph(self) -> ModelGraph: ...
    @property
    def fx(self) -> Mapping[str, fx.Graph]: ...


def lower(captured: Captured, plan: Plan) -> ParallelProgram:
    """The program of `plan` for a graph captured at the plan's rows of a micro-batch.

    Raises LoweringError where the plan does not fit the graph or cuts an activation unevenly, and for random numbers;
    LegalityError where its micro-batches would not add up to the loss of the batch.
    """
    model, mesh = captured.graph, plan.mesh
    check_micro_batches(model.name, model.loss_reduction, plan.file.job.micro_batches)
    refuse_random(model, captured.fx, plan)
    decisions = decisions_of(plan.file, model)
    local = {name: localize_graph(decided, captured.fx[name], mesh) for name, decided in decisions.items()}
    outer_name = model.outer.name
    outer = local.pop(outer_name)
    names = {name: _python_name(name) for name in local}
    pieces = {names[n]: block_piece(names[n], block, _uses(block, model, plan, n)) for n, block in local.items()}
    cut = cut_outer(outer, _uses(outer, model, plan, outer_name), names)
    pieces |= cut.pieces
    return _assemble(model, plan, outer, cut, pieces)


def _python_name(block: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in block)


def _uses(local: LocalGraph, model: ModelGraph, plan: Plan, graph: str) -> dict[str, ParamUse]:
    """Parameter's name in the graph → how the graph's pieces use it."""
    found: dict[str, ParamUse] = {}
    for key, value in local.graph.params.items():
        entry = _entry(local.graph, model, plan, key)
        used, grad = local.values[value], local.graph.param_grads.get(key)
        if Layout.parse(entry.used) != used.layout:
            raise LoweringError(
                f"parameter {entry.pattern}",
                f"used layout is {entry.used}, but {graph} places it {used.layout}",
                "Make `used` and the placement of the parameter agree.",
            )
        gradient = None if grad is None else local.layout(grad)
        if gradient is not None and gradient != Layout.parse(entry.gradient):
            raise LoweringError(
                f"parameter {entry.pattern}",
                f"gradient layout is {entry.gradient}, but backward of {graph} leaves it {gradient}",
                "Make `gradient` agree with the rule of the op that makes it.",
            )
        found[key] = make_use(key, used, entry, gradient, model.recipe, plan.mesh)
    return found


def _entry(graph: OpGraph, model: ModelGraph, plan: Plan, key: str) -> ParamEntry:
    for entry in plan.file.parameters:
        if entry.graph == graph.name and entry.local == key:
            return entry
    return plan.parameter(key if graph is model.outer else model.fqns(graph.name, key)[0])


def _assemble(
    model: ModelGraph, plan: Plan, outer: LocalGraph, cut: Outer, pieces: dict[str, Piece]
) -> ParallelProgram:
    graph, mesh = model.outer, plan.mesh
    canonical = {name: p.fqn for p in model.params.values() for name in (p.fqn, *p.aliases)}
    prefixes = tuple(prefix for _, prefix in model.instances)
    recompute = dict(plan.file.job.recompute)
    unit_params = _unit_params(cut.units, pieces, recompute, canonical, prefixes)
    forward, backward = make_actions(cut.units, pieces, unit_params, recompute)
    if len(graph.tangents) != 1:
        raise LoweringError(model.name, f"expected one loss to differentiate, but found {len(graph.tangents)}")
    loss = outer.values[graph.outputs[graph.tangent_of[0]]]
    loss_statements = redistribute_value(
        loss, Layout(), mesh, phase="step", what=f"{graph.name}/{graph.outputs[graph.tangent_of[0]]}", name="loss__R"
    )
    code = [HEADER.format(model=model.name, mesh=mesh), *(p.code for p in pieces.values())]
    code.append(emit_reduce_loss(loss.name, loss_statements))
    tangent = outer.values[graph.tangents[0]]
    return ParallelProgram(
        name=model.name,
        mesh=mesh,
        recipe=model.recipe,
        params=tuple(make_slot(p, plan.parameter(p.fqn), model.recipe) for p in model.params.values()),
        inputs=tuple(_input_slot(outer, i.name, v, mesh) for i, v in zip(model.inputs, graph.inputs, strict=True)),
        buffer_slots=_buffers(outer, cut.units, pieces, prefixes, model),
        loss_reduction=model.loss_reduction,
        micro_batches=plan.file.job.micro_batches,
        recompute=recompute,
        prefixes=prefixes,
        canonical=canonical,
        pieces=pieces,
        units=cut.units,
        unit_params=unit_params,
        forward_actions=forward,
        backward_actions=backward,
        last_reads=_last_reads(cut.units),
        input_names=tuple(outer.name(v) for v in graph.inputs),
        loss_name=loss.name,
        loss_statements=tuple(loss_statements),
        tangent_name=tangent.name,
        tangent_dtype=torch_dtype(tangent.dtype),
        code="\n".join(c for c in code if c) + "\n",
    )


def _unit_params(
    units: Sequence[Unit],
    pieces: Mapping[str, Piece],
    recompute: Mapping[str, str],
    canonical: Mapping[str, str],
    prefixes: Sequence[str],
) -> tuple[UnitParams, ...]:
    """A parameter is gathered by the first unit of a phase that reads it and freed by the last; its gradient is
    complete after the last unit that adds to it."""

    def fqn(unit: Unit, local: str) -> str:
        name = local if unit.instance < 0 else f"{prefixes[unit.instance]}.{local}"
        return canonical.get(name, name)

    reads = [_reads(unit, pieces[unit.piece], recompute) for unit in units]
    first: dict[tuple[str, str, str], int] = {}
    last: dict[tuple[str, str, str], int] = {}
    final: dict[tuple[str, str], int] = {}
    for place, unit in enumerate(units):
        uses = pieces[unit.piece].uses
        for local in reads[place]:
            key = unit.phase, fqn(unit, local), str(uses[local].used)
            first.setdefault(key, place)
            last[key] = place
        if unit.phase == "backward":
            final |= {(fqn(unit, n), str(uses[n].gradient)): place for n in pieces[unit.piece].param_grads}
    found = []
    for place, unit in enumerate(units):
        piece = pieces[unit.piece]
        keys = {n: (unit.phase, fqn(unit, n), str(piece.uses[n].used)) for n in reads[place]}
        grads = piece.param_grads if unit.phase == "backward" else {}
        found.append(
            UnitParams(
                reads[place],
                tuple(n for n, key in keys.items() if first[key] == place),
                tuple(n for n, key in keys.items() if last[key] == place),
                tuple(n for n in grads if final[fqn(unit, n), str(piece.uses[n].gradient)] == place),
            )
        )
    return tuple(found)


def _reads(unit: Unit, piece: Piece, recompute: Mapping[str, str]) -> tuple[str, ...]:
    names = piece.param_names(unit.phase)
    if unit.phase == "backward" and unit.instance >= 0 and recompute.get(piece.graph) == "full":
        both = {*names, *piece.param_names("forward")}
        names = tuple(n for n in piece.uses if n in both)
    return names


def _last_reads(units: Sequence[Unit]) -> tuple[frozenset[str], ...]:
    seen: set[str] = set()
    found = []
    for unit in reversed(units):
        found.append(frozenset(n for n in unit.reads if n not in seen))
        seen.update(unit.reads)
    return tuple(reversed(found))


def _input_slot(outer: LocalGraph, name: str, value_name: str, mesh: Mesh) -> InputSlot:
    value = outer.values[value_name]
    local = value.layout.local_shape(value.shape, mesh.sizes)
    return InputSlot(name, value.shape, torch_dtype(value.dtype), value.layout, local)


def _buffers(
    outer: LocalGraph, units: Sequence[Unit], pieces: Mapping[str, Piece], prefixes: Sequence[str], model: ModelGraph
) -> tuple[BufferSlot, ...]:
    found: dict[str, BufferSlot] = {}
    for unit in units:
        piece = pieces[unit.piece]
        graph = model.outer if piece.graph == model.outer.name else model.blocks[piece.graph]
        for key in piece.buffers:
            value = graph.values[graph.buffers[key]]
            fqn = key if unit.instance < 0 else f"{prefixes[unit.instance]}.{key}"
            found.setdefault(fqn, BufferSlot(fqn, value.shape(model.rows), torch_dtype(value.dtype)))
    return tuple(found.values())
