"""Plans for tests, made without a search: data axes follow the batch, other axes take what a test chooses."""

from __future__ import annotations

from collections.abc import Callable

from hpsearch.graph import ModelGraph, Op, OpGraph, Rule, Value
from hpsearch.layout import Layout, Mesh, Placement, path
from hpsearch.layout.mesh import SPLIT_ORDER
from hpsearch.layout.redistribute import is_reachable
from hpsearch.plan import (
    SCHEMA,
    AxisEntry,
    CertificateEntry,
    ClusterEntry,
    InputEntry,
    JobEntry,
    ModelEntry,
    ParamEntry,
    Plan,
    PlanFile,
    PredictedEntry,
    pattern_of,
)
from hpsearch.strategy import propagate_all

Held = dict[tuple[str, str], str]
"""(graph, value) → placement text of a placeholder on the free axis."""
Stored = Callable[[str, tuple[int, ...], Layout], Layout]
"""(FQN, shape, used layout) → layout at rest."""
Choose = Callable[[OpGraph, Op, list[Rule]], Rule]


def make_plan(
    model: ModelGraph,
    mesh: Mesh,
    rows: int,
    *,
    stored: Stored = lambda fqn, shape, used: used,
    held: Held | None = None,
    choose: Choose | None = None,
    residency: str = "micro_batch",
    reduce: str = "micro_batch",
    micro_batches: int = 1,
    recompute: dict[str, str] | None = None,
) -> Plan:
    """A plan at `rows` rows of a micro-batch. `stored(fqn, shape, used)` says where a parameter rests; `held` and
    `choose` decide the tp axis: placeholders, and the rule of an op among those that its operands can reach."""
    order = mesh.names
    placed = propagate_all(model, rows)["batch"]
    values: dict[tuple[str, str], dict[str, Placement]] = {}
    texts: dict[str, dict[str, dict[str, str]]] = {}
    blocks = [model.blocks[n] for n in model.blocks]
    for graph in [*blocks, model.outer]:
        rules = texts.setdefault(graph.name, {})
        for name, value in graph.values.items():
            if value.role != "op":
                placement = _data(placed[graph.name].values[name], mesh)
                if "tp" in order:
                    placement["tp"] = Placement.parse((held or {}).get((graph.name, name), "R"))
                values[graph.name, name] = placement
                rules[name] = {axis: f"->{p}" for axis, p in placement.items() if not p.is_replicate}
        for step in graph.steps:
            if not isinstance(step, Op):
                block = model.blocks[step.block]
                given = block.outputs if step.phase == "forward" else [g for g in block.input_grads if g is not None]
                for out, inner in zip(step.outputs, given, strict=True):
                    values[graph.name, out] = values[block.name, inner]
                continue
            by_axis: dict[str, Rule] = {}
            for axis in mesh.data_axes:
                by_axis[axis.name] = placed[graph.name].rules[step.name]
            if "tp" in order:
                by_axis["tp"] = _choose(graph, step, values, mesh, rows, choose, by_axis)
            for position, out in enumerate(step.outputs):
                values[graph.name, out] = {axis: Placement.parse(r[1][position]) for axis, r in by_axis.items()}
            rules[step.name] = {
                axis: f"{','.join(ins)}->{','.join(outs)}"
                for axis, (ins, outs) in by_axis.items()
                if any(t != "R" for t in ins + outs)
            }
    layouts = {key: Layout(tuple((a, p[a]) for a in order if a in p)) for key, p in values.items()}
    return Plan(_file(model, mesh, rows, texts, layouts, stored, residency, reduce, micro_batches, recompute or {}))


def cut_at_rest(*axes: str, dim: int = 0) -> Stored:
    """Stored as used, and `dim` cut over `axes` besides, evenly or not."""

    def stored(fqn: str, shape: tuple[int, ...], used: Layout) -> Layout:
        found = dict(used) | {axis: Placement.parse(f"S{dim}") for axis in axes if dim < len(shape)}
        return Layout(tuple((axis, found[axis]) for axis in SPLIT_ORDER if axis in found))

    return stored


def _data(placement: Placement, mesh: Mesh) -> dict[str, Placement]:
    return {axis.name: placement for axis in mesh.data_axes}


def _choose(
    graph: OpGraph,
    op: Op,
    values: dict[tuple[str, str], dict[str, Placement]],
    mesh: Mesh,
    rows: int,
    choose: Choose | None,
    by_axis: dict[str, Rule],
) -> Rule:
    legal = []
    for rule in graph.rules_of(op):
        reachable = all(
            is_reachable(values[graph.name, v]["tp"], Placement.parse(t))
            for v, t in zip(op.inputs, rule[0], strict=True)
        )
        if reachable and _even(graph, op, rule, mesh, rows, by_axis):
            legal.append(rule)
    if choose is None or len(legal) == 1:
        return next(rule for rule in legal if all(t == "R" for t in rule[0] + rule[1]))
    return choose(graph, op, legal)


def _even(graph: OpGraph, op: Op, rule: Rule, mesh: Mesh, rows: int, by_axis: dict[str, Rule]) -> bool:
    """Even cuts, and never a dim that a data axis cuts."""
    for position, (name, text) in enumerate(zip(op.inputs + op.outputs, rule[0] + rule[1], strict=True)):
        placement = Placement.parse(text)
        if not placement.is_shard:
            continue
        value: Value = graph.values[name]
        size = value.shape(rows)[placement.dim]
        if size % mesh.size("tp") or any((r[0] + r[1])[position] == text for r in by_axis.values()):
            return False
    return True


def _file(model, mesh, rows, texts, layouts, stored, residency, reduce, micro_batches, recompute) -> PlanFile:  # type: ignore[no-untyped-def]
    params = []
    for graph, count in model.pieces():
        for local, value in graph.params.items():
            fqns = (local,) if graph is model.outer else model.fqns(graph.name, local)
            shape = graph.values[value].shape(rows)
            used = layouts[graph.name, value]
            rest = stored(fqns[0], shape, used)
            grad = graph.param_grads[local]
            gradient = layouts[graph.name, grad] if grad is not None else Layout()
            path(gradient, rest, mesh.names)
            params.append(
                ParamEntry(
                    pattern=pattern_of(fqns), graph=graph.name, local=local, shape=shape, count=count,
                    trainable=grad is not None, stored=str(rest), used=str(used),
                    residency="stored" if rest == used else residency, gradient=str(gradient), reduce=reduce,
                )
            )  # fmt: skip
    inputs = tuple(
        InputEntry(
            name=name, shape=model.outer.values[name].shape(rows), dtype=model.outer.values[name].dtype,
            layout=str(layouts[model.outer.name, name]),
        )
        for name in model.outer.inputs
    )  # fmt: skip
    return PlanFile(
        schema_version=SCHEMA,
        model=ModelEntry(name=model.name, fingerprint="", parameters=model.num_params),
        cluster=ClusterEntry(name="test", digest="", devices=mesh.num_ranks, device="cpu", memory_bytes=1),
        mesh=tuple(AxisEntry(name=a.name, size=a.size, stride=a.stride, tier=a.tier) for a in mesh.axes),
        job=JobEntry(
            global_batch=rows * micro_batches, micro_batches=micro_batches, recipe=model.recipe, recompute=recompute
        ),
        inputs=inputs,
        parameters=tuple(params),
        placements=texts,
        collectives=(),
        predicted=PredictedEntry(step_s=1, compute_s=1, communication_s=0, exposed_s=0, bytes={}, peak_bytes=0),
        certificate=CertificateEntry(
            status="optimal", objective_s=1, bound_s=1, gap=0, space="", considered=1, solved=1, pruned=0, refused=()
        ),
    )
