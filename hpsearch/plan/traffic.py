"""Every collective that one step of a plan issues on a rank, with the bytes handed to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from hpsearch.graph import ITEM_BYTES, ModelGraph, Op
from hpsearch.graph.scaled import scale_messages, scaled_products
from hpsearch.layout import Collective, Layout, Mesh, redistribute
from hpsearch.plan.decisions import GraphDecisions, decisions_of
from hpsearch.plan.schema import CollectiveEntry, ParamEntry, PlanFile
from hpsearch.plan.spread import exchanges
from hpsearch.strategy import attention_messages

Seconds = Callable[[Collective], float]


def traffic(
    file: PlanFile, model: ModelGraph, mesh: Mesh, dtypes: tuple[str, str], seconds: Seconds
) -> tuple[CollectiveEntry, ...]:
    """The plan's collectives. `dtypes`: (compute, reduce); `seconds` prices one call."""
    decisions = decisions_of(file, model)
    found: list[CollectiveEntry] = []
    for graph, count in model.pieces():
        found += _activations(file, decisions[graph.name], count, mesh, seconds)
        found += _scales(file, model, decisions[graph.name], count, mesh, seconds)
    for entry in file.parameters:
        found += _parameter(file, model, entry, mesh, dtypes, seconds)
    found += _loss(file, decisions[model.outer.name], mesh, seconds)
    return tuple(found)


def _activations(
    file: PlanFile, placed: GraphDecisions, count: int, mesh: Mesh, seconds: Seconds
) -> Iterator[CollectiveEntry]:
    rows = file.job.global_batch // file.job.micro_batches
    graph = placed.graph
    for op in graph.ops:
        runs = 2 if op.phase == "forward" and file.job.recompute.get(graph.name) == "full" else 1
        for c, dtype in exchanges(placed, op, lambda name: graph.values[name].shape(rows), mesh):
            calls = count * runs * file.job.micro_batches
            yield _entry(c, op.phase, f"{graph.name}/{op.name}", dtype, calls, seconds)
        messages = attention_messages(graph, op, [r.layout for r in placed.reads(op)], rows, mesh) or ()
        for (c, dtype), times in Counter(messages).items():
            calls = count * runs * file.job.micro_batches * times
            yield _entry(c, op.phase, f"{graph.name}/{op.name}", dtype, calls, seconds)
    for name, phase, target in placed.copies():
        value = graph.values[name]
        # A parameter here is one that was gathered and is cut, or gathered further, for one op.
        shape = value.fixed if value.role == "param" else value.shape(rows)
        runs = 2 if phase == "forward" and file.job.recompute.get(graph.name) == "full" else 1
        for c in redistribute(shape, ITEM_BYTES[value.dtype], placed.made[name], target, mesh.sizes):
            yield CollectiveEntry(
                kind=c.kind,
                axis=c.axis,
                phase=phase,
                what=f"{graph.name}/{name}",
                dtype=value.dtype,
                nbytes=c.nbytes,
                calls=count * runs * file.job.micro_batches,
                seconds=seconds(c),
            )


def _scales(
    file: PlanFile, model: ModelGraph, placed: GraphDecisions, count: int, mesh: Mesh, seconds: Seconds
) -> Iterator[CollectiveEntry]:
    """Products in 8 bits of which an axis cuts what is summed over."""
    graph, rows = placed.graph, file.job.global_batch // file.job.micro_batches
    for name in scaled_products(model, graph):
        op = graph.step(name)
        assert isinstance(op, Op)
        runs = 2 if op.phase == "forward" and file.job.recompute.get(graph.name) == "full" else 1
        layouts = [read.layout for read in placed.reads(op)]
        for _, c in scale_messages(graph, op, layouts, rows, mesh.sizes):
            yield _entry(c, op.phase, f"{graph.name}/{name}", "float32", count * runs * file.job.micro_batches, seconds)


def _parameter(
    file: PlanFile, model: ModelGraph, entry: ParamEntry, mesh: Mesh, dtypes: tuple[str, str], seconds: Seconds
) -> Iterator[CollectiveEntry]:
    compute, reduce = dtypes
    stored, used = Layout.parse(entry.stored), Layout.parse(entry.used)
    passes = gather_passes(file, model, entry)
    gathers = {"stored": 0, "step": 1, "micro_batch": passes * file.job.micro_batches}[entry.residency]
    if gathers:
        for c in redistribute(entry.shape, ITEM_BYTES[compute], stored, used, mesh.sizes):
            yield _entry(c, "gather", entry.pattern, compute, gathers * entry.count, seconds)
    if entry.trainable:
        times = file.job.micro_batches if entry.reduce == "micro_batch" else 1
        left = Layout.parse(entry.gradient)
        for c in redistribute(entry.shape, ITEM_BYTES[reduce], left, stored, mesh.sizes):
            yield _entry(c, "reduce", entry.pattern, reduce, times * entry.count, seconds)


def gather_passes(file: PlanFile, model: ModelGraph, entry: ParamEntry) -> int:
    """2 when backward needs the gathered parameter as well: it reads it, or runs the forward again."""
    graph = model.outer if entry.graph == model.outer.name else model.blocks[entry.graph]
    if file.job.recompute.get(entry.graph) == "full":
        return 2
    name = graph.params[entry.local]
    read = any(graph.storage(v) == name for op in graph.ops if op.phase == "backward" for v in op.inputs)
    return 2 if read else 1


def _loss(file: PlanFile, placed: GraphDecisions, mesh: Mesh, seconds: Seconds) -> Iterator[CollectiveEntry]:
    """The loss is returned whole on every rank: summed once a step over the axes on which it is an addend."""
    rows = file.job.global_batch // file.job.micro_batches
    name = placed.graph.outputs[0]
    value = placed.graph.values[name]
    for c in redistribute(value.shape(rows), ITEM_BYTES[value.dtype], placed.made[name], Layout(), mesh.sizes):
        yield _entry(c, "step", f"{placed.graph.name}/{name}", value.dtype, 1, seconds)


def _entry(c: Collective, phase: str, what: str, dtype: str, calls: int, seconds: Seconds) -> CollectiveEntry:
    return CollectiveEntry(
        kind=c.kind, axis=c.axis, phase=phase, what=what, dtype=dtype, nbytes=c.nbytes, calls=calls, seconds=seconds(c)
    )
