"""The pipeline of a plan: its stages against the model, its schedule against the rules of schedules."""

from __future__ import annotations

from collections.abc import Iterator

from hpsearch.errors import HpsearchError
from hpsearch.graph import ModelGraph
from hpsearch.plan.schema import PipelineEntry, PlanFile, StageEntry
from hpsearch.plan.stages import Stage, split
from hpsearch.schedule import KINDS, dry_run, make_schedule, refusal

Fault = tuple[str, str]


def cut_of(entry: PipelineEntry) -> tuple[int, ...]:
    """Blocks on each stage."""
    return tuple(len(stage.blocks) for stage in entry.stages)


def stage_entry(stage: Stage) -> StageEntry:
    return StageEntry(
        blocks=tuple(prefix for _, prefix in stage.graph.instances),
        parameters=tuple(stage.graph.outer.params),
        takes=stage.takes,
        takes_back=stage.takes_back,
    )


def pipeline_faults(file: PlanFile) -> Iterator[Fault]:
    """What is wrong with the pipeline by itself: its schedule is run dry, before any device is touched."""
    entry = file.pipeline
    if entry is None:
        return
    if entry.ranks < 2:
        yield f"pipeline.ranks: expected at least 2, but found {entry.ranks}", "Leave the pipeline out."
    if entry.kind not in KINDS:
        yield f"pipeline.kind: unknown {entry.kind!r}", f"Kinds are {', '.join(KINDS)}."
    if len(entry.actions) != entry.ranks:
        problem = f"pipeline.actions: expected one line for each of {entry.ranks} ranks, but found {len(entry.actions)}"
        yield problem, "Write the actions of each rank of the pipeline in a line of its own."
    try:
        dry_run(entry.schedule)
        placement = entry.schedule.placement
    except HpsearchError as error:
        yield f"pipeline.actions: {error.subject}: {error.problem}", error.remedy
        return
    if len(placement) != len(entry.stages):
        problem = f"pipeline.stages: expected the {len(placement)} stages that the actions name"
        yield f"{problem}, but found {len(entry.stages)}", "Each stage has its blocks and its actions."
    if entry.schedule.micro_batches != file.job.micro_batches:
        problem = f"pipeline.actions: expected {file.job.micro_batches} micro-batches (job.micro_batches)"
        yield f"{problem}, but found {entry.schedule.micro_batches}", "Make the two agree."
    if not is_made_as(entry, entry.kind):
        true = next((kind for kind in KINDS if is_made_as(entry, kind)), None)
        if true is not None:
            yield f"pipeline.kind: expected {true}, which the actions are, but found {entry.kind}", f"Write {true}."


def is_made_as(entry: PipelineEntry, kind: str) -> bool:
    """Whether the actions are those that `make_schedule` makes of the kind; else they were written by hand."""
    schedule = entry.schedule
    asked = (kind, entry.ranks, len(entry.stages) // entry.ranks, schedule.micro_batches)
    return refusal(*asked) is None and make_schedule(*asked) == schedule


def stage_faults(file: PlanFile, model: ModelGraph) -> Iterator[Fault]:
    """Where the stages are not those of the model, cut where the file cuts it."""
    if file.pipeline is None:
        return
    remedy = "Stages hold the model's blocks in the order of their calls; the rest of a stage follows from that."
    try:
        stages = split(model, cut_of(file.pipeline))
    except HpsearchError as error:
        yield f"pipeline.stages: {error.subject}: {error.problem}", error.remedy
        return
    for stage, said in zip(stages, file.pipeline.stages, strict=True):
        true = stage_entry(stage)
        for field in ("blocks", "parameters", "takes", "takes_back"):
            expected, found = getattr(true, field), getattr(said, field)
            if expected != found:
                words = [", ".join(names) or "none" for names in (expected, found)]
                yield f"pipeline.stages[{stage.index}].{field}: expected {words[0]}, but found {words[1]}", remedy
