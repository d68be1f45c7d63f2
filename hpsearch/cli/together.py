"""`hpsearch together`: several models in one step on one cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from hpsearch.aim.answer_file import save
from hpsearch.aim.job_file import ModuleEntry, load_job
from hpsearch.aim.module import Job, Module
from hpsearch.aim.over import shares
from hpsearch.aim.together import Split, Together, together
from hpsearch.cli.machine import load_machine, load_parts
from hpsearch.cli.model import load_graph
from hpsearch.cli.options import ClusterName, Devices
from hpsearch.cli.screen import progress_bar, show
from hpsearch.cli.search import in_words
from hpsearch.cluster import Cluster
from hpsearch.errors import counted
from hpsearch.estimate import shape_of_graph
from hpsearch.files import check_output
from hpsearch.plan import units
from hpsearch.plan.tables import table
from hpsearch.space.pins import space_of


def together_command(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A TOML or JSON file, as in examples/together.")],
    cluster: ClusterName,
    devices: Devices,
    gap: Annotated[float, typer.Option(min=0, max=1, help="Stop once the split is proven to be this near.")] = 0.01,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="F", help="Write the answer here.")] = None,
) -> None:
    """Splits the devices of a cluster over several models that run in one step: the parts of a multimodal model, actor,
    critic, reference and reward of reinforcement learning."""
    if output is not None:
        check_output(output)
    entries = load_job(job).modules
    machine = load_machine(cluster, devices)
    clusters = load_parts(cluster, machine, shares(machine.tiers, devices))
    modules = Job(tuple(_module(one, machine) for one in entries))
    with progress_bar("searching"):
        found = together(modules, clusters, devices, gap=gap)
    show(
        Text(f"{counted(len(entries), 'model')} on {counted(devices, 'device')} of {machine.name}: a step takes "
             f"{units.seconds(found.step_s)}."),
        _groups(found), _timeline(found), Text(_proof(found)), Text(_fixed(found)),
    )  # fmt: skip
    if output is not None:
        save(modules, machine, found, output)
        show(Text(f"Written to {output}."))


def _module(entry: ModuleEntry, machine: Cluster) -> Module:
    with progress_bar(f"capturing {entry.model}"):
        shape = shape_of_graph(load_graph(entry.model, entry.seq_len, "bf16"))
    space = space_of(
        shape, machine, entry.fix, global_batch=entry.global_batch, seq_len=entry.seq_len, precision=entry.precision
    )
    return Module(
        entry.name, shape, space.base, entry.trains, entry.runs, entry.takes, entry.after, space.pins
    )  # fmt: skip


def _groups(found: Together) -> Table:
    made = table("Devices", "devices", "module", "layout", "peak", "stays for others")
    placed = {one.module: one for one in found.placed}
    for count, names in found.split:
        for i, name in enumerate(names):
            one = placed[name]
            made.add_row(
                "" if i else str(count), name, in_words(one.layout), units.size(one.peak_bytes),
                units.size(one.resident_bytes),
            )  # fmt: skip
    return made


def _timeline(found: Together) -> Table:
    made = table("Step", "task", "devices", "from", "to")
    for one in found.tasks:
        made.add_row(one.name, str(found.split[one.group][0]), units.seconds(one.start_s), units.seconds(one.end_s))
    return made


def _proof(found: Together) -> str:
    sizes = f"{', '.join(map(str, found.sizes))} {'device' if found.sizes == (1,) else 'devices'}"
    return (
        f"Proven: no split takes less than {units.seconds(found.bound_s)} (gap {found.gap:.2%}), by this cost model, "
        f"among groups of {sizes}, every model in one group, groups one model or several that take turns, "
        "batches of models that pass activations in 1 to 16 parts. Models that get gradients back run forward twice. "
        f"{counted(found.considered, 'split')} considered, {found.solved:,} simulated, "
        f"{counted(found.searched, 'model')} searched."
    )


def _fixed(found: Together) -> str:
    if not found.fixed:
        return "No split by a rule has room for all models."
    told = (f"{rule} ({_in_words(split)}) {units.seconds(step_s)}" for rule, split, step_s in found.fixed)
    return f"Devices split by a rule, each model apart: {'; '.join(told)}."


def _in_words(split: Split) -> str:
    return ", ".join(f"{'+'.join(names)} {count}" for count, names in split)
