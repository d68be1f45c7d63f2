"""`Statement`: one line of an emitted program, with what it reads, writes and sends."""

from __future__ import annotations

from dataclasses import dataclass

from hpsearch.layout import Layout


@dataclass(frozen=True)
class Sent:
    """What the collective of a statement hands over, by the conventions of layout/redistribute.py."""

    kind: str
    axis: str
    what: str
    """Parameter pattern, or graph/value name."""
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Statement:
    writes: tuple[str, ...]
    text: str
    """One line of Python."""
    reads: tuple[str, ...]
    """Local names in the order of their use; a name may stand twice."""
    phase: str
    """forward or backward."""
    kind: str
    """op, view (shares its operand's memory), local (free change of layout), issue, wait, or call (of a block)."""
    comment: str = ""
    sent: Sent | None = None
    """Only for kind issue."""
    inside: tuple[Sent, ...] = ()
    """Only for kind op: what the function itself sends, one after another (attention over a cut sequence)."""
    op: str = ""
    """Only for kinds op and view: the traced op it runs."""
    call: int = -1
    """Only for kind call: index into the outer graph's calls."""


@dataclass(frozen=True)
class LocalValue:
    """A tensor as the emitted program has it on one rank."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    layout: Layout
    per_row: tuple[int, ...] = ()
    """Along each dim the elements of one row of the batch; 0 or nothing where a dim is not made of rows."""
