"""A pipeline in words, and its stages as a table."""

from __future__ import annotations

from rich.table import Table

from hpsearch.plan import tables, units
from hpsearch.plan.patterns import pattern_of
from hpsearch.plan.pipeline import is_made_as
from hpsearch.plan.schema import PipelineEntry

SHOWN = 72
"""Characters of a rank's actions that are printed; the plan file has them all."""


def pipeline_words(entry: PipelineEntry) -> str:
    """What runs, and the first rank's actions."""
    each = len(entry.stages) // entry.ranks
    virtual = f", {each} on each rank" if each > 1 else ""
    actions = entry.actions[0]
    shown = actions if len(actions) <= SHOWN else actions[:SHOWN].rpartition(" ")[0] + " …"
    kind = entry.kind if is_made_as(entry, entry.kind) else f"written by hand, not that of {entry.kind}"
    return f"{len(entry.stages)} stages{virtual}, schedule {kind}; the first rank does {shown}.{_shared(entry)}"


def _shared(entry: PipelineEntry) -> str:
    """Parameters that stages on several ranks use, as a tied embedding: what happens to their gradients."""
    held: dict[str, list[int]] = {}
    for number, stage in enumerate(entry.stages):
        for name in stage.parameters:
            held.setdefault(name, []).append(number)
    placed = entry.schedule.placement
    words = ""
    for name, stages in held.items():
        if len({placed[stage] for stage in stages}) > 1:
            listed = " and ".join([", ".join(map(str, stages[:-1])), str(stages[-1])])
            words += f" {name} stands on stages {listed}; its gradient is summed over them once a step."
    return words


def stage_table(entry: PipelineEntry) -> Table:
    """Blocks, other parameters, predicted seconds of a micro-batch and bytes of a device, stage by stage."""
    names = ("stage", "rank", "blocks", "and", "forward", "backward", "once a step", "bytes a device")
    table = tables.table("Stages", *names)
    for number, (stage, rank) in enumerate(zip(entry.stages, entry.schedule.placement, strict=True)):
        table.add_row(
            str(number),
            str(rank),
            f"{len(stage.blocks)}: {', '.join(_runs(stage.blocks))}",
            ", ".join(stage.parameters) or "-",
            units.seconds(stage.forward_s),
            units.seconds(stage.input_s + stage.weight_s),
            units.seconds(stage.step_s),
            units.size(sum(stage.bytes.values())),
        )
    return table


def _runs(blocks: tuple[str, ...]) -> list[str]:
    """`model.layers.{0-3}` for neighbours of one list."""
    found: dict[tuple[str, int], list[str]] = {}
    for block in blocks:
        found.setdefault((block.rpartition(".")[0], block.count(".")), []).append(block)
    return [pattern_of(names, "{}") for names in found.values()]
