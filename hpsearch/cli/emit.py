"""`hpsearch emit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hpsearch.cli.model import load_captured
from hpsearch.cli.options import Model
from hpsearch.cli.screen import progress_bar, show
from hpsearch.errors import LegalityError, PlanError
from hpsearch.files import check_output, deliver
from hpsearch.plan import Plan

STDOUT = Path("-")


def emit_command(
    plan: Annotated[Path, typer.Argument(metavar="F", help="A plan file.")],
    model: Model,
    rank: Annotated[int, typer.Option(metavar="R", help="Whose program: a rank of the job.")] = 0,
    seq_len: Annotated[
        int | None, typer.Option(metavar="S", min=1, help="Tokens of a row; by default those the plan was made for.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="F", help="Write it here; - is stdout.")] = STDOUT,
) -> None:
    """Prints the program that a rank runs under a plan, as Python, with the order of its actions. Needs no device."""
    if output != STDOUT:
        check_output(output)
    loaded = Plan.load(plan)
    count = loaded.num_ranks
    if not 0 <= rank < count:
        raise LegalityError(f"rank {rank}", f"expected one of the plan's {count} ranks, 0 to {count - 1}", "Name one.")
    with progress_bar(f"capturing {model}"):
        captured = load_captured(model, seq_len or _seq_len(loaded), loaded.file.job.recipe, loaded.micro_batch_rows)
    checked = Plan.from_bytes(loaded.content, str(plan), captured.graph)
    # Needs torch, which the commands that only plan do without.
    from hpsearch.lower import lower
    from hpsearch.lower.listing import listing

    with progress_bar("lowering"):
        text = listing(lower(captured, checked), rank)
    if output == STDOUT:
        typer.echo(text, nl=False)
        return
    deliver(output, text.encode())
    show(Text(f"Written to {output}."), stderr=True)


def _seq_len(plan: Plan) -> int:
    """Of the first input that has rows and tokens."""
    for entry in plan.file.inputs:
        if len(entry.shape) == 2:
            return entry.shape[1]
    problem = "expected an input of rows and tokens among the plan's, but found none"
    raise PlanError("sequence length", problem, "Name it with --seq-len.")
