"""What commands print to: results on stdout, everything else on stderr, progress only where somebody watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PIPE_WIDTH = 120
"""Columns when the output is no terminal, where nothing says how wide it is."""


def show(*parts: RenderableType, stderr: bool = False) -> None:
    """Prints results, plain and without colour when piped."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)
    console.print(*parts, sep="\n")


def complain(error: Exception) -> None:
    """One error, in full and unstyled, on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"hpsearch: {error}", markup=False, emoji=False)


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar on stderr that vanishes at the end; silent when stderr is no terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(title, total=None)
        yield bar
