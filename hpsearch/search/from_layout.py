"""A found layout as pins for a plan: what `hpsearch search` chose and the emitted program has, the plan keeps; what no
program has yet is refused by name; what a plan decides for itself, parameter by parameter, is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from hpsearch.errors import LegalityError
from hpsearch.estimate import ParallelLayout
from hpsearch.search.fix import KEYS

CP_KINDS = {"ring": "ring", "gather": "gathered", "ulysses": "ulysses"}
"""What layouts call a way of attention over cut sequences → what plans call it."""


@dataclass(frozen=True)
class Pins:
    fix: dict[str, str]
    """As `--fix`."""
    left: tuple[str, ...]
    """What the plan decides for itself."""


def pins_of_layout(layout: ParallelLayout, devices: int, global_batch: int) -> Pins:
    """LegalityError: the layout has a dimension that no emitted program has, or is of other devices or rows."""
    if layout.stage_groups:
        raise LegalityError(
            f"layout, stage_groups = {', '.join(layout.stage_groups)}",
            "expected devices that are all alike, but found stages on groups of unlike nodes",
            "Search and plan with a cluster whose [device] is the weakest of them.",
        )
    for name, asked in (("devices", devices), ("global_batch", global_batch)):
        if (found := getattr(layout, name)) != asked:
            others = "" if name == "devices" else ", or for other --devices"
            raise LegalityError(
                f"layout, {name} = {found}", f"expected the {asked} that a plan is asked for, but the layout has "
                f"{'devices that stand idle' if found < asked else 'rows of no sequence'}",
                f"Search again with --{name.replace('_', '-')} {found}{others}.",
            )  # fmt: skip
    if layout.offload_share or layout.precision not in ("bf16", "fp16"):
        what = "offloaded activations" if layout.offload_share else f"precision {layout.precision}"
        raise LegalityError("layout", f"expected what a program has, but found {what}", "Search without.")
    spread, over_cp = _spread(layout)
    fix = {"tp": layout.tp, **_data(layout, spread), "micro_batches": layout.micro_batches}
    told = {name: str(value) for name, value in fix.items() if value > 1 or name == "micro_batches"}
    if layout.pp > 1:
        told |= {"pp": str(layout.pp), "vpp": str(layout.vpp), "schedule": layout.schedule_kind}
        told |= {"cut": "+".join(map(str, layout.cut))} if layout.cut else {}
    left = [f"ZeRO-{layout.zero}: each parameter's own storage"]
    if layout.tp > 1:
        left.append("where activations are cut between matmuls")
    if layout.cp > 1:
        told |= {"cp": str(layout.cp), "cp_kind": CP_KINDS[layout.cp_kind]}
        told |= {"ep_over": "cp"} if over_cp else {}
        left.append("states over dp_shard alone, whole on the ranks of cp")
    if layout.ep > 1 and layout.tp > 1:
        left.append(f"experts over tp, or each cut by it (etp {layout.etp})")
    if layout.capacity:
        told["capacity"] = str(layout.capacity)
    if layout.recompute == "none":
        told["recompute"] = "none"
    elif layout.recomputed == layout.cut and layout.recompute_share == 1.0 and layout.recompute == "full":
        told["recompute"] = "full"
    else:
        left.append(f"{layout.recompute} recompute of some layers: all or none of a kind of block")
    assert set(told) <= set(KEYS)
    return Pins(told, tuple(left))


def _spread(layout: ParallelLayout) -> tuple[int, bool]:
    """Data ranks over which experts are spread, of a layout's ep those that tp does not have already; and whether the
    ranks of cp share them too, which they do where the data ranks alone are too few.

    LegalityError: experts on a part of the tensor or context ranks, or over some data ranks but not a divisor of them.
    """
    if layout.ep == 1:
        return 1, False
    spread, rest = divmod(layout.ep * layout.etp, layout.tp)
    shards = layout.dp if layout.zero == 0 else _shards(layout)
    if not rest and shards % spread == 0:
        return spread, False
    if rest or layout.cp == 1:
        raise LegalityError(
            f"layout, ep = {layout.ep} and etp = {layout.etp}",
            f"expected ep x etp over tp = {layout.tp} to divide {shards} data ranks, but found "
            f"{layout.ep * layout.etp} / {layout.tp}",
            f"Search with --fix etp={layout.tp}, or another ep.",
        )
    if spread % layout.cp or shards % (spread // layout.cp):
        raise LegalityError(
            f"layout, ep = {layout.ep} beside cp = {layout.cp}",
            f"expected experts on the {shards} data ranks, or on all {layout.cp} ranks of cp and a divisor of those, "
            f"but found them on {spread}, of which there is no program",
            f"Search with --fix cp=1, or an ep of at most {shards * layout.tp // layout.etp}.",
        )
    return spread // layout.cp, True


def _shards(layout: ParallelLayout) -> int:
    """Data ranks over which states are cut; layouts count the ranks of cp among them."""
    return gcd(layout.shard_ranks or layout.dp, layout.dp)


def _data(layout: ParallelLayout, spread: int) -> dict[str, int]:
    """Data axes: replicas whose states are whole, or pieces; experts over `spread` of them."""
    if layout.zero == 0:
        return {"dp_replicate": layout.dp // spread, "ep": spread}
    shards = _shards(layout)
    return {"dp_shard": shards // spread, "dp_replicate": layout.dp // shards, "ep": spread}
