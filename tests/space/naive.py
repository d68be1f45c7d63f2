"""Every layout of a small space by plain loops, priced one by one: what the search is held to.

Written from the words of the rules and of the certificate, not from the search: no bounds, no tables, no sharing but
of blocks that are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil
from typing import Any

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency, efficiency_of
from hpsearch.estimate import ModelShape, ParallelLayout, memory
from hpsearch.estimate.estimate import Priced, assembled, blocks
from hpsearch.estimate.pipeline import run_s
from hpsearch.estimate.price import Seconds
from hpsearch.estimate.shape import kind_of
from hpsearch.estimate.stages import filled_sizes
from hpsearch.estimate.work import Work

Pins = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Outcome:
    layout: ParallelLayout
    step_s: float
    peak_bytes: float


def every_outcome(shape: ModelShape, cluster: Cluster, base: ParallelLayout, pins: Pins) -> list[Outcome]:
    """All layouts, whether they fit or not."""
    rates = efficiency_of(cluster.device.name, cluster.efficiency)
    priced: dict[tuple[Any, ...], tuple[dict[str, Work], dict[str, Seconds]]] = {}
    found = []
    for layout in every_layout(shape, cluster, base, pins):
        inside = (
            layout.tp, layout.sp, layout.cp, layout.cp_kind, layout.ep, layout.etp, layout.micro_batch,
            layout.recompute, layout.recompute_parts, layout.fsdp,
        )  # fmt: skip
        if inside not in priced:
            priced[inside] = blocks(shape, layout, cluster)
        works, seconds = priced[inside]
        made = assembled(shape, layout, cluster, works, seconds)
        found.append(Outcome(layout, step_s(made, rates), memory(shape, layout, works=works).peak_bytes))
    return found


def step_s(priced: Priced, rates: Efficiency) -> float:
    """Every micro-batch on the timeline of its own schedule."""
    layout = priced.layout
    forward, inputs, weights = priced.split_seconds(rates)
    backward = inputs + weights
    pipe = layout.micro_batches * float(forward.sum() + backward.sum())
    if layout.pp > 1:
        parts, hop_s = (forward.tolist(), inputs.tolist(), weights.tolist()), priced.hop_s * rates.links
        pipe = run_s(layout.schedule_kind, parts, layout.pp, layout.micro_batches, hop_s)
    return priced.around(pipe, forward, backward, rates)[0]


def every_layout(
    shape: ModelShape, cluster: Cluster, base: ParallelLayout, pins: Pins, whole: bool = True
) -> Iterator[ParallelLayout]:
    """Cuts and recomputed layers included, unless not `whole`."""
    for made in _outsides(shape, cluster, base, pins):
        if not whole:
            yield made
            continue
        for cut in _cuts(shape, made):
            for again in _recomputed(made, cut):
                if again is None:
                    yield replace(made, cut=cut)
                elif any(again):
                    yield replace(made, cut=cut, recompute="full", recomputed=again)
                else:
                    yield replace(made, cut=cut, recompute="none")


def _outsides(shape: ModelShape, cluster: Cluster, base: ParallelLayout, pins: Pins) -> Iterator[ParallelLayout]:
    devices, batch = cluster.devices, base.global_batch

    def allowed(name: str, value: Any) -> bool:
        return name not in pins or value in pins[name]

    degrees = range(1, devices + 1)
    for tp, cp, pp in product(degrees, degrees, degrees):
        if devices % (tp * cp * pp) or not (allowed("tp", tp) and allowed("cp", cp) and allowed("pp", pp)):
            continue
        dp = devices // (tp * cp * pp)
        if not (allowed("dp", dp) and _tp_legal(shape, tp) and _cp_legal(shape, base.seq_len, cp)):
            continue
        if pp > shape.layers:
            continue
        for sp, kind, (ep, etp), rows in product(
            (False, True), ("ring", "gather", "ulysses"), _experts(shape, tp, cp, dp),
            pins.get("micro_batch", _rows(base, cp)),
        ):  # fmt: skip
            legal = not (sp and (tp == 1 or base.seq_len // cp % tp)) and _kind_legal(shape, tp, cp, kind)
            if not legal or rows > batch or (dp > 1 and dp * rows > batch):
                continue
            if not all(allowed(*one) for one in (("sp", sp), ("cp_kind", kind), ("ep", ep), ("etp", etp))):
                continue
            count = ceil(batch / (dp * rows))
            for vpp, schedule, (zero, shards), recompute in product(
                range(1, 9), SCHEDULES, _sharding(cluster, tp, dp * cp, pp), _recomputes(shape, base)
            ):
                if pp * vpp > shape.layers or not _runs(schedule, pp, vpp, count):
                    continue
                names = (
                    ("vpp", vpp),
                    ("schedule", schedule),
                    ("zero", zero),
                    ("shard_ranks", shards),
                    ("recompute", recompute),
                )
                if not all(allowed(*one) for one in names):
                    continue
                parts = base.recompute_parts if recompute == "full" else frozenset(recompute.split("+"))
                yield replace(
                    base, devices=devices, micro_batch=rows, global_batch=count * dp * rows, tp=tp, sp=sp, cp=cp,
                    cp_kind=kind, pp=pp, vpp=vpp, schedule=schedule, ep=ep, etp=etp, zero=zero, fsdp=zero == 3,
                    shard_ranks=shards, recompute="none" if recompute == "full" else "selective",
                    recompute_parts=parts,
                )  # fmt: skip


def _rows(base: ParallelLayout, cp: int) -> list[int]:
    """Powers of two up to 32, and what divides the batch up to 128 rows and 131,072 tokens of a rank."""
    divisors = [n for n in range(1, 129) if base.global_batch % n == 0 and n * base.seq_len / cp <= 131072]
    return sorted({1, 2, 4, 8, 16, 32, *divisors})


def _blocks(shape: ModelShape, kind: str) -> list[ModelShape]:
    return [shape.of(name) for name in shape.counts if kind_of(name) == kind]


def _smooth(number: int) -> bool:
    return number == 1 or any(number % prime == 0 and _smooth(number // prime) for prime in (2, 3, 5, 7))


@cache
def _tp_legal(shape: ModelShape, tp: int) -> bool:
    attention, states = _blocks(shape, "attention"), _blocks(shape, "mamba")
    return (
        _smooth(tp)
        and all(own.heads % tp == 0 for own in attention)
        and all(own.kv_heads % tp == 0 or tp % own.kv_heads == 0 for own in attention if own.mla is None)
        and all(own.ffn % tp == 0 for own in _blocks(shape, "mlp"))
        and all(own.mamba is not None and own.mamba.heads % tp == 0 for own in states)
    )


def _cp_legal(shape: ModelShape, seq_len: int, cp: int) -> bool:
    return cp == 1 or (_smooth(cp) and cp <= 64 and seq_len % (2 * cp) == 0 and not _blocks(shape, "mamba"))


def _kind_legal(shape: ModelShape, tp: int, cp: int, kind: str) -> bool:
    if cp == 1:
        return kind == "ring"
    owns = _blocks(shape, "attention")
    whole = all(own.heads // tp % cp == 0 and max(own.kv_heads // tp, 1) % cp == 0 for own in owns)
    return kind != "ulysses" or whole


def _experts(shape: ModelShape, tp: int, cp: int, dp: int) -> list[tuple[int, int]]:
    owns = _blocks(shape, "moe")
    if not owns:
        return [(1, 1)]
    found = []
    for etp in {1, tp}:
        for ep in range(1, max(own.experts for own in owns) + 1):
            wide = all(own.moe_ffn % etp == 0 for own in owns)
            if wide and _smooth(ep) and all(own.experts % ep == 0 for own in owns) and dp * cp * tp % (ep * etp) == 0:
                found.append((ep, etp))
    return found


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipev")


def _runs(schedule: str, pp: int, vpp: int, count: int) -> bool:
    """Whether a schedule takes so many stages, chunks of each and micro-batches."""
    if pp == 1:
        return schedule == "1f1b" and vpp == 1
    return {
        "gpipe": vpp == 1, "1f1b": vpp == 1, "zb-h1": vpp == 1 and count >= pp, "zbv": vpp == 2,
        "interleaved": vpp > 1 and count % pp == 0, "interleaved-zb": vpp > 1 and count % pp == 0,
        "dualpipev": vpp == 2 and count >= 2 * pp,
    }[schedule]  # fmt: skip


def _sharding(cluster: Cluster, tp: int, ranks: int, pp: int) -> list[tuple[int, int]]:
    """(ZeRO level, shard ranks)."""
    if ranks == 1:
        return [(0, 0)]
    found = [(0, 0), (1, 0), (3, 0), *([(2, 0)] if pp == 1 else [])]
    for tier in cluster.tiers[:-1]:
        shards = tier.size // tp
        if tier.size % tp == 0 and 1 < shards < ranks and ranks % shards == 0 and (3, shards) not in found:
            found.append((3, shards))
    return found


def _recomputes(shape: ModelShape, base: ParallelLayout) -> list[str]:
    found = ["full", "norm+activation"]
    found += ["attention"] if _blocks(shape, "attention") and not base.flash else []
    found += ["mla_up"] if any(shape.of(name).mla for name in shape.counts) else []
    return found + [kind for kind in ("mlp", "moe") if _blocks(shape, kind)]


def _cuts(shape: ModelShape, layout: ParallelLayout) -> list[tuple[int, ...]]:
    if layout.vpp > 1:
        return [tuple(filled_sizes(shape, layout.chunks))]
    return compositions(shape.layers, layout.pp)


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of positive numbers."""
    if parts == 1:
        return [(total,)] if total > 0 else []
    return [(i, *rest) for i in range(1, total) for rest in compositions(total - i, parts - 1)]


def _recomputed(layout: ParallelLayout, cut: tuple[int, ...]) -> Iterator[tuple[int, ...] | None]:
    """Recomputed layers of each chunk; None where recompute is not by layers."""
    if layout.recompute == "selective":
        yield None
        return
    held = [places(layout, rank) for rank in range(layout.pp)]
    stages = [tuple(cut[i] for i in mine) for mine in held]
    for totals in product(*(range(sum(sizes) + 1) for sizes in stages)):
        again = [0] * len(cut)
        for mine, total, sizes in zip(held, totals, stages, strict=True):
            for i, layers in zip(mine, dealt(total, sizes), strict=True):
                again[i] = layers
        yield tuple(again)


def places(layout: ParallelLayout, rank: int) -> list[int]:
    """Chunks of a rank: around and around, or down and up again."""
    if layout.schedule in ("zbv", "dualpipev"):
        return [rank, 2 * layout.pp - 1 - rank]
    return list(range(rank, layout.pp * layout.vpp, layout.pp))


def dealt(total: int, sizes: tuple[int, ...]) -> list[int]:
    """One by one to the chunk that has the fewest and has room."""
    found = [0] * len(sizes)
    for _ in range(total):
        open_ones = [i for i, size in enumerate(sizes) if found[i] < size]
        found[min(open_ones, key=lambda i: (found[i], i))] += 1
    return found
