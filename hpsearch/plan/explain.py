"""A plan in words and tables; `--why` for one parameter. Renderables of rich, in reading order."""

from __future__ import annotations

from math import prod

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpsearch.errors import counted
from hpsearch.layout import ROLES, Layout
from hpsearch.plan import tables, units
from hpsearch.plan.names import (
    AXIS_WORDS,
    activations_cut_over_tp,
    data_parallel_name,
    parameter_shares,
    share_cut_over_tp,
    tensor_parallel_name,
)
from hpsearch.plan.own_stages import UNCHECKED, disorder
from hpsearch.plan.plan import Plan
from hpsearch.plan.schema import CollectiveEntry, ParamEntry
from hpsearch.plan.stage_words import pipeline_words, stage_table

SHOWN = 12
"""Refused candidates that are printed; the plan file lists more."""


def explain(plan: Plan) -> Group:
    """The whole plan: what runs where, what it costs, how good it is."""
    parts: list[RenderableType] = [Text(headline(plan)), Text(in_words(plan)), mesh_table(plan)]
    if plan.is_edited:
        parts.append(Text("Edited by hand: predictions and certificate are of the original."))
        if plan.file.pipeline is not None:
            parts += [Text(sentence) for sentence in (disorder(plan.file.pipeline), UNCHECKED) if sentence]
    parts += [time_table(plan), memory_table(plan)]
    if plan.file.pipeline is not None:
        parts.append(stage_table(plan.file.pipeline))
    parts.append(parameter_table(plan))
    if plan.file.collectives:
        whose = "all stages together, on one rank of each" if plan.file.pipeline else "one rank"
        parts.append(collective_table(plan.file.collectives, whose=whose))
    parts += certificate(plan)
    return Group(*parts)


def headline(plan: Plan) -> str:
    file = plan.file
    return (
        f"{file.model.name} ({units.count(file.model.parameters)} parameters) on {file.cluster.devices} devices of "
        f"{file.cluster.name} ({file.cluster.device}): {plan.layout_text}."
    )


def in_words(plan: Plan) -> str:
    """Two or three sentences in the field's names."""
    job = plan.file.job
    shares = parameter_shares(plan)
    said = [name if part == 1.0 else f"{name} for {_percent(part)} of the parameters" for name, part in shares]
    words = f"{', '.join(said)}. " if said and plan.mesh.data_axes else ""
    if plan.mesh.size("tp") > 1:
        words += _tensor_parallel_words(plan)
    words += (
        f"A step takes {counted(job.global_batch, 'row')} in {counted(job.micro_batches, 'micro-batch')} of "
        f"{counted(plan.micro_batch_rows, 'row')} ({plan.micro_batch_rows / plan.mesh.num_data_ranks:g} a device), "
        f"recipe {job.recipe}, {job.optimizer}. "
    )
    full = [block for block, choice in job.recompute.items() if choice == "full"]
    words += f"Activations are recomputed in backward in {', '.join(full)}. " if full else "No recomputation. "
    words += _capacity_words(plan) + _offload_words(plan)
    if plan.file.pipeline is not None:
        words += f"{pipeline_words(plan.file.pipeline)} "
    if job.fix:
        words += "Pinned: " + ", ".join(f"{key}={value}" for key, value in job.fix.items()) + ". "
    return words.strip()


def _capacity_words(plan: Plan) -> str:
    entry = plan.file.job.capacity
    if entry is None:
        return ""
    slots = " or ".join(dict.fromkeys(map(str, entry.slots.values())))
    return (
        f"Capacity {entry.factor:g}: an expert takes the first {slots} tokens of a row that chose it, those behind "
        f"are dropped, and empty slots are computed. "
    )


def _offload_words(plan: Plan) -> str:
    entry, words = plan.file.job.offload, ""
    if entry is not None and entry.blocks:
        words += f"What {', '.join(entry.blocks)} keep for backward waits in host memory. "
    if entry is not None and entry.optimizer:
        words += "Optimizer states rest in host memory and come to the device for the update. "
    return words


def _tensor_parallel_words(plan: Plan) -> str:
    degree, cut = plan.mesh.size("tp"), share_cut_over_tp(plan)
    words = f"Tensor parallel over {degree} devices"
    words += f", {_percent(cut)} of the parameters cut. " if cut else ", but every parameter is used whole. "
    for block, placement in activations_cut_over_tp(plan):
        kind = "sequence parallel" if placement == "S1" else placement
        words += f"Activations arrive at {block} cut over tp ({kind}). "
    return words


def _percent(part: float) -> str:
    return "all" if part == 1.0 else "under 0.1 %" if part < 0.001 else f"{part:.1%}"


EXCHANGE_WORDS = {
    "gathered": "attention gathers keys and values",
    "ring": "keys and values go round",
    "ulysses": "attention exchanges heads for positions (Ulysses)",
}


def mesh_table(plan: Plan) -> Table:
    table = tables.table("Mesh", "axis", "degree", "stride in ranks", "tier", "meaning")
    if (pipeline := plan.file.pipeline) is not None:
        meaning = "pipeline, each rank of it a mesh of the other axes"
        table.add_row("pp", str(pipeline.ranks), str(plan.mesh.num_ranks), pipeline.tier, meaning)
    for axis in plan.mesh.axes:
        meaning = AXIS_WORDS[axis.name]
        if ROLES[axis.name] == "experts":
            hops = f"one copy of a token a domain, in hops of {' x '.join(map(str, axis.hops))}"
            meaning += f"; {hops if axis.hops else 'each copy of a token on its own'}"
        if ROLES[axis.name] == "sequence":
            pieces = "a piece from either end" if axis.order else "consecutive positions"
            meaning += f"; {EXCHANGE_WORDS[axis.exchange]}; {pieces} of each sequence"
            meaning += "; experts spread over it" if axis.hops else ""
        table.add_row(axis.name, str(axis.size), str(axis.stride), axis.tier, meaning)
    if not plan.mesh.axes and plan.file.pipeline is None:
        table.add_row("-", "1", "-", "-", "one device")
    return table


def time_table(plan: Plan) -> Table:
    predicted = plan.file.predicted
    hidden = predicted.communication_s - predicted.exposed_s
    table = tables.table("Predicted step", "part", "time", "share")
    lost = "exposed communication" if plan.file.pipeline is None else "bubble, hops, exposed communication"
    rows = [("compute", predicted.compute_s), (lost, predicted.exposed_s)]
    for name, value in rows:
        table.add_row(name, units.seconds(value), units.share(value, predicted.step_s))
    table.add_row("step", units.seconds(predicted.step_s), "", style="bold")
    table.add_row("communication hidden under compute", units.seconds(max(hidden, 0.0)), "")
    return table


def memory_table(plan: Plan) -> Table:
    predicted, limit = plan.file.predicted, plan.file.cluster.memory_bytes
    table = tables.table("Predicted memory a device", "category", "bytes", "of the device")
    for name, nbytes in sorted(predicted.bytes.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(name, units.size(nbytes), units.share(nbytes, limit))
    table.add_row("peak", units.size(predicted.peak_bytes), units.share(predicted.peak_bytes, limit), style="bold")
    return table


def parameter_table(plan: Plan) -> Table:
    with_tp, with_data = plan.mesh.size("tp") > 1, bool(plan.mesh.data_axes)
    names = ("parameter", "shape", "×", "stored", "used", *(("tp",) * with_tp), *(("data",) * with_data))
    table = tables.table("Parameters", *names)
    for entry in plan.file.parameters:
        table.add_row(
            entry.pattern,
            " x ".join(map(str, entry.shape)) or "scalar",
            str(entry.count),
            entry.stored,
            entry.used,
            *((tensor_parallel_name(entry, plan.file.parameters),) if with_tp else ()),
            *((data_parallel_name(entry, plan.mesh.axes),) if with_data else ()),
        )
    return table


def collective_table(entries: tuple[CollectiveEntry, ...], detail: bool = False, whose: str = "one rank") -> Table:
    """Collectives of one step on one rank; with `detail` one row each, else summed by kind, axis and phase."""
    title = f"Collectives of one step on {whose} (seconds before overlap)"
    table = tables.table(title, "phase", "collective", "over", "calls", "bytes", "time")
    if detail:
        table.add_column("of")
    groups: dict[tuple[str, ...], list[CollectiveEntry]] = {}
    for entry in entries:
        key = (entry.phase, entry.kind, entry.axis) + ((entry.what, entry.dtype) if detail else ())
        groups.setdefault(key, []).append(entry)
    for key, found in groups.items():
        calls = sum(entry.calls for entry in found)
        nbytes = sum(entry.calls * entry.nbytes for entry in found)
        total_s = sum(entry.calls * entry.seconds for entry in found)
        of = [f"{key[3]} ({key[4]})"] if detail else []
        table.add_row(*key[:3], str(calls), units.size(nbytes), units.seconds(total_s), *of)
    return table


def certificate(plan: Plan) -> list[RenderableType]:
    proof = plan.file.certificate
    text = (
        f"{proof.status.capitalize()}: objective {units.seconds(proof.objective_s)}, lower bound "
        f"{units.seconds(proof.bound_s)}, gap {proof.gap:.2%}, over: {proof.space}. "
        f"{proof.considered} candidates: {proof.solved} solved, {proof.pruned} pruned by their bound, "
        f"{len(proof.refused)} refused."
    )
    parts: list[RenderableType] = [Text(text)]
    if proof.refused or proof.runners_up:
        table = tables.table("Other candidates", "candidate", "verdict", "why")
        for other in proof.runners_up:
            table.add_row(other.candidate, "slower", other.reason)
        for other in proof.refused[:SHOWN]:
            table.add_row(other.candidate, "refused", other.reason)
        if len(proof.refused) > SHOWN:
            table.add_row(f"{len(proof.refused) - SHOWN} more", "refused", "see the plan file")
        parts.append(table)
    return parts


def explain_parameter(plan: Plan, fqn: str) -> Group:
    """`--why FQN`: where one parameter lives, what it costs, and which others decided the same way.

    Raises PlanError when the plan has no such parameter.
    """
    entry = plan.parameter(fqn)
    parts: list[RenderableType] = [Text(parameter_in_words(plan, entry, fqn))]
    own = tuple(c for c in plan.file.collectives if c.what == entry.pattern)
    if own:
        parts.append(collective_table(own, detail=True))
    else:
        parts.append(Text("It needs no collective of its own."))
    around = tuple(c for c in plan.file.collectives if c.what.startswith(f"{entry.graph}/"))
    if around:
        parts += [Text(f"Activations of {entry.graph}, where it is used:"), collective_table(around, detail=True)]
    runners = plan.file.certificate.runners_up
    if runners:
        table = tables.table("What the next best plans would cost", "plan", "step")
        table.add_row("this one", units.seconds(plan.file.certificate.objective_s))
        for other in runners:
            table.add_row(other.candidate, other.reason)
        parts.append(table)
    return Group(*parts)


def parameter_in_words(plan: Plan, entry: ParamEntry, fqn: str) -> str:
    sizes = plan.mesh.sizes
    stored, used = Layout.parse(entry.stored), Layout.parse(entry.used)
    kept, at_work = stored.local_shape(entry.shape, sizes), used.local_shape(entry.shape, sizes)
    many = f" (one of {entry.count} called {entry.pattern})" if entry.count > 1 and fqn != entry.pattern else ""
    if entry.aliases:
        many += f" (the same tensor as {', '.join(name for name in (entry.pattern, *entry.aliases) if name != fqn)})"
    words = [
        f"{fqn}{many}: {list(entry.shape)}, {prod(entry.shape):,} elements, "
        f"{'trainable' if entry.trainable else 'frozen'}, in {entry.graph}.",
        f"Stored as {stored}: a device keeps {list(kept)}, {prod(kept) / max(prod(entry.shape), 1):.3g} of it, "
        "with its gradient and optimizer state.",
        f"Used as {used}: {list(at_work)} at the operation.",
        {
            "stored": "It is used as it is stored: no gather.",
            "step": "It is gathered once a step and kept.",
            "micro_batch": "It is gathered for forward and again for backward of each micro-batch, and freed between.",
        }[entry.residency],
    ]
    if entry.trainable:
        when = "once a step" if entry.reduce == "step" else "after each backward"
        words.append(f"Backward leaves its gradient as {entry.gradient}; it is brought to {stored} {when}.")
    words.append(f"Familiar names: {data_parallel_name(entry, plan.mesh.axes)}")
    words[-1] += f", tp {tensor_parallel_name(entry, plan.file.parameters)}." if "tp" in sizes else "."
    return "\n".join(words)
