"""`--fix name=value`, repeatable and comma-separated: how pins are written on the command line."""

from __future__ import annotations

import typer

from hpsearch.errors import LegalityError, PlanError
from hpsearch.search.fix import KEYS, parse_fix

EXPECTED = (
    f"Keys are {', '.join(KEYS)}, or a parameter's name or pattern with its stored layout (lm_head.weight=tp:S0)."
)


def parse_fixes(words: list[str]) -> dict[str, str]:
    """`["tp=4,dp_shard=2", "lm_head.weight=R"]` → `{"tp": "4", …}`. Wrong usage (exit code 2) names the legal set."""
    fixes: dict[str, str] = {}
    for word in (piece for given in words for piece in _split(given)):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not name or not value:
            raise typer.BadParameter(f"expected name=value, but got {word!r}. {EXPECTED}")
        if fixes.get(name, value) != value:
            raise typer.BadParameter(f"{name} is pinned twice, to {fixes[name]} and to {value}.")
        fixes[name] = value
    try:
        parse_fix(fixes)
    except (LegalityError, PlanError) as error:
        raise typer.BadParameter(str(error)) from None
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
