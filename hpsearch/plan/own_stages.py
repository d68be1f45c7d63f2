"""What a file says of its stages by itself, without the model: how many blocks, which parameters, what must cross.

Which stage needs a parameter outside of the blocks, the names of values between stages and the order in which blocks
are called are in the model alone; where blocks are not in the order of their numbers, that is told and not refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from hpsearch.errors import PlanError
from hpsearch.plan.patterns import matches
from hpsearch.plan.schema import ParamEntry, PipelineEntry, PlanFile, StageEntry

Fault = tuple[str, str]
OUTER = "outer"
AS_SEARCHED = "Write it as the search did, or search again with `hpsearch plan`."
UNCHECKED = (
    "Without the model nobody knows which stage needs a parameter outside of the blocks, nor what the values between "
    "stages are called; `compile` checks it."
)


def check_stages(file: PlanFile, subject: str) -> None:
    """Raises PlanError with the first of a pipeline's stages that the rest of the file contradicts."""
    if file.pipeline is None:
        return
    for faults in (_blocks, _parameters, _values):
        for problem, remedy in faults(file, file.pipeline.stages):
            raise PlanError(subject, problem, remedy)


def disorder(entry: PipelineEntry) -> str | None:
    """The first two neighbours of one list of blocks whose numbers do not follow each other, as a sentence."""
    blocks = [block for stage in entry.stages for block in stage.blocks]
    numbered = [(block, *block.rpartition(".")[::2]) for block in blocks]
    lists = {parent: [b for b, p, n in numbered if p == parent and n.isdigit()] for _, parent, _ in numbered}
    for found in lists.values():
        for before, after in pairwise(found):
            first, second = (int(name.rpartition(".")[2]) for name in (before, after))
            if second != first + 1:
                return f"{after} follows {before}: `compile` refuses that unless the model calls them so."
    return None


def _blocks(file: PlanFile, stages: tuple[StageEntry, ...]) -> Iterator[Fault]:
    inside = [entry for entry in file.parameters if entry.graph != OUTER]
    counts = {entry.graph: entry.count for entry in inside}
    told = Counter(block for stage in stages for block in stage.blocks)
    for number, stage in enumerate(stages):
        where = f"pipeline.stages[{number}].blocks"
        if not stage.blocks:
            yield f"{where}: expected at least one block, but found none", AS_SEARCHED
        for block in stage.blocks:
            if told[block] > 1:
                yield f"{where}: {block} stands {told[block]} times in the stages", "Each block is on one stage, once."
            if not any(_holds(entry, block) for entry in inside):
                yield f"{where}: no parameter is inside of {block}", "Blocks are called as the parameters' patterns."
    if sum(told.values()) != (total := sum(counts.values())):
        words = " + ".join(f"{count} {graph}" for graph, count in counts.items())
        problem = f"pipeline.stages: expected {total} blocks ({words} by the parameters' counts)"
        yield f"{problem}, but found {sum(told.values())}", "Each block is on one stage, once."


def _holds(entry: ParamEntry, block: str) -> bool:
    return matches(entry.pattern.removesuffix(f".{entry.local}"), block)


def _parameters(file: PlanFile, stages: tuple[StageEntry, ...]) -> Iterator[Fault]:
    outer = {entry.local: entry for entry in file.parameters if entry.graph == OUTER}
    for number, stage in enumerate(stages):
        where = f"pipeline.stages[{number}].parameters"
        for name, times in Counter(stage.parameters).items():
            if name not in outer:
                yield f"{where}: no parameter outside of the blocks is called {name}", AS_SEARCHED
            if times > 1:
                yield f"{where}: {name} stands {times} times", "Name it once."
    for name, entry in outer.items():
        if entry.trainable and not any(name in stage.parameters for stage in stages):
            yield f"pipeline.stages: expected {name} on one of them, but found it on none", AS_SEARCHED


def _values(file: PlanFile, stages: tuple[StageEntry, ...]) -> Iterator[Fault]:
    """Activations go to every stage but the first; gradients come back as far as something is trained."""
    last, trained = len(stages) - 1, False
    for number, stage in enumerate(stages):
        trained = trained or any(
            entry.trainable and any(_holds(entry, block) for block in stage.blocks)
            for entry in file.parameters
            if entry.graph != OUTER
        )
        for field, names, end, needed in (
            ("takes", stage.takes, number == 0, True),
            ("takes_back", stage.takes_back, number == last, trained),
        ):
            where = f"pipeline.stages[{number}].{field}"
            if end and names:
                yield f"{where}: expected none at this end, but found {', '.join(names)}", AS_SEARCHED
            if not end and needed and not names:
                yield f"{where}: expected a value of its neighbour, but found none", AS_SEARCHED
            if len(set(names)) < len(names):
                yield f"{where}: a value stands twice in {', '.join(names)}", "Name it once."
