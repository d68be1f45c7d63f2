"""Searched against run: for the model, devices, batch and switches of a published row, the best layout of the space,
and what the row's own layout is predicted to take by the same price.

A row's own layout has every micro-batch on the timeline, as the search has; whether it fits is predicted too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.errors import HpsearchError, LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout, memory
from hpsearch.estimate.stages import sizes_of
from hpsearch.space import Found, Space, best
from hpsearch.space.exact import simulated
from hpsearch.space.rules import Rules
from hpsearch.space.space import MOST_VIRTUAL
from hpsearch.space.tables import inner
from hpsearch.validate.predict import cases
from hpsearch.validate.rows import Case, Row, full_layout

LONGEST_S = 300.0
"""Of one search, by the clock; then its best answer counts, with the gap that is left."""
SAME = 1e-9
"""Relative difference of two prices of one layout."""


@dataclass(frozen=True)
class Against:
    """A row beside the best layout of its search."""

    case: Case
    own: ParallelLayout
    own_s: float
    outside: str
    """By which rule the own layout is not of the space; empty: it is."""
    found: Found
    cpu_s: float
    """Of the search; 0 for a row whose search was done for another."""

    @property
    def gain(self) -> float:
        """Share of the own layout's step that the best saves."""
        return 1 - self.found.best.step_s / self.own_s

    @property
    def is_slower(self) -> bool:
        """Whether the search found nothing as good as the own layout."""
        return self.found.best.step_s > self.own_s * (1 + SAME)


@dataclass(frozen=True)
class Left:
    """A row that is not compared, and why."""

    row: Row
    why: str


def against(rows: Iterable[Row]) -> Iterator[Against | Left]:
    """Every row with a full layout. Equal searches are done once, for the first of their rows."""
    searches: dict[tuple[ModelShape, Cluster, ParallelLayout], Found | str] = {}
    for row, one in cases(row for row in rows if full_layout(row)):
        if isinstance(one, str):
            yield Left(row, one)
            continue
        own = as_searched(one.layout)
        try:
            own_s = _own_s(one, own)
        except LegalityError as error:
            yield Left(row, error.problem)
            continue
        if own_s is None:
            ran = "it ran" if row["result"]["status"] == "ok" else f"the row says {row['result']['status']}"
            yield Left(row, f"its own layout is predicted not to fit; {ran}")
            continue
        key, cpu_s = (one.shape, one.cluster, switches(one.layout)), 0.0
        if key not in searches:
            started = time.process_time()
            searches[key] = _searched(Space(*key))
            cpu_s = time.process_time() - started
        found = searches[key]
        if isinstance(found, str):
            yield Left(row, found)
        else:
            yield Against(one, own, own_s, outside(Space(*key), own), found, cpu_s)


def _searched(space: Space) -> Found | str:
    try:
        return best(space, time_limit_s=LONGEST_S)
    except HpsearchError as error:
        return f"{error.subject}: {error.problem}"


def as_searched(layout: ParallelLayout) -> ParallelLayout:
    """A row's own layout with the marks of the same layout in the space."""
    return replace(layout, recompute_share=1.0) if layout.recompute != "full" else layout


def switches(layout: ParallelLayout) -> ParallelLayout:
    """What a search keeps of a row's own layout: batch, sequence, precision, kernels, overlaps; no dimension."""
    return replace(
        layout, devices=1, micro_batch=1, tp=1, pp=1, cp=1, ep=1, etp=1, vpp=1, schedule="", sp=False, cp_kind="ring",
        zero=1, fsdp=False, shard_ranks=0, recompute="none", recompute_parts=frozenset({"attention"}),
        recompute_share=1.0, cut=(), recomputed=(),
    )  # fmt: skip


def _own_s(case: Case, own: ParallelLayout) -> float | None:
    """Seconds of the row's own layout; None if it is predicted not to fit."""
    shape, cluster = case.shape, case.cluster
    priced = inner(shape, own, cluster)
    if memory(shape, own, works=priced.works).peak_bytes > cluster.device.memory_bytes:
        return None
    return simulated(shape, own, cluster, priced, efficiency_of(cluster.device.name, cluster.efficiency))[0]


def outside(space: Space, own: ParallelLayout) -> str:
    """The first rule by which `own` is not of the space, with its value; empty if it is."""
    shape, rules, inner_ranks = space.shape, Rules(), own.tp * own.cp
    legal: tuple[tuple[str, object, Iterable[object]], ...] = (
        ("cp", own.cp, rules.legal_cp(shape, own.seq_len, space.devices)),
        ("tp", own.tp, rules.legal_tp(shape, space.devices // own.cp, own.precision)),
        ("cp_kind", own.cp_kind, rules.legal_cp_kinds(shape, own.tp, own.cp)),
        ("etp", own.etp, rules.legal_etp(shape, own.tp, own.precision)),
        ("ep", own.ep, rules.legal_ep(shape, space.devices // own.etp)),
        ("micro_batch", own.micro_batch, space.rows(own.cp)),
        ("pp", own.pp, rules.legal_pp(shape, space.devices // inner_ranks)),
        ("vpp", own.vpp, rules.legal_vpp(shape, own.pp, own.micro_batches, MOST_VIRTUAL)),
        ("schedule", own.schedule_kind, rules.legal_schedules(own.pp, own.vpp, own.micro_batches)),
    )
    for name, value, values in legal:
        if value not in values:
            return f"{name} = {value}"
    if own.fsdp != (own.zero == 3) or (own.zero == 2 and own.pp > 1):
        return f"ZeRO {own.zero} with pp = {own.pp}, fully sharded storage = {own.fsdp}"
    if own.recompute == "selective" and "+".join(sorted(own.recompute_parts)) not in _parts(space):
        return "recompute of " + (" and ".join(sorted(own.recompute_parts)) or "no part")
    if own.recompute == "full" and own.recompute_share < 1:
        return f"recompute of a share of {own.recompute_share} of every layer"
    if own.pp > 1 and min(sizes_of(shape, own.chunks)) < 1:
        return "a stage without layers"
    return ""


def _parts(space: Space) -> set[str]:
    return {"+".join(sorted(part.split("+"))) for part in space.recomputes()}
