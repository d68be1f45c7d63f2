"""Do the decisions of a plan fit the model that it is for? What hand edits can break, once the fingerprint agrees.

Every operation must run by a rule of its table (anything else would compute something else), and the file says some
layouts twice: a parameter's used layout and gradient, an input's layout. They must agree with the placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpsearch.errors import PlanError
from hpsearch.graph import ModelGraph, Op, OpGraph, Rule, slots_of, with_capacity
from hpsearch.layout import ROLES, Layout
from hpsearch.plan.decisions import GraphDecisions, decisions_of
from hpsearch.plan.fingerprint import parameter_differences, step_differences
from hpsearch.plan.pipeline import stage_faults
from hpsearch.plan.schema import PlanFile
from hpsearch.strategy import rules_along

Fault = tuple[str, str]
AS_THE_MODEL = "Write it as the model has it, or search again with `hpsearch plan`."
AS_THE_OPERATION = "Edit both, or search again with `hpsearch plan` and --fix."


def check_consistency(file: PlanFile, model: ModelGraph, subject: str) -> None:
    """Raises PlanError with the first placement that the model cannot take or that another field contradicts."""
    for problem, remedy in _named_alike(file, model):
        raise PlanError(subject, problem, remedy)
    decisions = decisions_of(file, model)
    for faults in (
        _rules(file, model),
        _parameters(file, decisions),
        _inputs(file, model, decisions[model.outer.name]),
        stage_faults(file, model),
        _capacity(file, model),
    ):
        for problem, remedy in faults:
            raise PlanError(subject, problem, remedy)


def _named_alike(file: PlanFile, model: ModelGraph) -> Iterator[Fault]:
    """The fingerprint is of the model alone; what an edit did to names and shapes shows only here."""
    for found in (*parameter_differences(file, model), *step_differences(file, model)):
        yield found, AS_THE_MODEL
    entry = file.model
    for field, said, true in (("name", entry.name, model.name), ("parameters", entry.parameters, model.num_params)):
        if said != true:
            yield f"model.{field}: expected {true}, but found {said}", AS_THE_MODEL
    then, now = [(i.name, i.dtype) for i in file.inputs], [(i.name, i.dtype) for i in model.inputs]
    if then != now:
        words = [", ".join(f"{name} {dtype}" for name, dtype in side) or "none" for side in (now, then)]
        yield f"inputs: expected {words[0]}, but found {words[1]}", AS_THE_MODEL


def _rules(file: PlanFile, model: ModelGraph) -> Iterator[Fault]:
    for graph, _ in model.pieces():
        placed = file.placements.get(graph.name, {})
        for op in graph.ops:
            for axis, text in placed.get(op.name, {}).items():
                along = next((a for a in file.mesh if a.name == axis and ROLES[axis] == "sequence"), None)
                rules = rules_along(graph, op, along.exchange or "") if along else graph.rules_of(op)
                yield from _rule(graph, op, axis, text, rules)


def _rule(graph: OpGraph, op: Op, axis: str, text: str, rules: Iterable[Rule]) -> Iterator[Fault]:
    legal = {f"{','.join(inputs)}->{','.join(outputs)}" for inputs, outputs in rules}
    if text not in legal and set(text) - set("R,->"):
        listed = ", ".join(sorted(legal)[:8]) + (", …" if len(legal) > 8 else "")
        problem = f"placements.{graph.name}.{op.name}.{axis}: {op.target} cannot run as {text!r}"
        yield problem, f"Its rules: {listed or 'only whole tensors'}."


def _parameters(file: PlanFile, decisions: dict[str, GraphDecisions]) -> Iterator[Fault]:
    for entry in file.parameters:
        placed = decisions[entry.graph]
        graph = placed.graph
        said = [("used", entry.used, graph.params[entry.local])]
        grad = graph.param_grads.get(entry.local)
        if grad is not None:
            said.append(("gradient", entry.gradient, grad))
        for field, text, value in said:
            made = placed.made[value]
            if Layout.parse(text) != made:
                problem = f"parameter {entry.pattern}, {field}: {text}, but the placements make {value} as {made}"
                yield problem, AS_THE_OPERATION


def _capacity(file: PlanFile, model: ModelGraph) -> Iterator[Fault]:
    entry = file.job.capacity
    if entry is not None and (right := slots_of(with_capacity(model, entry.factor))) != entry.slots:
        problem = f"job.capacity.slots: expected {right} for a factor of {entry.factor:g}, but found {entry.slots}"
        yield problem, "They follow from the factor; correct either."


def _inputs(file: PlanFile, model: ModelGraph, outer: GraphDecisions) -> Iterator[Fault]:
    rows = file.job.global_batch // file.job.micro_batches
    for entry, leaf, value in zip(file.inputs, model.inputs, outer.graph.inputs, strict=True):
        shape = tuple(fixed + each * rows for fixed, each in zip(leaf.fixed, leaf.per_row, strict=True))
        if entry.shape != shape:
            problem = f"input {entry.name}: expected shape {list(shape)} for a micro-batch of {rows} rows"
            remedy = "The shape follows from job.global_batch and job.micro_batches; correct either."
            yield f"{problem}, but found {list(entry.shape)}", remedy
        made = outer.made[value]
        if Layout.parse(entry.layout) != made:
            yield (
                f"input {entry.name}: layout {entry.layout}, but the placements bring {value} as {made}",
                AS_THE_OPERATION,
            )
