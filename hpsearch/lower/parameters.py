"""Parameters between steps and inside a piece: how each is gathered for use, and how its gradient gets home.

A parameter rests as a shard in the master dtype. It is cast to the compute dtype before it is gathered, and its
gradient is cast to the reduce dtype before it is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpsearch.cost.job import RECIPES
from hpsearch.errors import LoweringError
from hpsearch.graph import Param
from hpsearch.layout import Layout, Mesh
from hpsearch.lower.redistribution import redistribute_value
from hpsearch.lower.statement import LocalValue, Statement
from hpsearch.plan.schema import ParamEntry

MASTER_DTYPE = {name: recipe.master for name, recipe in RECIPES.items()}
"""Dtype of parameters at rest and of optimizer state, by recipe."""
REDUCE_DTYPE = {name: recipe.reduce for name, recipe in RECIPES.items()}
"""Dtype in which gradients are added up, over micro-batches and ranks, by recipe."""


@dataclass(frozen=True)
class ParamSlot:
    """A parameter as a rank stores it."""

    fqn: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    """Global shape."""
    stored: Layout
    """Layout at rest, of the gradient that comes back too. Cuts may be uneven (torch.chunk), pieces may be empty."""
    master_dtype: torch.dtype
    reduce_dtype: torch.dtype
    compute_dtype: torch.dtype
    trainable: bool
    pattern: str
    """The plan's name for it."""
    residency: str
    reduce: str


@dataclass(frozen=True)
class ParamUse:
    """A parameter inside one piece."""

    local: str
    """FQN inside the piece."""
    name: str
    """Local name in the emitted functions."""
    entry: ParamEntry
    used: Layout
    gather: tuple[tuple[Statement, ...], ...]
    """Rounds: the first ends by issuing a collective, each further one starts by waiting for it; one round when there
    is no collective. Reads `local`'s stored shard as `<name>__stored`, makes `name`."""
    gradient: Layout | None
    """Layout in which backward leaves the gradient; None when there is none."""
    reduce: tuple[tuple[Statement, ...], ...]
    """Rounds that read `<name>__grad` and make `<name>__reduced`."""


def make_slot(param: Param, entry: ParamEntry, recipe: str) -> ParamSlot:
    return ParamSlot(
        fqn=param.fqn,
        aliases=param.aliases,
        shape=param.shape,
        stored=Layout.parse(entry.stored),
        master_dtype=torch_dtype(MASTER_DTYPE[recipe]),
        reduce_dtype=torch_dtype(REDUCE_DTYPE[recipe]),
        compute_dtype=torch_dtype(param.dtype),
        trainable=param.trainable,
        pattern=entry.pattern,
        residency=entry.residency,
        reduce=entry.reduce,
    )


def make_use(
    local: str, value: LocalValue, entry: ParamEntry, gradient: Layout | None, recipe: str, mesh: Mesh
) -> ParamUse:
    """How a piece gets at a parameter (`value`: the parameter as its ops use it) and sends its gradient home."""
    stored = Layout.parse(entry.stored)
    if entry.residency == "stored" and stored != value.layout:
        raise LoweringError(
            f"parameter {entry.pattern}",
            f"residency is `stored`, but it is stored {stored} and used {value.layout}",
            "Write residency `step` or `micro_batch`, or the same layout twice.",
        )
    note = f"plan: {entry.pattern}"
    shard = LocalValue(f"{value.name}__stored", value.shape, value.dtype, stored)
    cast = _cast(f"{shard.name}__cast", shard.name, value.dtype, "forward")
    moved = redistribute_value(
        LocalValue(cast.writes[0], value.shape, value.dtype, stored),
        value.layout,
        mesh,
        phase="gather",
        what=entry.pattern,
        name=value.name,
        comment=note,
    )
    gather = _rounds([cast, *moved], value.name)
    reduce: tuple[tuple[Statement, ...], ...] = ()
    if gradient is not None:
        dtype = REDUCE_DTYPE[recipe]
        raw = _cast(f"{value.name}__cast", f"{value.name}__grad", dtype, "reduce")
        back = redistribute_value(
            LocalValue(raw.writes[0], value.shape, dtype, gradient),
            stored,
            mesh,
            phase="reduce",
            what=entry.pattern,
            name=f"{value.name}__reduced",
            comment=note,
        )
        reduce = _rounds([raw, *back], f"{value.name}__reduced")
    return ParamUse(local, value.name, entry, value.layout, gather, gradient, reduce)


def _cast(name: str, source: str, dtype: str, phase: str) -> Statement:
    return Statement((name,), f"{name} = {source}.to(torch.{dtype})", (source,), phase, "local")


def _rounds(statements: Sequence[Statement], name: str) -> tuple[tuple[Statement, ...], ...]:
    """Cut in front of each wait; the last statement is made to write `name`."""
    rounds: list[list[Statement]] = [[]]
    for statement in statements:
        if statement.kind == "wait":
            rounds.append([])
        rounds[-1].append(statement)
    last = rounds[-1][-1]
    text = name + last.text[len(last.writes[0]) :]
    rounds[-1][-1] = Statement((name,), text, last.reads, last.phase, last.kind, last.comment, last.sent)
    return tuple(tuple(r) for r in rounds)


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
