"""The outer space: which meshes, micro-batch counts and recomputed blocks are considered, and which are refused.

Meshes have one or two axes out of dp_replicate, dp_shard and tp; tp stands on neighbouring ranks. dp_replicate with tp
is left out unless pinned: dp_shard x tp contains it, since every parameter may be stored whole there. Of a model with
experts every legal degree of ep stands on top of each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from hpsearch.cluster import Cluster
from hpsearch.cost import CostTable
from hpsearch.errors import LegalityError
from hpsearch.graph import ModelGraph
from hpsearch.layout import Mesh, MeshAxis
from hpsearch.layout.mesh import RANK_ORDER
from hpsearch.plan import Refusal
from hpsearch.search.context import with_exchanges
from hpsearch.search.fix import Fix
from hpsearch.search.hops import with_hops
from hpsearch.strategy import (
    WHY_WHOLE,
    check_degree,
    check_experts,
    check_micro_batches,
    head_counts,
    is_legal_tp,
    legal_ep,
)

SPACE = (
    "meshes of one or two axes out of dp_replicate, dp_shard, tp (tp on neighbouring ranks), and ep where there are "
    "experts, cp where it is pinned; data axes split the batch; "
    "on tp every op takes any rule of its table; per parameter stored whole, ZeRO-2 or ZeRO-3; "
    "micro-batch count; recompute none or full per block class"
)


SEARCHED = ("dp_replicate", "dp_shard", "tp")
"""Axes whose degrees are searched, two at most; ep comes on top, and others where they are pinned."""


@dataclass(order=True)
class Entry:
    """A candidate that waits for its turn."""

    bound_s: float
    order: int
    table: CostTable = field(compare=False)
    label: str = field(compare=False)


@dataclass(frozen=True)
class Branch:
    """One mesh and one set of recomputed block classes; micro-batch counts are its candidates."""

    mesh: Mesh
    recompute: frozenset[str]

    def label(self, micro_batches: int) -> str:
        degrees = " ".join(f"{a.name}={a.size}{_way(a)}" for a in self.mesh.axes)
        degrees = degrees or "1 device"
        again = f" recompute={'+'.join(sorted(self.recompute))}" if self.recompute else ""
        return f"{degrees} micro_batches={micro_batches}{again}"


def _way(axis: MeshAxis) -> str:
    """How ranks of an axis reach each other where there are several ways."""
    way = axis.exchange or (f"together {' x '.join(map(str, axis.hops))}" if axis.hops else "")
    return f" ({way})" if way else ""


def with_tiers(mesh: Mesh, cluster: Cluster) -> Mesh:
    """The mesh with each axis told the outermost tier that its groups span."""
    return Mesh(tuple(replace(a, tier=cluster.tier_of(a.size, a.stride).name) for a in mesh.axes))


def branches_of(
    model: ModelGraph, cluster: Cluster, global_batch: int, fix: Fix, pp: int = 1
) -> Iterator[tuple[Branch, int]]:
    """Meshes of one of `pp` stages, each with its recomputed blocks and micro-batch counts."""
    for degrees in meshes(model, cluster.devices // pp, fix):
        for mesh in with_exchanges(with_tiers(Mesh.of(**degrees), cluster), model, fix):
            for again in recompute_sets(model, fix):
                for m in micro_batch_counts(model, global_batch, mesh, fix):
                    hops = with_hops(mesh, model, cluster, global_batch // m, fix)
                    yield Branch(hops, again), m


def meshes(model: ModelGraph, devices: int, fix: Fix) -> Iterator[dict[str, int]]:
    """Degrees whose product is `devices`, data axes first; pinned degrees as pinned.

    Raises LegalityError when a pinned degree is illegal for the model or the device count.
    """
    _check_pins(model, devices, fix)
    further = {name: size for name, size in fix.degrees.items() if name not in SEARCHED}
    legal, cp = legal_ep(model), fix.degrees.get("cp", 1) if fix.over_cp else 1
    for ep in [fix.degrees["ep"]] if "ep" in fix.degrees else [ep for ep in legal if ep * cp in legal]:
        left, rest = divmod(devices, prod((further | {"ep": ep}).values()))
        if not rest:
            yield from (degrees | further | {"ep": ep} for degrees in _meshes(model, left, fix))


def _meshes(model: ModelGraph, devices: int, fix: Fix) -> Iterator[dict[str, int]]:
    """Degrees of the axes out of SEARCHED."""
    for tp in _divisors(devices):
        if fix.degrees.get("tp", tp) != tp or not is_legal_tp(model, tp):
            continue
        rest = devices // tp
        for dp_replicate in _divisors(rest):
            degrees = {"dp_replicate": dp_replicate, "dp_shard": rest // dp_replicate, "tp": tp}
            if any(degrees[name] != fix.degrees.get(name, degrees[name]) for name in SEARCHED):
                continue
            axes = sum(size > 1 for size in degrees.values())
            pinned = "dp_replicate" in fix.degrees
            if axes <= 2 and (dp_replicate == 1 or pinned or (tp == 1 and degrees["dp_shard"] > 1)):
                yield degrees


def _check_pins(model: ModelGraph, devices: int, fix: Fix) -> None:
    check_micro_batches(model.name, model.loss_reduction, fix.micro_batches or 1)
    if "tp" in fix.degrees:
        check_degree(model, fix.degrees["tp"])
    check_experts(model, fix.degrees.get("ep", 1), fix.degrees["cp"] if fix.over_cp else 1)
    product = 1
    for name in RANK_ORDER:
        product *= fix.degrees.get(name, 1)
    everything = set(SEARCHED) <= set(fix.degrees)
    if devices % product or (everything and product != devices):
        pins = " x ".join(f"{name}={size}" for name, size in fix.degrees.items())
        raise LegalityError(
            f"fix {pins}",
            f"expected degrees whose product divides the {devices} devices, but {pins} = {product}",
            f"Divisors of {devices}: {_divisors(devices)}.",
        )
    found = {name: size for name, size in fix.degrees.items() if name in SEARCHED}
    if sum(size > 1 for size in found.values()) > 2:
        pins = ", ".join(f"{name}={size}" for name, size in found.items())
        raise LegalityError(f"fix {pins}", "expected at most two axes larger than 1", "Pin one of them to 1.")


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def micro_batch_counts(model: ModelGraph, global_batch: int, mesh: Mesh, fix: Fix) -> list[int]:
    """Counts that leave every data rank equally many whole rows, smallest first; 1 alone where the loss needs all."""
    ranks = mesh.num_data_ranks
    counts = [m for m in _divisors(global_batch // ranks) if global_batch % (m * ranks) == 0] if ranks else []
    if global_batch % ranks:
        return []
    whole = model.loss_reduction == "whole"
    return [m for m in counts if fix.micro_batches in (None, m) and (m == 1 or not whole)]


def refused_meshes(model: ModelGraph, devices: int, global_batch: int, fix: Fix) -> Iterator[Refusal]:
    """Degrees of tp and of the data axes that divide the devices, but not the model's heads or the batch, and why."""
    if model.loss_reduction == "whole":
        yield Refusal(candidate="micro_batches > 1", reason=WHY_WHOLE)
    devices //= fix.degrees.get("cp", 1)
    for tp in _divisors(devices):
        if fix.degrees.get("tp", tp) != tp:
            continue
        odd = {name: count for name, count in head_counts(model).items() if count % tp}
        if odd:
            reason = ", ".join(f"{name} = {count} does not divide by {tp}" for name, count in odd.items())
            yield Refusal(candidate=f"tp={tp}", reason=reason)
        elif global_batch % (devices // tp):
            ranks = devices // tp
            reason = f"global batch {global_batch} does not divide by {ranks} data ranks"
            yield Refusal(candidate=f"tp={tp}, {ranks} data ranks", reason=reason)


def recompute_sets(model: ModelGraph, fix: Fix) -> list[frozenset[str]]:
    """None, or every block class; each class by itself while there are at most two of them."""
    names = sorted(model.blocks)
    if fix.recompute == "none" or not names:
        return [frozenset()]
    if fix.recompute == "full":
        return [frozenset(names)]
    if len(names) <= 2:
        return [frozenset(n for i, n in enumerate(names) if bits >> i & 1) for bits in range(2 ** len(names))]
    return [frozenset(), frozenset(names)]
