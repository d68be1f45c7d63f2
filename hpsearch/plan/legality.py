"""Does a plan make sense by itself? Every field against every other, before any device is touched.

This is what makes plans safe to edit by hand: whatever passes here can be lowered, up to the model's own limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod

from hpsearch.cost.job import OPTIMIZER_STATES, RECIPES, check_batch
from hpsearch.errors import LegalityError, PlanError
from hpsearch.graph import ITEM_BYTES
from hpsearch.layout import EXCHANGES, HEAD_TAIL, ROLES, Layout, Mesh, Placement
from hpsearch.layout.mesh import SPLIT_ORDER
from hpsearch.plan.numbers import prediction, proof
from hpsearch.plan.pipeline import pipeline_faults
from hpsearch.plan.schema import AxisEntry, ParamEntry, PlanFile

RECOMPUTE = ("none", "full")
RESIDENCY = ("stored", "step", "micro_batch")
REDUCE = ("step", "micro_batch")
PHASES = ("gather", "forward", "backward", "reduce", "step")
MOST_TENSORS = 10**9
"""No model has so many tensors of one name; more is a slip of the pen."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift")

Fault = tuple[str, str]
"""The problem, and what to do."""


def check_legality(file: PlanFile, subject: str) -> None:
    """Raises PlanError with the first field that contradicts another, or names something that does not exist."""
    for faults in (_mesh, _job, _inputs, _parameters, _placements, _collectives, pipeline_faults, prediction, proof):
        for problem, remedy in faults(file):
            raise PlanError(subject, problem, remedy)


def check_total(file: PlanFile, subject: str) -> None:
    """Raises PlanError when the parameters are not as many elements as the file says; what is missing only the model
    itself can name."""
    total = sum(entry.count * prod(entry.shape) for entry in file.parameters)
    if total != file.model.parameters:
        problem = f"parameters: expected {file.model.parameters} elements in all (model.parameters), but found {total}"
        raise PlanError(subject, problem, "One is missing, or there twice: write them as the model has them.")


def _mesh(file: PlanFile) -> Iterator[Fault]:
    names = [axis.name for axis in file.mesh]
    for name in names:
        if name not in SPLIT_ORDER:
            yield f"mesh: unknown axis {name!r}", f"Axes are {', '.join(SPLIT_ORDER)}."
        if names.count(name) > 1:
            yield f"mesh: axis {name} stands twice", "Delete one of the two."
    if names != sorted(names, key=SPLIT_ORDER.index):
        order = ", ".join(sorted(names, key=SPLIT_ORDER.index))
        yield f"mesh: expected the axes in split order {order}, but found {', '.join(names)}", "Reorder them."
    for axis in file.mesh:
        if axis.size < 2:
            yield f"mesh: axis {axis.name} has size {axis.size}, expected at least 2", "Leave out axes of size 1."
        yield from _sequence(axis)
        yield from _hops(axis)
    if any(axis.name == "cp" and axis.hops for axis in file.mesh):
        for axis in file.mesh:
            if axis.name == "ep" and axis.hops is None:
                yield "mesh: experts are spread over cp, but ep has no hops", f"Write hops of {axis.size} for ep."
    degrees = {axis.name: axis.size for axis in file.mesh}
    ranks = {"pp": file.pipeline.ranks} if file.pipeline else {}
    product = " x ".join(f"{name}={size}" for name, size in {**ranks, **degrees}.items()) or "no axis"
    total = prod((*ranks.values(), *degrees.values()))
    if total != file.cluster.devices:
        found = f"{product} gives {total}"
        remedy = "The product of the degrees must be the number of devices."
        yield f"mesh: expected {file.cluster.devices} devices (cluster.devices), but {found}", remedy
    right = {axis.name: axis.stride for axis in Mesh.of(**degrees).axes}
    for axis in file.mesh:
        if axis.stride != right[axis.name]:
            problem = f"mesh: axis {axis.name} has stride {axis.stride}, expected {right[axis.name]}"
            order = "tp on neighbouring ranks, then cp, ep, dp_shard, dp_replicate"
            yield problem, f"Strides follow from the degrees: {order}."


def _sequence(axis: AxisEntry) -> Iterator[Fault]:
    """What only an axis along sequences says, and must say."""
    along = ROLES.get(axis.name) == "sequence"
    for field, found, legal in (
        ("exchange", axis.exchange, EXCHANGES if along else (None,)),
        ("order", axis.order, (None, HEAD_TAIL) if along else (None,)),
    ):
        if found not in legal:
            expected = " or ".join("nothing" if one is None else one for one in legal)
            yield f"mesh: axis {axis.name} has {field} {found}, expected {expected}", "Correct it."


def _hops(axis: AxisEntry) -> Iterator[Fault]:
    """What only an axis of experts may say, and one along sequences that experts are spread over."""
    if axis.hops is None:
        return
    found = " x ".join(map(str, axis.hops)) or "none"
    if ROLES.get(axis.name) not in ("experts", "sequence"):
        yield f"mesh: axis {axis.name} has hops {found}, expected none", "Leave them out."
    elif prod(axis.hops) != axis.size or min(axis.hops, default=0) < 2:
        problem = f"mesh: axis {axis.name} has hops {found}, expected sizes from 2 on that multiply to {axis.size}"
        yield problem, "Correct them, or leave them out: then each copy of a token travels on its own."


def _job(file: PlanFile) -> Iterator[Fault]:
    job = file.job
    for name, value in (("global_batch", job.global_batch), ("micro_batches", job.micro_batches)):
        if value < 1:
            yield f"job.{name}: expected at least 1, but found {value}", "Correct it."
    try:
        check_batch(job.global_batch, job.micro_batches, Mesh.of(**{axis.name: axis.size for axis in file.mesh}))
    except LegalityError as error:
        yield f"job: {error.subject}: {error.problem}", error.remedy
    if job.recipe not in RECIPES:
        yield f"job.recipe: unknown {job.recipe!r}", f"Recipes are {', '.join(RECIPES)}."
    if job.optimizer not in OPTIMIZER_STATES:
        yield f"job.optimizer: unknown {job.optimizer!r}", f"Optimizers are {', '.join(OPTIMIZER_STATES)}."
    graphs = sorted({*file.placements, *(entry.graph for entry in file.parameters)})
    for block, choice in job.recompute.items():
        if choice not in RECOMPUTE:
            yield f"job.recompute: {block} is {choice!r}", f"Expected {' or '.join(RECOMPUTE)}."
        if block not in graphs:
            yield f"job.recompute: no graph is called {block!r}", f"Graphs of this plan: {', '.join(graphs)}."
    yield from _offload(file)
    yield from _capacity(file)


def _capacity(file: PlanFile) -> Iterator[Fault]:
    entry = file.job.capacity
    if entry is None:
        return
    if not 0 < entry.factor < inf:
        yield f"job.capacity.factor: expected a number above 0, but found {entry.factor}", "1.25 is usual."
    for graph, slots in entry.slots.items():
        if slots < 1:
            yield f"job.capacity.slots: expected at least 1 for {graph}, but found {slots}", "Correct it."
    for axis in file.mesh:
        if ROLES.get(axis.name) == "sequence":
            yield f"job.capacity: slots are counted in whole sequences, but {axis.name} cuts them", "Leave one out."
        if axis.hops is not None:
            problem = f"job.capacity: expected each copy of a token on its own, but {axis.name} has hops"
            yield problem, "Leave the hops out."


def _offload(file: PlanFile) -> Iterator[Fault]:
    entry = file.job.offload
    if entry is None:
        return
    for block in entry.blocks:
        if block not in file.job.recompute:
            known = ", ".join(file.job.recompute) or "none"
            yield f"job.offload.blocks: no block class is called {block!r}", f"Block classes of this plan: {known}."
    if entry.blocks != tuple(sorted(set(entry.blocks))):
        yield f"job.offload.blocks: expected each once, in order, but found {', '.join(entry.blocks)}", "Reorder them."
    if not entry.blocks and not entry.optimizer:
        yield "job.offload: nothing is in it", "Leave it out."
    if entry.blocks and file.pipeline is not None and any(set(line) & set("IW") for line in file.pipeline.actions):
        problem = "job.offload.blocks: expected a schedule with whole backwards, but pipeline.actions has I and W"
        yield problem, "Between the two nothing could leave the device: use gpipe, 1f1b or interleaved."


def _inputs(file: PlanFile) -> Iterator[Fault]:
    names = [entry.name for entry in file.inputs]
    for entry in file.inputs:
        where = f"input {entry.name}"
        if names.count(entry.name) > 1:
            yield f"{where} stands twice", "Delete one of the two."
        if entry.dtype not in ITEM_BYTES:
            yield f"{where}: unknown dtype {entry.dtype!r}", f"Known: {', '.join(ITEM_BYTES)}."
        yield from _shape(where, entry.shape)
        yield from _layout(file, f"{where}, layout", entry.layout, entry.shape, partial=False)


def _shape(where: str, shape: tuple[int, ...]) -> Iterator[Fault]:
    if any(size < 1 for size in shape):
        yield f"{where}: expected sizes of at least 1, but its shape is {list(shape)}", "Write the model's own."


def _parameters(file: PlanFile) -> Iterator[Fault]:
    patterns = [entry.pattern for entry in file.parameters]
    places = [(entry.graph, entry.local) for entry in file.parameters]
    for entry in file.parameters:
        where = f"parameter {entry.pattern}"
        if patterns.count(entry.pattern) > 1:
            yield f"{where} stands twice", "Delete one of the two."
        if places.count((entry.graph, entry.local)) > 1:
            yield f"{where}: {entry.local} of {entry.graph} stands twice", "Delete one of the two."
        if not 1 <= entry.count <= MOST_TENSORS:
            yield f"{where}: count is {entry.count}, expected 1 to {MOST_TENSORS}", "Correct it."
        yield from _shape(where, entry.shape)
        for field, value, legal in (("residency", entry.residency, RESIDENCY), ("reduce", entry.reduce, REDUCE)):
            if value not in legal:
                yield f"{where}, {field}: unknown {value!r}", f"Expected {', '.join(legal)}."
        for field, text in (("stored", entry.stored), ("used", entry.used), ("gradient", entry.gradient)):
            yield from _layout(file, f"{where}, {field}", text, entry.shape, partial=field == "gradient")
        yield from _residency(entry, where)


def _residency(entry: ParamEntry, where: str) -> Iterator[Fault]:
    if entry.stored != entry.used and entry.residency == "stored":
        problem = f"{where}: residency is stored, but it is stored as {entry.stored} and used as {entry.used}"
        yield problem, "Set residency to step or micro_batch, or make the two layouts equal."


def _layout(file: PlanFile, where: str, text: str, shape: tuple[int, ...], partial: bool) -> Iterator[Fault]:
    """Faults of a layout of a tensor of global `shape`; `partial` says whether a sum over an axis may be pending."""
    try:
        layout = Layout.parse(text)
    except PlanError as error:
        yield f"{where}: {error.subject}: {error.problem}", error.remedy
        return
    order = [axis.name for axis in file.mesh]
    axes = [axis for axis, _ in layout]
    for axis, placement in layout:
        if axis not in order:
            yield f"{where}: {text!r} names axis {axis!r}", f"The mesh has {', '.join(order) or 'no axis'}."
        if placement.is_partial and not partial:
            yield (
                f"{where}: {text!r} is partial over {axis}",
                "Only a gradient may wait for its sum; write R or S<dim>.",
            )
        if placement.is_shard and placement.dim >= len(shape):
            dims = f"dims 0 to {len(shape) - 1}" if shape else "no dims"
            yield f"{where}: {text!r} cuts dim {placement.dim}, but shape {list(shape)} has {dims}", "Name one of them."
    ordered = " ".join(f"{a}:{layout[a]}" for a in order if a in axes) or "R"
    if text != ordered:
        yield (
            f"{where}: expected {ordered!r}, but found {text!r}",
            "Axes stand in mesh order, one space apart, without R.",
        )


def _placements(file: PlanFile) -> Iterator[Fault]:
    axes = [axis.name for axis in file.mesh]
    for graph, steps in file.placements.items():
        for step, rules in steps.items():
            for axis, text in rules.items():
                where = f"placements.{graph}.{step}"
                if axis not in axes:
                    yield f"{where}: names axis {axis!r}", f"The mesh has {', '.join(axes) or 'no axis'}."
                yield from _rule(f"{where}.{axis}", text)


def _rule(where: str, text: str) -> Iterator[Fault]:
    left, arrow, right = text.partition("->")
    if not arrow:
        yield f"{where}: expected inputs->outputs, but found {text!r}", "Write for example R,S0->S1."
        return
    for word in [*(left.split(",") if left else []), *(right.split(",") if right else [])]:
        try:
            Placement.parse(word)
        except PlanError as error:
            yield f"{where}: {text!r}: {error.subject}: {error.problem}", error.remedy


def _collectives(file: PlanFile) -> Iterator[Fault]:
    axes = [axis.name for axis in file.mesh]
    axes += [f"{axis.name}/{i}" for axis in file.mesh for i in range(len(axis.hops or ()))]
    for i, entry in enumerate(file.collectives):
        where = f"collectives[{i}] ({entry.kind} of {entry.what})"
        if entry.kind not in KINDS:
            yield f"{where}: unknown kind {entry.kind!r}", f"Kinds are {', '.join(KINDS)}."
        if entry.dtype not in ITEM_BYTES:
            yield f"{where}: unknown dtype {entry.dtype!r}", f"Known: {', '.join(ITEM_BYTES)}."
        if entry.axis not in axes:
            yield f"{where}: names axis {entry.axis!r}", f"The mesh has {', '.join(axes) or 'no axis'}."
        if entry.phase not in PHASES:
            yield f"{where}: unknown phase {entry.phase!r}", f"Phases are {', '.join(PHASES)}."
        if min(entry.nbytes, entry.calls, entry.seconds) < 0:
            problem = f"{where}: {entry.nbytes} bytes, {entry.calls} calls, {entry.seconds} s"
            yield problem, "None of them can be negative."
