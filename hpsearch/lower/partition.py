"""From one list of statements to functions: forward, backward_input and backward_weight, and what passes between them.

Backward statements that gradients of inputs need run first (backward_input); the rest, which leads to gradients of
parameters, runs after it or later (backward_weight). No statement runs in both. What backward reads of forward is
saved, except views of parameters: they are made again, so that a gathered parameter can be freed in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpsearch.lower.statement import Statement


@dataclass(frozen=True)
class Part:
    """The body of one emitted function."""

    statements: tuple[Statement, ...]
    params: tuple[str, ...]
    """Local names of the parameters it reads."""
    buffers: tuple[str, ...]
    reads: tuple[str, ...]
    """Local names of everything else it takes from outside."""
    writes: tuple[str, ...]
    """Local names it leaves; may contain names that it only passes on."""


@dataclass(frozen=True)
class Sources:
    """Who makes what, in one traced graph."""

    params: frozenset[str]
    buffers: frozenset[str]
    makers: Mapping[str, Statement]
    """Local name → the statement that makes it."""

    @staticmethod
    def of(statements: Iterable[Statement], params: Iterable[str], buffers: Iterable[str]) -> Sources:
        return Sources(frozenset(params), frozenset(buffers), {w: s for s in statements for w in s.writes})


def needed(statements: Sequence[Statement], wanted: Collection[str]) -> tuple[Statement, ...]:
    """The statements that `wanted` follows from, in order."""
    names, found = set(wanted), []
    for statement in reversed(statements):
        if not names.isdisjoint(statement.writes):
            names.update(statement.reads)
            found.append(statement)
    return tuple(reversed(found))


def outside_reads(statements: Iterable[Statement]) -> tuple[str, ...]:
    """Names read before they are made, in order of first use."""
    made: set[str] = set()
    found: dict[str, None] = {}
    for statement in statements:
        found.update((name, None) for name in statement.reads if name not in made)
        made.update(statement.writes)
    return tuple(found)


def make_part(statements: Sequence[Statement], writes: Sequence[str], sources: Sources) -> Part:
    """A function body around `statements`, views of parameters that come from elsewhere made again inside.

    `writes` may name things that the statements do not make; they are passed on.
    """
    body = tuple(statements)
    remade: dict[str, Statement] = {}
    for name in outside_reads(body):
        for statement in parameter_view(name, sources):
            remade[statement.writes[0]] = statement
    place = {name: i for i, name in enumerate(sources.makers)}
    body = (*sorted(remade.values(), key=lambda s: place[s.writes[0]]), *body)
    reads = list(outside_reads(body))
    made = {w for s in body for w in s.writes}
    reads += [name for name in dict.fromkeys(writes) if name not in made and name not in reads]
    return Part(
        body,
        tuple(n for n in reads if n in sources.params),
        tuple(n for n in reads if n in sources.buffers),
        tuple(n for n in reads if n not in sources.params and n not in sources.buffers),
        tuple(writes),
    )


def parameter_view(name: str, sources: Sources) -> tuple[Statement, ...]:
    """The statements that make `name` out of parameters by views and free local changes alone; else none."""
    maker = sources.makers.get(name)
    if maker is None or maker.kind not in ("view", "local") or len(maker.writes) != 1:
        return ()
    found: list[Statement] = []
    for read in maker.reads:
        if read in sources.params:
            continue
        before = parameter_view(read, sources)
        if not before:
            return ()
        found += before
    return (*found, maker)


@dataclass(frozen=True)
class Backward:
    """The two halves of a backward pass."""

    input: Part
    """Makes the gradients of inputs; its writes end with what the other half needs (`kept`)."""
    weight: Part
    """Makes the gradients of parameters out of what the first half kept."""
    kept: tuple[str, ...]


def split_backward(
    statements: Sequence[Statement], input_grads: Sequence[str], param_grads: Sequence[str], sources: Sources
) -> Backward:
    """`statements` of a backward pass in two halves; those that lead to neither kind of gradient are dropped."""
    first = needed(statements, set(input_grads))
    done = {name for s in first for name in s.writes}
    second = needed([s for s in statements if done.isdisjoint(s.writes)], set(param_grads))
    weight = make_part(second, tuple(param_grads), sources)
    return Backward(make_part(first, (*input_grads, *weight.reads), sources), weight, weight.reads)
