"""`lower(captured, plan)`: from a captured graph and a plan to the program that every rank runs.

localise     each graph as one rank runs it, redistributions put in            local_graph, redistribution
partition    forward, backward_input, backward_weight; the outer graph cut      partition, pieces
parameters   gather and reduce of each, in rounds                               parameters
emit         Python source                                                      emit
actions      what runs when: gathers ahead, reductions behind                   actions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx

from hpsearch.cost.offload import STAGED, moved
from hpsearch.errors import LoweringError
from hpsearch.graph import ModelGraph, OpGraph, with_capacity
from hpsearch.graph.scaled import scaled_products
from hpsearch.layout import Layout, Mesh
from hpsearch.lower.actions import Action, UnitParams, make_actions
from hpsearch.lower.emit import HEADER, emit_reduce_loss
from hpsearch.lower.local_graph import LocalGraph, localize_graph
from hpsearch.lower.outer import Outer, Unit, cut_outer
from hpsearch.lower.parameters import ParamUse, make_slot, make_use, torch_dtype
from hpsearch.lower.pieces import Piece, block_piece
from hpsearch.lower.pipeline import PipelineProgram
from hpsearch.lower.program import BufferSlot, InputSlot, ParallelProgram, Passed, StageEnds
from hpsearch.lower.randomness import refuse_random
from hpsearch.lower.redistribution import redistribute_value
from hpsearch.lower.stage_graph import stage_graph
from hpsearch.lower.statement import Statement
from hpsearch.plan import Plan
from hpsearch.plan.decisions import decisions_of, stage_decisions
from hpsearch.plan.pipeline import cut_of
from hpsearch.plan.schema import ParamEntry, PipelineEntry
from hpsearch.plan.stages import Stage, split
from hpsearch.strategy import check_micro_batches


class Captured(Protocol):
    """What lowering reads of a `CapturedGraph`."""

    @property
    def graph(self) -> ModelGraph: ...
    @property
    def fx(self) -> Mapping[str, fx.Graph]: ...


def lower(captured: Captured, plan: Plan) -> ParallelProgram | PipelineProgram:
    """The program of `plan` for a graph captured at the plan's rows of a micro-batch; a program a stage for a pipeline.

    Raises LoweringError where the plan does not fit the graph or cuts an activation unevenly, and for random numbers;
    LegalityError where its micro-batches would not add up to the loss of the batch.
    """
    model, mesh = with_capacity(captured.graph, plan.file.job.capacity_factor), plan.mesh
    check_micro_batches(model.name, model.loss_reduction, plan.file.job.micro_batches)
    refuse_random(model, captured.fx, plan)
    decisions = decisions_of(plan.file, model)
    outer_name = model.outer.name
    local = {
        name: localize_graph(
            decisions[name], captured.fx[name], mesh, scaled_products(model, b), rows=plan.micro_batch_rows
        )
        for name, b in model.blocks.items()
    }
    names = {name: _python_name(name) for name in local}
    blocks = {n: block_piece(names[n], block, _uses(block, model, plan, n)) for n, block in local.items()}
    if plan.file.pipeline is not None:
        return _pipeline(model, captured.fx[outer_name], plan, blocks, plan.file.pipeline)
    outer = localize_graph(decisions[outer_name], captured.fx[outer_name], mesh, rows=plan.micro_batch_rows)
    cut = cut_outer(outer, _uses(outer, model, plan, outer_name), names)
    return _assemble(model, plan, outer, cut, {names[n]: piece for n, piece in blocks.items()} | cut.pieces)


def _pipeline(
    model: ModelGraph, traced: fx.Graph, plan: Plan, blocks: dict[str, Piece], entry: PipelineEntry
) -> PipelineProgram:
    """Each stage lowered alone, with the pieces of blocks that all share."""
    mesh, programs = plan.mesh, []
    for stage in split(model, cut_of(entry)):
        decisions = stage_decisions(plan.file, model, stage)[model.outer.name]
        outer = localize_graph(decisions, stage_graph(traced, stage), mesh, rows=plan.micro_batch_rows)
        own = {blocks[name].name: blocks[name] for name in stage.graph.blocks}
        names = {name: blocks[name].name for name in stage.graph.blocks}
        uses = _uses(outer, model, plan, model.outer.name, stage.shared)
        gives_back = [outer.name(value) for value in stage.gives_back]
        cut = cut_outer(outer, uses, names, gives_back, f"stage_{stage.index}")
        programs.append(_assemble(stage.graph, plan, outer, cut, own | cut.pieces, stage))
    made = decisions_of(plan.file, model)[model.outer.name].made
    inputs = []
    for leaf, value in zip(model.inputs, model.outer.inputs, strict=True):
        shape = tuple(f + p * plan.micro_batch_rows for f, p in zip(leaf.fixed, leaf.per_row, strict=True))
        local_shape = made[value].local_shape(shape, mesh.sizes)
        inputs.append(InputSlot(leaf.name, shape, torch_dtype(leaf.dtype), made[value], local_shape))
    return PipelineProgram(
        stages=tuple(programs),
        schedule=entry.schedule,
        params=tuple(make_slot(p, plan.parameter(p.fqn), model.recipe) for p in model.params.values()),
        inputs=tuple(inputs),
    )


def _python_name(block: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in block)


def _uses(
    local: LocalGraph, model: ModelGraph, plan: Plan, graph: str, shared: tuple[str, ...] = ()
) -> dict[str, ParamUse]:
    """Parameter's name in the graph → how the graph's pieces use it. The gradient of a `shared` one is an addend, in
    whatever layout."""
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
        if gradient is not None and key not in shared and gradient != Layout.parse(entry.gradient):
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
    model: ModelGraph, plan: Plan, outer: LocalGraph, cut: Outer, pieces: dict[str, Piece], stage: Stage | None = None
) -> ParallelProgram:
    graph, mesh = model.outer, plan.mesh
    canonical = {name: p.fqn for p in model.params.values() for name in (p.fqn, *p.aliases)}
    prefixes = tuple(prefix for _, prefix in model.instances)
    recompute = dict(plan.file.job.recompute)
    unit_params = _unit_params(cut.units, pieces, recompute, canonical, prefixes)
    offload = _offload(model, plan, pieces)
    away = _away(cut.units, pieces, offload, stay=STAGED if stage is None else 0)
    forward, backward = make_actions(cut.units, pieces, unit_params, recompute, away=away)
    loss = _loss(model, outer, mesh, stage)
    code = [HEADER.format(model=model.name, mesh=mesh), *(p.code for p in pieces.values())]
    code.append(emit_reduce_loss(loss.name, loss.statements) if loss.name else "")
    ends = None
    if stage is not None:
        halves = {h: _unit_params(cut.units, pieces, recompute, canonical, prefixes, h) for h in ("input", "weight")}
        acts = {h: make_actions(cut.units, pieces, params, recompute, h)[1] for h, params in halves.items()}
        ends = _ends(stage, outer, mesh, halves, acts)
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
        offload=offload,
        prefixes=prefixes,
        canonical=canonical,
        pieces=pieces,
        units=cut.units,
        unit_params=unit_params,
        forward_actions=forward,
        backward_actions=backward,
        last_reads=_last_reads(cut.units, (*ends.gives, *ends.gives_back) if ends else ()),
        input_names=tuple(outer.name(v) for v in graph.inputs),
        loss_name=loss.name,
        loss_statements=loss.statements,
        tangent_name=loss.tangent,
        tangent_dtype=loss.dtype,
        code="\n".join(c for c in code if c) + "\n",
        ends=ends,
    )


def _offload(model: ModelGraph, plan: Plan, pieces: Mapping[str, Piece]) -> dict[str, tuple[int, ...]]:
    """Block class → places of what leaves the device in the list that its calls keep."""
    entry, found = plan.file.job.offload, {}
    for piece in pieces.values() if entry is not None else ():
        if entry is not None and piece.graph in entry.blocks and piece.graph in model.blocks:
            again = plan.file.job.recompute.get(piece.graph) == "full"
            gone = moved(model, model.blocks[piece.graph], recompute=again)
            owners = model.blocks[piece.graph].inputs if again else piece.owners
            found[piece.graph] = tuple(i for i, owner in enumerate(owners) if owner in gone)
    return found


def _away(units: Sequence[Unit], pieces: Mapping[str, Piece], offload: Mapping[str, object], stay: int) -> set[int]:
    """Calls whose kept tensors leave: all of a class but the last `stay`."""
    found: set[int] = set()
    for graph in offload:
        forward = (u for u in units if u.phase == "forward" and u.instance >= 0)
        calls = [u.call for u in forward if pieces[u.piece].graph == graph]
        found.update(calls[: max(0, len(calls) - stay)])
    return found


@dataclass(frozen=True)
class _Loss:
    """The loss of a graph; no names where a stage has none."""

    name: str = ""
    statements: tuple[Statement, ...] = ()
    tangent: str = ""
    dtype: torch.dtype = torch.float32


def _loss(model: ModelGraph, outer: LocalGraph, mesh: Mesh, stage: Stage | None) -> _Loss:
    graph = model.outer
    if stage is None and len(graph.tangents) != 1:
        raise LoweringError(model.name, f"expected one loss to differentiate, but found {len(graph.tangents)}")
    value = graph.outputs[graph.tangent_of[0]] if stage is None else stage.loss
    if value is None:
        return _Loss()
    loss = outer.values[value]
    statements = redistribute_value(loss, Layout(), mesh, phase="step", what=f"{graph.name}/{value}", name="loss__R")
    tangent = outer.values[graph.tangents[-1]]
    return _Loss(loss.name, tuple(statements), tangent.name, torch_dtype(tangent.dtype))


def _ends(
    stage: Stage,
    outer: LocalGraph,
    mesh: Mesh,
    halves: Mapping[str, tuple[UnitParams, ...]],
    acts: Mapping[str, tuple[Action, ...]],
) -> StageEnds:
    def passed(values: tuple[str, ...]) -> tuple[Passed, ...]:
        found = []
        for name in values:
            value = outer.values[name]
            shape = value.layout.local_shape(value.shape, mesh.sizes)
            found.append(Passed(value.name, shape, torch_dtype(value.dtype)))
        return tuple(found)

    return StageEnds(
        index=stage.index,
        leaves=stage.leaves,
        takes=passed(stage.takes),
        gives=tuple(outer.name(value) for value in stage.gives),
        takes_back=passed(stage.takes_back),
        gives_back=tuple(outer.name(value) for value in stage.gives_back),
        input_params=halves["input"],
        weight_params=halves["weight"],
        input_actions=acts["input"],
        weight_actions=acts["weight"],
    )


def _unit_params(
    units: Sequence[Unit],
    pieces: Mapping[str, Piece],
    recompute: Mapping[str, str],
    canonical: Mapping[str, str],
    prefixes: Sequence[str],
    half: str = "",
) -> tuple[UnitParams, ...]:
    """A parameter is gathered by the first unit of a phase that reads it and freed by the last; its gradient is
    complete after the last unit that adds to it. `half`: of backward alone, input or weight."""

    def fqn(unit: Unit, local: str) -> str:
        name = local if unit.instance < 0 else f"{prefixes[unit.instance]}.{local}"
        return canonical.get(name, name)

    reads = [_reads(unit, pieces[unit.piece], recompute, half) for unit in units]
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
        grads = piece.param_grads if unit.phase == "backward" and half != "input" else {}
        found.append(
            UnitParams(
                reads[place],
                tuple(n for n, key in keys.items() if first[key] == place),
                tuple(n for n, key in keys.items() if last[key] == place),
                tuple(n for n in grads if final[fqn(unit, n), str(piece.uses[n].gradient)] == place),
            )
        )
    return tuple(found)


def _reads(unit: Unit, piece: Piece, recompute: Mapping[str, str], half: str) -> tuple[str, ...]:
    names = piece.param_names(half if half and unit.phase == "backward" else unit.phase)
    again = unit.phase == "backward" and unit.instance >= 0 and recompute.get(piece.graph) == "full"
    if again and half != "weight":
        both = {*names, *piece.param_names("forward")}
        names = tuple(n for n in piece.uses if n in both)
    return names


def _last_reads(units: Sequence[Unit], kept: Sequence[str]) -> tuple[frozenset[str], ...]:
    """For each unit what none behind it reads; `kept` is for other stages."""
    seen: set[str] = set(kept)
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
