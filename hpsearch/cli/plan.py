"""`hpsearch plan`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hpsearch.cli.estimate import written
from hpsearch.cli.fix import parse_fixes
from hpsearch.cli.machine import load_machine
from hpsearch.cli.model import load_graph
from hpsearch.cli.options import ClusterName, Devices, GlobalBatch, Model, SeqLen
from hpsearch.cli.screen import progress_bar, show
from hpsearch.cost.job import RECIPES
from hpsearch.errors import PlanError
from hpsearch.plan import Plan
from hpsearch.plan.explain import explain
from hpsearch.search import search
from hpsearch.search.from_layout import pins_of_layout

STDOUT = Path("-")


def plan_command(
    model: Model,
    cluster: ClusterName,
    devices: Devices,
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Pin a choice: tp=4, pp=1 (none), recompute=none, lm_head.weight=R."),
    ] = None,
    layout: Annotated[
        Path | None, typer.Option(metavar="F", help="Keep the layout that `hpsearch search` wrote.")
    ] = None,
    recipe: Annotated[str, typer.Option(help=f"Precision: {', '.join(RECIPES)}.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="Whose state takes memory: adamw, adam, momentum, sgd.")] = "adamw",
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="Stop with the best so far.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="F", help="Write it here; - is stdout.")
    ] = None,
) -> None:
    """Searches the fastest plan for a model on a cluster, pipelines among them, says how good it is, and writes it."""
    fixes = parse_fixes(fix or [])
    if recipe not in RECIPES:
        raise typer.BadParameter(f"expected one of {', '.join(RECIPES)}, but got {recipe!r}.", param_hint="--recipe")
    if output is not None and output.is_dir():
        raise PlanError(str(output), "cannot be written: it is a folder", f"Name a file, as {output / 'plan.json'}.")
    if output is not None and not output.parent.is_dir():
        raise PlanError(str(output), f"cannot be written: there is no folder {output.parent}", "Create it first.")
    machine = load_machine(cluster, devices)
    if layout is not None:
        pins = pins_of_layout(written(layout, fix, machine, global_batch, seq_len).layout, devices, global_batch)
        fixes.update(pins.fix)
        show(Text(f"Of {layout} it keeps {told(pins.fix)}; it decides {'; '.join(pins.left)}."), stderr=True)
    with progress_bar(f"capturing {model}"):
        graph = load_graph(model, seq_len, recipe)
    if graph.assumed:
        show(Text(f"{model} does not state {', '.join(graph.assumed)}: taken from the class."), stderr=True)
    with progress_bar("searching") as bar:

        def watch(what: str, done: int, known: int) -> None:
            bar.update(bar.task_ids[0], description=what, completed=done, total=known)

        found = search(
            graph,
            machine,
            global_batch=global_batch,
            fix=fixes,
            optimizer=optimizer,
            time_limit_s=time_limit,
            progress=watch,
        )
    # A path by its last part, so that the bytes do not depend on the folder.
    _deliver(found.with_source(Path(model).name), output)


def told(fix: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fix.items())


def _deliver(found: Plan, output: Path | None) -> None:
    """The explanation on stdout, unless the plan itself goes there."""
    if output == STDOUT:
        typer.echo(found.content.decode(), nl=False)
        return
    show(explain(found))
    if output is not None:
        found.save(output)
        show(Text(f"Written to {output}."))
