"""The report of `against`: whether a search ever loses to a published layout, what it is predicted to gain, and why.

A gain above `LARGE` is put down to the first of these that explains at least half of it: a faster row of the same
search (sweeps run slow layouts on purpose), whole layers computed again, parameters gathered for every micro-batch;
else it is told by the first of a list of dimensions in which the best layout differs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.estimate import ParallelLayout
from hpsearch.estimate.parallel import AS_RUN
from hpsearch.space.exact import simulated
from hpsearch.space.tables import inner
from hpsearch.validate.against import Against, Left

LARGE = 0.15
SHOWN = 12
DIMENSIONS = ("tp", "sp", "cp", "cp_kind", "pp", "vpp", "schedule_kind", "dp", "ep", "etp", "micro_batch",
              "zero", "shard_ranks")  # fmt: skip


def gains_report(found: Iterable[Against | Left]) -> str:
    """Everything about the searches as text; the bar they have to clear in the first lines."""
    listed = list(found)
    done = [one for one in listed if isinstance(one, Against)]
    left = Counter(one.why for one in listed if isinstance(one, Left))
    rows = f"{len(done)} of {len(listed)} rows with a full layout compared with the best of their search"
    if not done:
        return "\n".join([rows, *_left_lines(left)])
    fastest = fastest_rows(done)
    lines = [
        f"{rows}: {len(fastest)} searches, {sum(one.found.certificate.gap > 0 for one in fastest)} of them with a gap "
        f"(largest {max(one.found.certificate.gap for one in fastest):.2%}); {_seconds(done)}.",
        *_losses(done),
        "",
        *_table("gain of rows", done, lambda one: str(one.case.row["family"])),
        *_table("gain over the fastest row of each search", fastest, lambda one: str(one.case.row["family"])),
        *_table("that, by kind of model and devices", fastest, _kind),
        "",
        *_causes(done, fastest),
        "",
        f"the {SHOWN} largest gains over the fastest row of a search",
        *(_line(one) for one in sorted(fastest, key=lambda one: -one.gain)[:SHOWN]),
        "",
        *_left_lines(left),
    ]
    return "\n".join(lines)


def fastest_rows(done: Sequence[Against]) -> list[Against]:
    """Of each search the row that was measured to be fastest; of those not measured, the one predicted to be."""
    best: dict[int, Against] = {}
    for one in done:
        at_hand = best.setdefault(id(one.found), one)
        if _rank(one) < _rank(at_hand):
            best[id(one.found)] = one
    return list(best.values())


def _rank(one: Against) -> tuple[bool, float]:
    measured = one.case.measured_s
    return measured is None, measured or one.own_s


def _kind(one: Against) -> str:
    devices = one.case.cluster.devices
    size = "to 8" if devices <= 8 else "to 64" if devices <= 64 else "to 256" if devices <= 256 else "above 256"
    return f"{one.case.row['kind']}, {size} devices"


def _seconds(done: Sequence[Against]) -> str:
    cpu = np.array([one.cpu_s for one in done if one.cpu_s])
    return (
        f"CPU seconds of a search: median {np.median(cpu):.2g}, 90th centile {np.quantile(cpu, 0.9):.2g}, longest "
        f"{cpu.max():.3g}, all {cpu.sum():.4g}"
    )


def _losses(done: Sequence[Against]) -> list[str]:
    lost = [one for one in done if one.is_slower]
    inside = [one for one in lost if not one.outside]
    out = Counter(one.outside for one in done if one.outside)
    return [
        f"best slower than the own layout, which is of the space: {len(inside)} rows (must be 0)",
        *(_line(one) for one in inside),
        f"own layout not of the space: {sum(out.values())} rows; best slower than it: {len(lost) - len(inside)}",
        *(_line(one) for one in lost if one.outside),
        *(f"  {count:>5} rows: {why}" for why, count in out.most_common()),
    ]


def _table(title: str, done: Sequence[Against], key: Callable[[Against], str]) -> list[str]:
    groups: dict[str, list[float]] = defaultdict(list)
    for one in done:
        groups[key(one)].append(one.gain)
    lines = [f"{title:<44}{'number':>8}{'least':>8}{'25 %':>8}{'median':>8}{'75 %':>8}{'most':>8}{'> 15 %':>8}"]
    for name, values in [*sorted(groups.items()), ("all", [one.gain for one in done])]:
        quartiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
        large = sum(value > LARGE for value in values)
        lines.append(f"  {name[:42]:<42}{len(values):>8}" + "".join(f"{q:>8.1%}" for q in quartiles) + f"{large:>8}")
    return lines


def _causes(done: Sequence[Against], fastest: Sequence[Against]) -> list[str]:
    of_search = {id(one.found): one for one in fastest}
    groups: dict[str, list[Against]] = defaultdict(list)
    for one in done:
        if one.gain > LARGE:
            groups[cause(one, of_search[id(one.found)])].append(one)
    lines = [f"{f'gains above {LARGE:.0%}, by cause':<74}{'rows':>6}{'median':>9}  families"]
    for name, members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        families = Counter(str(one.case.row["family"]) for one in members)
        told = ", ".join(f"{family} {count}" for family, count in families.most_common())
        lines.append(f"  {name:<72}{len(members):>6}{np.median([one.gain for one in members]):>9.1%}  {told}")
    return lines


def cause(one: Against, fastest: Against) -> str:
    """What at least half of a gain comes from."""
    if fastest is not one and 1 - fastest.own_s / one.own_s >= one.gain / 2:
        return "a slower row of a sweep"
    own = one.own
    if own.recompute != "none" and _saves(one, replace(own, recompute="none", recompute_share=1.0)):
        return f"{own.recompute} recompute of every layer"
    if own.fsdp and _saves(one, replace(own, zero=1, fsdp=False)):
        return "parameters gathered for every micro-batch"
    best = one.found.best.layout
    told = (
        (best.schedule_kind not in AS_RUN, "best with another schedule than 1F1B"),
        (best.fsdp and not own.fsdp, "best fully sharded, own not"),
        (best.cp > own.cp, "best with more context parallelism"),
        (best.tp < own.tp, "best with less tensor parallelism"),
        (best.tp > own.tp, "best with more tensor parallelism"),
        (best.vpp > own.vpp, "best with more virtual stages"),
        (best.ep != own.ep, "best with other expert parallelism"),
        (best.micro_batch != own.micro_batch, "best with other micro-batches"),
    )
    return next((text for holds, text in told if holds), "best otherwise different")


def _saves(one: Against, other: ParallelLayout) -> bool:
    """Whether this change alone, if memory were endless, saves half of the gain."""
    shape, cluster = one.case.shape, one.case.cluster
    rates = efficiency_of(cluster.device.name, cluster.efficiency)
    return 1 - simulated(shape, other, cluster, inner(shape, other, cluster), rates)[0] / one.own_s >= one.gain / 2


def _line(one: Against) -> str:
    own, best = one.own, one.found.best.layout
    changed = [name for name in DIMENSIONS if getattr(own, name) != getattr(best, name)]
    told = [f"{name} {getattr(own, name)} -> {getattr(best, name)}" for name in changed]
    told += [f"recompute {_recompute(own)} -> {_recompute(best)}"] if _recompute(own) != _recompute(best) else []
    rule = f" (own: {one.outside})" if one.outside else ""
    return (
        f"  {one.case.row['id']}, {one.case.cluster.name}: {one.own_s:.4g} -> {one.found.best.step_s:.4g} s "
        f"({one.gain:+.1%}): {', '.join(told)}{rule}"
    )


def _recompute(layout: ParallelLayout) -> str:
    if layout.recompute == "selective":
        return "+".join(sorted(layout.recompute_parts)) or "none"
    if layout.recompute == "full" and layout.recomputed:
        return f"{sum(layout.recomputed)} layers"
    return layout.recompute


def _left_lines(left: Mapping[str, int]) -> list[str]:
    lines = [f"  {count:>5} rows: {why}" for why, count in sorted(left.items(), key=lambda item: (-item[1], item[0]))]
    return ["not compared", *lines] if lines else []
