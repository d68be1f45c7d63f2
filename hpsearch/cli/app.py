"""The command line: one function a command, errors in one line, exit codes that scripts can tell apart.

0 done; 1 an error; 2 wrong usage; 3 nothing feasible (the message says the least memory found and what fills it).
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from hpsearch import __version__
from hpsearch.cli.aim import aim_command
from hpsearch.cli.calibrate import calibrate_command
from hpsearch.cli.clusters import clusters_command
from hpsearch.cli.emit import emit_command
from hpsearch.cli.estimate import estimate_command
from hpsearch.cli.explain import explain_command
from hpsearch.cli.plan import plan_command
from hpsearch.cli.profile import profile_command
from hpsearch.cli.quickstart import quickstart_command
from hpsearch.cli.screen import complain
from hpsearch.cli.search import rules_command, search_command
from hpsearch.cli.together import together_command
from hpsearch.errors import HpsearchError

app = typer.Typer(
    name="hpsearch",
    help="Finds the fastest parallel training plan for a model on a cluster, proves how good it is, and runs it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpsearch {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before the command."""


app.command("plan")(plan_command)
app.command("search")(search_command)
app.command("aim")(aim_command)
app.command("together")(together_command)
app.command("rules")(rules_command)
app.command("estimate")(estimate_command)
app.command("emit")(emit_command)
app.command("explain")(explain_command)
app.command("clusters")(clusters_command)
app.command("profile")(profile_command)
app.command("calibrate")(calibrate_command)
app.command("quickstart")(quickstart_command)


def run() -> NoReturn:
    """Runs the command of sys.argv and exits with its code; an error of ours is one message on stderr."""
    try:
        app(prog_name="hpsearch")
    except HpsearchError as error:
        complain(error)
        sys.exit(error.exit_code)
    sys.exit(0)
