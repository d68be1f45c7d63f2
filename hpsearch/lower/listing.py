"""A program as one text to read: where a rank stands, the functions that it runs, and the order they run in."""

from __future__ import annotations

from collections.abc import Iterator

from hpsearch.lower.pipeline import PipelineProgram
from hpsearch.lower.program import ParallelProgram


def listing(program: ParallelProgram | PipelineProgram, rank: int) -> str:
    """What `rank` runs, as Python: its functions, with the order of a micro-batch's actions and, in a pipeline, of all
    micro-batches as comments behind them."""
    return "\n".join([f"# {_place(program, rank)}", *_body(program, rank), ""])


def _place(program: ParallelProgram | PipelineProgram, rank: int) -> str:
    stages = len(program.schedule.ranks) if isinstance(program, PipelineProgram) else 1
    name = f"Rank {rank} of {stages * program.mesh.num_ranks}"
    place = ", ".join(f"{axis}={at}" for axis, at in program.mesh.coordinate(rank).items()) or "the only one"
    if not isinstance(program, PipelineProgram):
        return f"{name}: {place}."
    own = rank // program.mesh.num_ranks
    held = program.stages_of(own)
    words = f"stage{'s' * (len(held) > 1)} {', '.join(map(str, held))} of the {len(program.stages)} from 0 on"
    return f"{name}: pp={own}, {place}. It holds {words}."


def _body(program: ParallelProgram | PipelineProgram, rank: int) -> Iterator[str]:
    if not isinstance(program, PipelineProgram):
        yield program.code
        yield from _order("Of one micro-batch", program)
        return
    own = rank // program.mesh.num_ranks
    for index in program.stages_of(own):
        stage = program.stages[index]
        yield f"# Stage {index}\n{stage.code}"
        yield from _order(f"Stage {index}, of one micro-batch", stage)
        yield ""
    yield "# A step: stage, F forward, B backward (I of inputs, W of weights), micro-batch"
    yield f"# {str(program.schedule).splitlines()[own]}"


def _order(title: str, program: ParallelProgram) -> Iterator[str]:
    yield f"# {title}, in this order:"
    for action in program.actions:
        unit = program.units[action.unit]
        yield f"#   {action.verb} {program.prefixes[unit.instance] if unit.instance >= 0 else unit}"
