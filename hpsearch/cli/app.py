"""The command line: one function a command, errors in one line, exit codes that scripts can tell apart.

0 done; 1 an error; 2 wrong usage; 3 nothing feasible (the message says the least memory found and what fills it).
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, NoReturn

import typer

from hpsearch import __version__
from hpsearch.cli.screen import complain
from hpsearch.errors import HpsearchError

COMMANDS = {
    "plan": "plan", "search": "search", "aim": "aim", "together": "together", "rules": "search",
    "estimate": "estimate", "emit": "emit", "explain": "explain", "clusters": "clusters", "profile": "profile",
    "calibrate": "calibrate", "quickstart": "quickstart",
}  # fmt: skip
"""Command → module of this room that has it, as the help lists them."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpsearch {__version__}")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before the command."""


def app_of(words: list[str]) -> typer.Typer:
    """The program for these arguments: with the command that they name alone, since importing all takes half a second;
    with all where they name none."""
    app = typer.Typer(
        name="hpsearch",
        help="Finds the fastest parallel training plan for a model on a cluster, proves how good it is, and runs it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    first = next((word for word in words if not word.startswith("-")), "")
    for name in [first] if first in COMMANDS else COMMANDS:
        module = importlib.import_module(f"hpsearch.cli.{COMMANDS[name]}")
        app.command(name)(getattr(module, f"{name}_command"))
    return app


def run() -> NoReturn:
    """Runs the command of sys.argv and exits with its code; an error of ours is one message on stderr."""
    try:
        app_of(sys.argv[1:])(prog_name="hpsearch")
    except HpsearchError as error:
        complain(error)
        sys.exit(error.exit_code)
    sys.exit(0)
