"""`--fix name=value`: the one spelling for pinning a choice of the search."""

from __future__ import annotations

import typer

from hpsearch.errors import PlanError
from hpsearch.layout import Layout

DEGREES = ("tp", "dp_shard", "dp_replicate", "micro_batches")
CHOICES = {"recompute": ("none", "full")}
KEYS = (*DEGREES, *CHOICES)
EXPECTED = f"Keys are {', '.join(KEYS)}, or a parameter's name or pattern with its stored layout (lm_head.weight=tp:S0)."


def parse_fixes(words: list[str]) -> dict[str, str]:
    """`["tp=4,dp_shard=2", "lm_head.weight=R"]` → `{"tp": "4", …}`. Usage errors (exit code 2) name the legal set."""
    fixes: dict[str, str] = {}
    for word in (piece for given in words for piece in _split(given)):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not name or not value:
            raise typer.BadParameter(f"expected name=value, but got {word!r}. {EXPECTED}")
        if fixes.get(name, value) != value:
            raise typer.BadParameter(f"{name} is pinned twice, to {fixes[name]} and to {value}.")
        fixes[name] = _checked(name, value)
    return fixes


def _split(text: str) -> list[str]:
    """At commas outside braces: `layers.{0,2}.w=tp:S0,tp=2` is two pins."""
    pieces, depth = [""], 0
    for char in text:
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    return [piece for piece in pieces if piece.strip()]


def _checked(name: str, value: str) -> str:
    if name in DEGREES:
        if not value.isascii() or not value.isdigit() or int(value) < 1:
            raise typer.BadParameter(f"{name} must be a positive whole number, but is {value!r}.")
        return str(int(value))
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise typer.BadParameter(f"{name} must be {' or '.join(CHOICES[name])}, but is {value!r}.")
        return value
    if "." not in name and value != "R" and ":" not in value:
        raise typer.BadParameter(f"unknown key {name!r}. {EXPECTED}")
    try:
        return str(Layout.parse(value))
    except PlanError as error:
        raise typer.BadParameter(f"{name}: {error}") from None
