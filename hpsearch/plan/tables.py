"""The one look of every table."""

from __future__ import annotations

from rich import box
from rich.table import Table


def table(title: str, *columns: str) -> Table:
    """An empty table with a title; long names fold instead of being cut."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made
