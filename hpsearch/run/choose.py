"""Which plan runs: the one that was given, or the one that rank 0 finds; the same bytes on every rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from hpsearch.capture import CapturedGraph
from hpsearch.cluster import Cluster
from hpsearch.errors import BatchError, PlanError
from hpsearch.graph import Call, ModelGraph, OpGraph
from hpsearch.plan import Plan
from hpsearch.plan.environment import unmet
from hpsearch.run.launch import agree, is_first, num_processes, start, together
from hpsearch.run.stepper import Built

Given = Plan | str | os.PathLike[str] | None
Where = Cluster | Callable[..., Cluster]
"""A cluster, or a function of `devices` that gets one."""
Find = Callable[..., Plan]
"""(graph, cluster, fix=pins) → plan."""


def choose_plan(given: Given, on: Where, find: Find, trace: Callable[[], CapturedGraph], base: Built | None) -> Plan:
    """The plan, equal on every rank. Collective under a launcher; on one process alone otherwise.

    With `base`, a program that runs already: its plan, if `trace` gives the same operations; otherwise a plan with the
    same mesh and the same stored parameters. Raises LaunchError on every rank when they were given different plans.
    """
    start()
    if base is None:
        content = together("plan", lambda: _content(given))
        return _read(agree(content, lambda: find(trace().graph, _cluster(on)).content), subject_of(given))
    graph = together("capture", trace).graph
    if same_operations(graph, base.graph):
        return base.plan
    found = _read(agree(None, lambda: find(graph, _cluster(on), fix=pins(base.plan)).content), "plan")
    return together("plan", partial(_check_stored, found, base.plan))


def check_plan(plan: Plan, graph: ModelGraph, given: Given, on: Where | None) -> Plan:
    """`plan` again, after making sure that it is for this model, and for the cluster `on` if one was named. Collective.

    Warns of variables under which its overlap would not happen. Raises PlanError with the first difference.
    """
    if is_first():
        for sentence in unmet(plan.file, os.environ):
            warnings.warn(sentence, stacklevel=2)
    # Only rank 0 looks at the cluster: a `local` one is what that rank's machine measured.
    against = on if given is not None and is_first() else None

    def read() -> Plan:
        return Plan.from_bytes(plan.content, subject_of(given), graph, None if against is None else _cluster(against))

    return together("plan", read)


def same_operations(a: ModelGraph, b: ModelGraph) -> bool:
    """Whether the two do the same, step by step and by the same names; sizes may differ."""
    return a.instances == b.instances and [_steps(g) for g, _ in a.pieces()] == [_steps(g) for g, _ in b.pieces()]


def _steps(graph: OpGraph) -> list[object]:
    return [
        (s.name, s.block, s.inputs, s.outputs) if isinstance(s, Call) else (s.name, s.target, s.inputs, s.outputs)
        for s in graph.steps
    ]


def pins(plan: Plan) -> Mapping[str, object]:
    """What the search must keep so that the same stored parameters serve another program of the model."""
    found: dict[str, object] = {"pp": 1, "cp": 1, **{axis.name: axis.size for axis in plan.mesh.axes}}
    found["micro_batches"] = plan.file.job.micro_batches
    if (away := plan.file.job.offload) is not None:
        parts = [("activations", bool(away.blocks)), ("optimizer", away.optimizer)]
        found["offload"] = "+".join(name for name, is_on in parts if is_on)
    if any(axis.name == "cp" for axis in plan.mesh.expert_axes):
        found["ep_over"] = "cp"
    if plan.file.job.capacity is not None:
        found["capacity"] = plan.file.job.capacity.factor
    if (pipeline := plan.file.pipeline) is not None:
        stages = pipeline.stages
        found |= {"pp": pipeline.ranks, "vpp": len(stages) // pipeline.ranks, "schedule": pipeline.kind}
        found["cut"] = "+".join(str(len(stage.blocks)) for stage in stages)
    found |= {entry.pattern: entry.stored for entry in plan.file.parameters if "." in entry.pattern}
    return found


def _check_stored(plan: Plan, base: Plan) -> Plan:
    before = {entry.pattern: entry.stored for entry in base.file.parameters}
    moved = [e for e in plan.file.parameters if before.get(e.pattern) != e.stored]
    if moved:
        entry = moved[0]
        problem = f"{entry.pattern} is stored {before.get(entry.pattern)}, but it would store it {entry.stored}"
        raise BatchError("another program for the same parameters", problem, "Compile a second parallel model for it.")
    return plan


def _read(content: bytes, subject: str) -> Plan:
    return together("plan", lambda: Plan.from_bytes(content, subject))


def subject_of(given: Given) -> str:
    """What a message calls the plan."""
    return "plan" if given is None or isinstance(given, Plan) else str(given)


def _content(given: Given) -> bytes | None:
    if given is None or isinstance(given, Plan):
        return given.content if given is not None else None
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise PlanError(str(given), f"cannot be read: {error.strerror or error}", "Is it the right path?") from None


def _cluster(on: Where) -> Cluster:
    return on if isinstance(on, Cluster) else on(devices=num_processes())
