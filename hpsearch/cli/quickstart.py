"""`hpsearch quickstart`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hpsearch.cli.screen import progress_bar, show
from hpsearch.plan import units
from hpsearch.plan.explain import explain
from hpsearch.plan.tables import table

AGREES = 1e-5
"""Largest relative difference of losses in fp32 that counts as equal."""


def quickstart_command(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="F", help="Where the plan goes.")] = Path(
        "plan.json"
    ),
) -> None:
    """Measures this machine, searches a plan for a small Llama on four ranks, trains it, and compares.

    Needs the extra `hf` (transformers). Exits with 1 when the losses differ from those of one process.
    """
    began = time.monotonic()
    with progress_bar("importing torch and transformers"):
        from hpsearch import quickstart
        from hpsearch.measure import load_cluster
    cluster = load_cluster("local", devices=quickstart.RANKS)
    with progress_bar("capturing a small Llama and searching a plan"):
        plan = quickstart.search(cluster, output)
    show(explain(plan), Text(f"Written to {output}. To read it again: hpsearch explain {output}\n"))
    with progress_bar(f"training on {quickstart.RANKS} ranks under torchrun"):
        parallel = quickstart.train_on_ranks(output)
    with progress_bar("training in one process"):
        alone = quickstart.train_alone()
    largest = max(abs(a - b) / abs(b) for a, b in zip(parallel, alone, strict=True))
    losses = table("Losses", "AdamW step", f"{quickstart.RANKS} ranks", "one process", "relative difference")
    for step, (a, b) in enumerate(zip(parallel, alone, strict=True), start=1):
        losses.add_row(str(step), f"{a:.7f}", f"{b:.7f}", f"{abs(a - b) / abs(b):.1e}")
    verdict = "equal" if largest <= AGREES else "NOT EQUAL"
    elapsed = units.seconds(time.monotonic() - began)
    show(losses, Text(f"Largest relative difference {largest:.1e}: {verdict} (limit {AGREES:g}). {elapsed} in all."))
    if largest > AGREES:
        raise typer.Exit(1)
