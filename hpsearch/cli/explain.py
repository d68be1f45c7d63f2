"""`hpsearch explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpsearch.cli.screen import show
from hpsearch.plan import Plan
from hpsearch.plan.diff import diff
from hpsearch.plan.explain import explain, explain_parameter


def explain_command(
    plan: Annotated[Path, typer.Argument(metavar="F", help="A plan file.")],
    why: Annotated[str | None, typer.Option(metavar="FQN", help="Explain one parameter, by name or pattern.")] = None,
    other: Annotated[Path | None, typer.Option("--diff", metavar="G", help="What differs in this other plan.")] = None,
) -> None:
    """Says in words and tables what a plan does, what it costs and how good it is."""
    loaded = Plan.load(plan)
    if other is not None:
        show(diff(loaded, Plan.load(other)))
    if why is not None:
        show(explain_parameter(loaded, why))
    if other is None and why is None:
        show(explain(loaded))
