"""`hpsearch clusters`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from hpsearch.cli.machine import load_machine
from hpsearch.cli.screen import show
from hpsearch.cluster import LOCAL, LOCAL_SUMMARY, shipped
from hpsearch.cluster.find import FILE_NAME, cost_models, find
from hpsearch.cluster.read import Description, read
from hpsearch.plan.tables import table
from hpsearch.plan.units import size


def clusters_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show this one: every number, its source.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="With so many devices (default: all).")] = None,
) -> None:
    """Lists the clusters that ship, or shows one of them, or one described in a file."""
    if name is None:
        show(listing())
        return
    if devices is None and name == LOCAL:
        raise typer.BadParameter("say how many ranks of this machine to measure.", param_hint="--devices")
    if devices is None:
        devices = _described(find(name, 1)).tiers[-1].size
    show(Text(str(load_machine(name, devices))))


def listing() -> Table:
    """The table of what ships, `local` last."""
    made = table("Clusters", "name", "device", "memory", "tiers, devices inside", "numbers by kind", "what it is")
    for name in shipped():
        if name == LOCAL:
            continue
        found = _described(cost_models() / name / FILE_NAME)
        tiers = ", ".join(f"{tier.name} {tier.size}" for tier in found.tiers)
        kinds = [fact.kind for fact in found.facts]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        counted += f"; from {len({fact.source for fact in found.facts})} sources"
        made.add_row(name, found.device.name, size(found.device.memory_bytes), tiers, counted, found.summary)
    made.add_row(LOCAL, "a process", "its share", "this machine", "measured", LOCAL_SUMMARY)
    return made


def _described(path: Path) -> Description:
    return read(path.read_text(encoding="utf-8"), str(path))
