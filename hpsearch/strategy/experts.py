"""Experts are spread over ep in equal shares: ep must divide every number of experts of the model."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from hpsearch.cluster.dispatch import parts_met
from hpsearch.errors import LegalityError
from hpsearch.graph import ModelGraph, Op
from hpsearch.graph.routed import COMBINE_BACKWARD, ROUTE
from hpsearch.layout import Collective, MeshAxis


def expert_counts(model: ModelGraph) -> dict[str, int]:
    """Numbers of experts by the name a message gives them, one name for each number."""
    found: dict[str, int] = {}
    for graph, _ in model.pieces():
        for op in graph.ops:
            count = graph.values[op.outputs[1]].fixed[0] if op.target == ROUTE else 0
            if count and count not in found.values():
                found[f"experts at {op.source or op.scope or op.name}"] = count
    return found


def legal_ep(model: ModelGraph) -> list[int]:
    """Every degree that divides all numbers of experts; 1 alone for a model without any."""
    common = gcd(*expert_counts(model).values()) or 1
    return [degree for degree in range(1, common + 1) if common % degree == 0]


def check_experts(model: ModelGraph, ep: int, cp: int = 1) -> None:
    """Raises LegalityError naming each number of experts that ep, times the cp they are spread over too, does not
    divide, and the legal set."""
    counts, ranks = expert_counts(model), ep * cp
    wrong = {name: count for name, count in counts.items() if count % ranks}
    if ranks == 1 or (counts and not wrong):
        return
    expected = " and ".join(f"the {count} {name}" for name, count in wrong.items())
    found = " and ".join(f"{count} % {ranks} = {count % ranks}" for count in wrong.values())
    raise LegalityError(
        f"ep={ep}" + (f" over cp={cp}" if cp > 1 else ""),
        f"expected a divisor of {expected}, but {found}" if counts else "expected a model with experts, but found none",
        f"Legal ep for {model.name}: {legal_ep(model)}.",
    )


def token_messages(
    axes: Sequence[MeshAxis], nbytes: int, experts: int, top_k: int, own: int = 1
) -> tuple[Collective, ...]:
    """What one move of tokens sends over the axes of experts, routing even: one exchange, or one a hop.

    nbytes: of one rank's tokens with a copy for each of the `top_k` experts, of which ranks that have the same tokens
    keep a part each; `own`: how many. A hop carries one copy for each part that a token meets, over all hops so far.
    """
    found, parts = [], own
    for axis in axes:
        if not axis.hops:
            found.append(Collective("all_to_all", axis.name, nbytes))
        for i, size in enumerate(axis.hops):
            parts *= size
            share = parts_met(parts, experts, top_k) / top_k
            found.append(Collective("all_to_all", f"{axis.name}/{i}", round(nbytes * share)))
    return tuple(found)


def slot_messages(axes: Sequence[MeshAxis], op: Op, nbytes: int) -> tuple[Collective, ...]:
    """What an op sends besides tokens where experts have a capacity: of combine's backward the weight of each slot
    there, and its gradient back. nbytes: of one number for each of a rank's slots."""
    each = tuple(Collective("all_to_all", axis.name, nbytes) for axis in axes)
    return each * (2 if op.target == COMBINE_BACKWARD else 0)
