"""Units of a block: what runs as one thing, however many operators it was traced as, with the sizes that price it."""

from __future__ import annotations

from dataclasses import dataclass

COLUMN, ROW, WHOLE = "column", "row", "whole"
"""How tensor parallelism cuts a linear: its outputs, its inputs, not at all."""


@dataclass(frozen=True)
class Linear:
    """A product of activations with a parameter [k, n]."""

    rows: float
    """Of the activations, for one row of the batch."""
    n: int
    k: int
    cut: str
    """column: n is split over tp; row: k is; whole: neither."""
    routes: bool = False
    """Chooses experts."""


@dataclass(frozen=True)
class Core:
    """Attention between projections: `heads` independent softmax(q k) v."""

    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    """Of one query and key."""
    v_width: int
    is_self: bool
    """Queries and keys of the same tokens."""
    inner: bool


@dataclass(frozen=True)
class Experts:
    """Routed experts: a token goes to `top_k` of them."""

    experts: int
    top_k: int
    rows: float
    """Tokens that are routed, before they are copied."""
    width: int
    ffn: int
    gated: bool
    bias: bool
    groups: int = 1
    most_groups: int = 1
    """Of how many groups of experts those of a token may be."""


@dataclass(frozen=True)
class Scan:
    """A linear recurrence along the sequence, run chunk by chunk as small products."""

    rows: float
    inner: int
    states: int
    """State size times groups."""
    state: int
    flops: float | None
    """Where the graph knows them; None: by the formula of Mamba-2."""
    heads: int = 1
