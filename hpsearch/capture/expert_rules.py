"""Sharding rules of the operators of mixtures of experts.

Rows of experts are cut in one of three ways on an axis, and nothing may turn one into another, or gather them: they
are sorted on each rank by itself. Which one it is shows in `counts`.

    by token    each rank has the rows of its own tokens for all experts      tokens S0, weights R,  rows S0, counts P
    exchanged   each rank has the rows of all tokens for its own experts      tokens S0, weights S0, rows S0, counts S0
    own         the same, where every rank has all tokens: none is sent       tokens R,  weights S0, rows S0, counts S0

Sums over the experts of a token are whole when rows were exchanged (they come back), addends when each rank has its
own.
Besides, features may be cut: of the stream, or of the experts' inner dim, as in any product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hpsearch.capture.op_facts import OpFacts
from hpsearch.graph import Rule


def _rule(inputs: str, outputs: str) -> Rule:
    return tuple(inputs.split()), tuple(outputs.split())


def _fixed(*rules: tuple[str, str]) -> Callable[[OpFacts], Iterable[Rule]]:
    found = tuple(_rule(*rule) for rule in rules)
    return lambda facts: found


def _grouped_mm(facts: OpFacts) -> Iterable[Rule]:
    """(rows [R, K], weight, counts) -> [R, N]; the weight is [E, N, K], or [E, K, N] if transposed."""
    inner, outer = ("S1", "S2") if facts.args[3] else ("S2", "S1")
    yield _rule("S0 R P", "S0")
    yield _rule("S0 S0 S0", "S0")
    yield _rule(f"R {outer} R", "S1")
    yield _rule(f"S1 {inner} R", "P")
    yield _rule("P R R", "P")
    yield _rule("R P R", "P")


def _grouped_mm_weight(facts: OpFacts) -> Iterable[Rule]:
    """(grad [R, N], rows [R, K], counts) -> the weight's gradient, [E, N, K] or [E, K, N]."""
    inner, outer = ("S1", "S2") if facts.args[3] else ("S2", "S1")
    yield _rule("S0 S0 P", "P")
    yield _rule("S0 S0 S0", "S0")
    yield _rule("S1 R R", outer)
    yield _rule("R S1 R", inner)
    yield _rule("P R R", "P")
    yield _rule("R P R", "P")


EXPERT_RULES: dict[str, Callable[[OpFacts], Iterable[Rule]]] = {
    "hpsearch.route.default": _fixed(("S0", "S0 P"), ("S0", "S0 S0"), ("R", "S0 S0")),
    "hpsearch.dispatch.default": _fixed(
        ("S0 S0 P", "S0"), ("S0 S0 S0", "S0"), ("R S0 S0", "S0"), ("S1 R R", "S1"), ("P R R", "P")
    ),
    "hpsearch.dispatch_backward.default": _fixed(
        ("S0 S0 P", "S0"), ("S0 S0 S0", "S0"), ("S0 S0 S0", "P"), ("S1 R R", "S1"), ("P R R", "P")
    ),
    "hpsearch.grouped_mm.default": _grouped_mm,
    "hpsearch.grouped_mm_weight.default": _grouped_mm_weight,
    "hpsearch.grouped_add.default": _fixed(("S0 R P", "S0"), ("S0 S0 S0", "S0"), ("S1 S1 R", "S1"), ("P P R", "P")),
    "hpsearch.grouped_sum.default": _fixed(("S0 P", "P"), ("S0 S0", "S0"), ("S1 R", "S1"), ("P R", "P")),
    "hpsearch.combine.default": _fixed(
        ("S0 S0 S0 P", "S0"), ("S0 S0 S0 S0", "S0"), ("S0 R S0 S0", "P"), ("S1 R R R", "S1"), ("P R R R", "P"),
        ("R P R R", "P"),
    ),
    "hpsearch.combine_backward.default": _fixed(
        ("S0 S0 S0 S0 P", "S0 S0"), ("S0 S0 S0 S0 S0", "S0 S0"), ("R S0 R S0 S0", "S0 P"), ("S1 S1 R R R", "S1 P"),
        ("P R R R R", "P P"), ("R P R R R", "R P"),
    ),
}  # fmt: skip
