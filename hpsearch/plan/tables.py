"""The one look of every table."""

from __future__ import annotations

from rich import box
from rich.console import RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text


class PlainTable(Table):
    """A table whose cells stand as they are: names may hold brackets, which rich would take for markup."""

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        plain = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*plain, style=style, end_section=end_section)


def table(title: str, *columns: str) -> Table:
    """An empty table with a title; long names fold instead of being cut."""
    made = PlainTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made
