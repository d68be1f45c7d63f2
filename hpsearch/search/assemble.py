"""A solved candidate as a plan file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from hpsearch.cluster import Cluster
from hpsearch.cost import CostTable, Storage
from hpsearch.graph import Call, ModelGraph, OpGraph, Rule, slots_of
from hpsearch.layout import REPLICATE, Collective, Layout, Mesh, Placement
from hpsearch.plan import (
    SCHEMA,
    AxisEntry,
    CapacityEntry,
    CertificateEntry,
    InputEntry,
    JobEntry,
    ModelEntry,
    OffloadEntry,
    ParamEntry,
    PipelineEntry,
    Plan,
    PlanFile,
    PredictedEntry,
    Refusal,
    cluster_entry,
    model_fingerprint,
    param_patterns,
)
from hpsearch.plan.environment import environment_of
from hpsearch.plan.patterns import further_names
from hpsearch.plan.traffic import traffic
from hpsearch.search.fix import Fix
from hpsearch.search.step_memory import fullest
from hpsearch.strategy import DataPlacements, Node

LISTED_REFUSALS = 40
"""Refused candidates that a plan file lists; the rest are counted in one line."""


@dataclass(frozen=True, eq=False)
class PipelineFound:
    """What a plan says of its pipeline, and of its fullest rank."""

    entry: PipelineEntry
    compute_s: float
    """Of the busiest rank."""
    bytes: dict[str, int]


@dataclass(frozen=True, eq=False)
class Found:
    """A candidate with its optimum."""

    table: CostTable
    choice: tuple[int, ...]
    objective_s: float
    label: str
    workspace_bytes: int
    pipeline: PipelineFound | None = None

    def state(self, key: tuple[str, str]) -> int:
        return self.choice[self.table.keys.index(key)]


@dataclass(frozen=True)
class Certificate:
    bound_s: float
    considered: int
    solved: int
    pruned: int
    refused: tuple[Refusal, ...]
    lost: tuple[tuple[float, str, str], ...]
    """(seconds, label, "at least " where only a bound is known) of candidates that were not chosen."""
    space: str
    """What the bound is about."""


def plan_of(model: ModelGraph, cluster: Cluster, found: Found, certificate: Certificate, fix: Fix) -> Plan:
    """The plan file of a solved candidate, complete with its traffic and certificate."""
    table = found.table
    file = PlanFile(
        schema_version=SCHEMA,
        model=ModelEntry(name=model.name, fingerprint=model_fingerprint(model), parameters=model.num_params),
        cluster=cluster_entry(cluster),
        mesh=tuple(
            AxisEntry(
                name=a.name,
                size=a.size,
                stride=a.stride,
                tier=a.tier,
                exchange=a.exchange or None,
                order=a.order or None,
                hops=a.hops or None,
            )
            for a in table.mesh.axes
        ),
        job=_job(table, model, fix),
        inputs=_inputs(model, table),
        parameters=_parameters(model, found),
        placements=_placements(found),
        collectives=(),
        predicted=_predicted(found, 0.0),
        certificate=_certificate(found, certificate),
        pipeline=found.pipeline.entry if found.pipeline else None,
        versions=_versions(),
    )
    dtypes = (table.job.recipe.compute, table.job.recipe.reduce)
    collectives = traffic(file, model, table.mesh, dtypes, lambda c: _seconds(cluster, table.mesh, c))
    total_s = sum(c.seconds * c.calls for c in collectives)
    changed = {"collectives": collectives, "predicted": _predicted(found, total_s)}
    return Plan(file.model_copy(update=changed | {"environment": environment_of(collectives, cluster.tiers)}))


def _seconds(cluster: Cluster, mesh: Mesh, c: Collective) -> float:
    axis = mesh.axis(c.axis)
    return cluster.collective(c.kind, c.nbytes, axis.size, axis.stride).seconds


def _job(table: CostTable, model: ModelGraph, fix: Fix) -> JobEntry:
    return JobEntry(
        global_batch=table.job.global_batch,
        micro_batches=table.job.micro_batches,
        recipe=table.job.recipe.name,
        optimizer=table.job.optimizer,
        fix=fix.text,
        recompute={name: "full" if name in table.job.recompute else "none" for name in sorted(model.blocks)},
        offload=_offload(table),
        capacity=_capacity(table, fix),
    )


def _capacity(table: CostTable, fix: Fix) -> CapacityEntry | None:
    return None if fix.capacity is None else CapacityEntry(factor=fix.capacity, slots=slots_of(table.space.model))


def _offload(table: CostTable) -> OffloadEntry | None:
    job = table.job
    if not job.offload and not job.states_on_host:
        return None
    return OffloadEntry(blocks=tuple(sorted(job.offload)), optimizer=job.states_on_host)


def _inputs(model: ModelGraph, table: CostTable) -> tuple[InputEntry, ...]:
    rows = table.job.micro_rows()
    found = []
    for entry, value in zip(model.inputs, model.outer.inputs, strict=True):
        layout = table.space.layout(model.outer.name, value, REPLICATE, table.mesh)
        shape = tuple(f + p * rows for f, p in zip(entry.fixed, entry.per_row, strict=True))
        found.append(InputEntry(name=entry.name, shape=shape, dtype=entry.dtype, layout=str(layout)))
    return tuple(found)


def _parameters(model: ModelGraph, found: Found) -> tuple[ParamEntry, ...]:
    entries = []
    for (graph_name, local), pattern in param_patterns(model).items():
        graph = found.table.space.graphs[graph_name]
        key = (graph_name, graph.params[local])
        storage = found.table.storages[key][found.state(key)]
        count = 1 if graph is model.outer else len(model.fqns(graph_name, local))
        entries.append(
            _parameter(graph, local, pattern, count, storage, found, further_names(model, graph_name, local))
        )
    return tuple(entries)


def _parameter(
    graph: OpGraph, local: str, pattern: str, count: int, storage: Storage, found: Found, aliases: tuple[str, ...]
) -> ParamEntry:
    grad = graph.param_grads.get(local)
    gradient = str(_made(found, graph, grad)) if grad is not None else "R"
    return ParamEntry(
        pattern=pattern,
        graph=graph.name,
        local=local,
        shape=storage.shape,
        count=count,
        trainable=grad is not None,
        stored=str(storage.stored),
        used=str(storage.used),
        residency=storage.residency,
        gradient=gradient,
        reduce="micro_batch" if storage.residency == "micro_batch" else "step",
        aliases=aliases,
    )


def _made(found: Found, graph: OpGraph, value: str) -> Layout:
    """The layout in which an op of a graph makes a value."""
    step = graph.producer.get(value)
    node = found.table.space.nodes[graph.name, step.name if step else value]
    slot = step.outputs.index(value) if step else 0
    tp = Placement.parse(node.rules[found.state(node.key)][1][slot])
    return found.table.space.layout(graph.name, value, tp, found.table.mesh)


def _placements(found: Found) -> dict[str, dict[str, dict[str, str]]]:
    """Rule text of every step and placeholder, by axis; what replicates everywhere on an axis is left out."""
    table = found.table
    written: dict[str, dict[str, dict[str, str]]] = {name: {} for name in table.space.graphs}
    for key, node in table.space.nodes.items():
        graph, name = key
        on_tp = node.rules[0] if node.kind == "param" else node.rules[found.state(key)]
        if node.kind == "param":
            on_tp = ((), (str(table.storages[key][found.state(key)].used["tp"]),))
        by_axis = {}
        for axis in table.mesh.names:
            inputs, outputs = on_tp if axis == "tp" else _followed(table.space.on(axis, graph), node)
            if any(p != "R" for p in inputs + outputs):
                by_axis[axis] = f"{','.join(inputs)}->{','.join(outputs)}"
        if by_axis:
            written[graph][name] = by_axis
    return written


def _followed(placed: DataPlacements, node: Node) -> Rule:
    """The rule of a node on an axis that is not free."""
    name = node.key[1]
    return placed.rules[name] if node.kind == "op" else ((), (str(placed.values[name]),))


def _predicted(found: Found, communication_s: float) -> PredictedEntry:
    table = found.table
    if found.pipeline is not None:
        compute_s, filled = found.pipeline.compute_s, found.pipeline.bytes
    else:
        compute_s = _compute_s(found)
        filled = fullest(table, found.choice)
    return PredictedEntry(
        step_s=found.objective_s,
        compute_s=compute_s,
        communication_s=communication_s,
        exposed_s=max(0.0, found.objective_s - compute_s),
        bytes=filled,
        peak_bytes=sum(filled.values()),
    )


def _compute_s(found: Found) -> float:
    """Seconds a step of compute on a device, the update among it."""
    table = found.table
    compute_s = 0.0
    for i, key in enumerate(table.keys):
        node = table.space.nodes[key]
        if node.kind == "op":
            step = table.space.graphs[key[0]].step(key[1])
            runs = 0 if isinstance(step, Call) else table.job.runs(key[0], step.phase)
            compute_s += float(table.seconds[key][found.choice[i]]) * node.count * table.job.micro_batches * runs
        elif node.kind == "param":
            compute_s += node.count * table.update_s(table.storages[key][found.choice[i]])
    return compute_s


def _certificate(found: Found, certificate: Certificate) -> CertificateEntry:
    gap = max(0.0, (found.objective_s - certificate.bound_s) / found.objective_s) if found.objective_s else 0.0
    gap = 0.0 if gap < 1e-9 else gap
    refused = certificate.refused
    if len(refused) > LISTED_REFUSALS:
        more = Refusal(candidate=f"{len(refused) - LISTED_REFUSALS} more", reason="for the same kinds of reason")
        refused = (*refused[:LISTED_REFUSALS], more)
    lost = sorted(certificate.lost)[:5]
    return CertificateEntry(
        status="optimal" if gap == 0.0 else "feasible",
        objective_s=found.objective_s,
        bound_s=min(certificate.bound_s, found.objective_s),
        gap=gap,
        space=certificate.space,
        considered=certificate.considered,
        solved=certificate.solved,
        pruned=certificate.pruned,
        refused=refused,
        runners_up=tuple(Refusal(candidate=label, reason=f"{least}{seconds:.6g} s") for seconds, label, least in lost),
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in ("hpsearch", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # transformers is optional, and hpsearch may run from a checkout
            continue
    return found
