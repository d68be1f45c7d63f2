"""What a cluster file has to satisfy beyond its types: units, plausible ranges, tiers that grow, tables that fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf, isfinite

from hpsearch.cluster.check_device import device_wrong, groups_wrong
from hpsearch.cluster.curve import bus_factor
from hpsearch.cluster.efficiency import NAMES
from hpsearch.cluster.plausible import FRACTION, Path, not_growing, number_wrong, numbers_wrong, unit_wrong
from hpsearch.cluster.rates import rates_beside_peaks
from hpsearch.cluster.schema import ClusterFile, CurveEntry, Number, Numbers, TierEntry
from hpsearch.cluster.units import LINKS, UNITS, Complaint, in_unit

_CHANNEL = (1e8, 2e12)
_HOP = (1e-8, 1e-3)
_WINDOW = (2.0**10, 2.0**32)
_MEMBERS = (1.0, 1024.0)
_SWITCH_FIELDS = {
    "start": ("time", _HOP, "one hop of a collective"),
    "outer": ("time", _HOP, "one hop of a collective"),
    "share": ("fraction", (0.01, 1.0), "a share of the links"),
    "window": ("size", _WINDOW, "the bytes in flight of one domain"),
    "members": ("count", _MEMBERS, "ranks of one domain"),
}
_TIME = (1e-7, 3600.0)
_EFFICIENCY = {"factor": (0.1, 10.0), "time": (1e-8, 60.0)}
_BUS_SHARE = (0.001, 1.6)
"""Bus bandwidth of a measured curve by the bandwidth of its link; above 1 where switches reduce in flight."""
_OUTER_LATENCY = 0.5
_OUTER_SHARE = 1.5
"""An outer tier is rarely faster than the tier inside it, and then by little."""


def complaints(entry: ClusterFile) -> list[Complaint]:
    """Everything wrong with the file; empty when it can be believed."""
    found = list(_sources(entry))
    found += device_wrong(entry.device)
    found += _efficiency(entry)
    for index, tier in enumerate(entry.tiers):
        inner = entry.tiers[index - 1].size.value if index else 1.0
        found += _tier(("tiers", index), tier, inner)
        found += _crossing(("tiers", index), tier, [other.name for other in entry.tiers[:index]])
    found += groups_wrong(entry)
    if not found:
        found += _tiers_together(entry)
        found += rates_beside_peaks(entry.device)
    return found


def _sources(entry: ClusterFile) -> Iterator[Complaint]:
    """Every source is a URL, a key of [sources], and every key leads to a URL or says it was measured here."""
    for key, text in entry.sources.items():
        if not text.startswith(("https://", "http://", "measured by ", "fitted to ")):
            yield Complaint(
                ("sources", key), f"expected a URL, but found {text!r}", "Name the page the numbers stand on."
            )
    for path, number in _all_numbers(entry):
        if number.source not in entry.sources and not number.source.startswith(("https://", "http://")):
            known = ", ".join(entry.sources) or "nothing"
            yield Complaint(
                (*path, "source"), f"expected a URL or a key of [sources] ({known}), but found {number.source!r}",
                "Add it under [sources].",
            )  # fmt: skip


def _all_numbers(entry: ClusterFile) -> Iterator[tuple[Path, Number | Numbers]]:
    for name, value in entry.device:
        if isinstance(value, Number):
            yield ("device", name), value
    for dtype, value in entry.device.peak.items():
        yield ("device", "peak", dtype), value
    for name, value in entry.efficiency.items():
        yield ("efficiency", name), value
    for i, table in enumerate(entry.device.matmul):
        yield ("device", "matmul", i, "rate"), table.rate
    for i, late in enumerate(entry.device.arrivals):
        yield ("device", "arrivals", i, "time"), late.time
    if entry.device.stream:
        yield ("device", "stream", "time"), entry.device.stream.time
    for i, group in enumerate(entry.groups):
        for name, value in group:
            if isinstance(value, Number):
                yield ("groups", i, name), value
    for i, tier in enumerate(entry.tiers):
        for name, value in tier:
            if isinstance(value, Number):
                yield ("tiers", i, name), value
        for j, protocol in enumerate(tier.protocols):
            for name, value in protocol:
                if isinstance(value, Number):
                    yield ("tiers", i, "protocols", j, name), value
        for j, curve in enumerate(tier.collectives):
            for name, value in curve:
                if isinstance(value, Numbers):
                    yield ("tiers", i, "collectives", j, name), value


def _efficiency(entry: ClusterFile) -> Iterator[Complaint]:
    """Numbers of the cost model, by its names; factors near one, seconds of the host."""
    for name, number in entry.efficiency.items():
        at: Path = ("efficiency", name)
        if name not in NAMES:
            yield Complaint(at, f"expected one of {', '.join(NAMES)}, but found {name!r}", "Correct the name.")
            continue
        dimension = "time" if name.endswith("_s") else "factor"
        yield from number_wrong(at, number, dimension, _EFFICIENCY[dimension], "an efficiency")
        if not 0 <= number.error < inf:
            problem = f"expected a standard error of 0 or more, but found {number.error:g}"
            yield Complaint((*at, "error"), problem, "Write the error of the log.")


def _tier(at: Path, tier: TierEntry, inner: float) -> Iterator[Complaint]:
    wrong = unit_wrong((*at, "size"), tier.size.unit, "count")
    if wrong:
        yield wrong
    if tier.size.value != int(tier.size.value if isfinite(tier.size.value) else 0) or tier.size.value < 1:
        yield Complaint(
            (*at, "size"), f"expected a whole number of devices, but found {tier.size.value:g}", "Correct it."
        )
    if tier.link not in LINKS:
        known = ", ".join(LINKS)
        yield Complaint((*at, "link"), f"expected one of {known}, but found {tier.link!r}", "Choose the nearest kind.")
        return
    link = LINKS[tier.link]
    what = f"one device on {tier.link}, one direction"
    wrong_numbers = [
        *number_wrong((*at, "bandwidth"), tier.bandwidth, "bandwidth", link.bandwidth, what),
        *number_wrong((*at, "latency"), tier.latency, "time", link.latency, f"one message on {tier.link}"),
    ]
    if tier.each is not None and not wrong_numbers:
        wrong_numbers += _each(at, tier, int(inner), link.bandwidth)
    for name in ("efficiency", "pipelining"):
        number = getattr(tier, name)
        if number is not None:
            wrong_numbers += number_wrong((*at, name), number, "fraction", FRACTION, "an efficiency")
    yield from wrong_numbers
    for i, curve in enumerate(tier.collectives):
        yield from _curve((*at, "collectives", i), curve, tier, inner if not wrong_numbers else None)


def _each(at: Path, tier: TierEntry, inner: int, allowed: tuple[float, float]) -> Iterator[Complaint]:
    """One bandwidth for each device of an inner domain; the tier's is the least of them."""
    each = tier.each
    assert each is not None
    wrong = list(numbers_wrong((*at, "each"), each, inner, "bandwidth", allowed, f"one device on {tier.link}"))
    yield from wrong
    if wrong:
        return
    least = min(each.values) * UNITS["bandwidth"][each.unit]
    stated = tier.bandwidth.value * UNITS["bandwidth"][tier.bandwidth.unit]
    if abs(stated - least) > 1e-6 * least:
        yield Complaint(
            (*at, "bandwidth"),
            f"expected the least of `each`, {in_unit('bandwidth', least)}, since a collective waits for the slowest, "
            f"but found {in_unit('bandwidth', stated)}",
            "Write the least.",
        )


def _crossing(at: Path, tier: TierEntry, inner: list[str]) -> Iterator[Complaint]:
    """Protocols cross the domains of an inner tier; a full mesh has none inside it."""
    if tier.protocols and not inner:
        problem = "expected protocols on a tier that joins inner domains, but this is the innermost"
        yield Complaint((*at, "protocols"), problem, "Move them to the tier outside.")
    if tier.wiring == "full-mesh" and inner:
        problem = "expected a full mesh on the innermost tier alone, but a tier stands inside this one"
        yield Complaint((*at, "wiring"), problem, "Describe its links as a switch.")
    if tier.like and tier.like not in inner:
        known = ", ".join(inner) or "none"
        yield Complaint((*at, "like"), f"expected an inner tier ({known}), but found {tier.like!r}", "Name one.")
    for j, protocol in enumerate(tier.protocols):
        for name, number in protocol:
            if isinstance(number, Number) and name.endswith("_share"):
                yield from number_wrong(
                    (*at, "protocols", j, name), number, "fraction", FRACTION, "a share of the links"
                )
            elif name == "channel" and number is not None:
                yield from number_wrong((*at, "protocols", j, name), number, "bandwidth", _CHANNEL, "one ring or tree")
            elif isinstance(number, Number):
                yield from number_wrong((*at, "protocols", j, name), number, "time", _HOP, "one hop of a collective")
    yield from _switches(at, tier)


def _switches(at: Path, tier: TierEntry) -> Iterator[Complaint]:
    """A tree of switches stands beside protocols: it is one more way of the library they describe."""
    if tier.switch_tree is not None and not tier.protocols:
        problem = "expected protocols beside the tree of switches, but found none"
        yield Complaint((*at, "switch_tree"), problem, "State them.")
    for table in ("switches", "switch_tree"):
        for name, number in getattr(tier, table) or ():
            yield from number_wrong((*at, table, name), number, *_SWITCH_FIELDS[name])


def _curve(at: Path, curve: CurveEntry, tier: TierEntry, inner: float | None) -> Iterator[Complaint]:
    given = {name: getattr(curve, name) for name in ("time", "busbw", "algbw") if getattr(curve, name) is not None}
    if len(given) != 1:
        yield Complaint(at, f"expected one of time, busbw, algbw, but found {', '.join(given) or 'none'}", "Keep one.")
        return
    yield from not_growing((*at, "nbytes"), curve.nbytes)
    span = curve.group * curve.stride
    if span > tier.size.value:
        yield Complaint(
            at, f"expected a group inside the {tier.size.value:g} devices of {tier.name}, but {curve.group} ranks "
            f"{curve.stride} apart need {span}", "Move it to an outer tier.",
        )  # fmt: skip
        return
    ((name, numbers),) = given.items()
    dimension, allowed = ("time", _TIME) if name == "time" else ("bandwidth", (1.0, 1e14))
    wrong = list(numbers_wrong((*at, name), numbers, len(curve.nbytes), dimension, allowed, f"one {curve.op}"))
    yield from wrong
    if not wrong and inner is not None:
        yield from _bus_share((*at, name), curve, numbers, dimension, tier, inner)


def _bus_share(
    at: Path, curve: CurveEntry, numbers: Numbers, dimension: str, tier: TierEntry, inner: float
) -> Iterator[Complaint]:
    """The largest message moves at a believable share of the link: catches ms for us and Gbit for GB in tables.

    Members of one inner domain of `inner` devices bring a link each.
    """
    value = numbers.values[-1] * UNITS[dimension][numbers.unit]
    factor = bus_factor(curve.op, curve.group)
    bus = factor * curve.nbytes[-1] / value if dimension == "time" else value * (factor if at[-1] == "algbw" else 1.0)
    line = tier.bandwidth.value * UNITS["bandwidth"][tier.bandwidth.unit]
    line *= max(1.0, min(float(curve.group), inner // curve.stride if inner >= 1 else 1.0))
    if bus <= line * _BUS_SHARE[1] and (bus >= line * _BUS_SHARE[0] or curve.nbytes[-1] < 2**20):
        return
    yield Complaint(
        at, f"expected {_BUS_SHARE[0]:g} to {_BUS_SHARE[1]:g} times the link's {in_unit('bandwidth', line)} as bus "
        f"bandwidth, but {curve.nbytes[-1]} bytes move at {in_unit('bandwidth', bus)}",
        f"Check the unit {numbers.unit!r} of the table and {tier.bandwidth.unit!r} of the link.",
    )  # fmt: skip


def _tiers_together(entry: ClusterFile) -> Iterator[Complaint]:
    """Names differ; each domain is made of whole inner domains; bandwidth does not leap up on the way out."""
    names = [tier.name for tier in entry.tiers]
    for i, (inner, outer) in enumerate(pairwise(entry.tiers), 1):
        at: Path = ("tiers", i)
        if outer.name in names[:i]:
            yield Complaint((*at, "name"), f"expected a new name, but {outer.name!r} stands above too", "Rename one.")
        if outer.size.value <= inner.size.value or outer.size.value % inner.size.value:
            yield Complaint(
                (*at, "size"),
                f"expected a larger multiple of the {inner.size.value:g} devices of {inner.name!r} above "
                f"it, but found {outer.size.value:g}", "List tiers from the innermost to the outermost.",
            )  # fmt: skip
        near, far = (t.latency.value * UNITS["time"][t.latency.unit] for t in (inner, outer))
        if far < near * _OUTER_LATENCY:
            yield Complaint(
                (*at, "latency"),
                f"expected at least half the {in_unit('time', near)} of {inner.name!r} inside it, but found "
                f"{in_unit('time', far)}",
                "Check the units of both; a message to another domain passes the inner links too.",
            )
        fast, slow = (t.bandwidth.value * UNITS["bandwidth"][t.bandwidth.unit] for t in (outer, inner))
        if fast > slow * _OUTER_SHARE:
            yield Complaint(
                (*at, "bandwidth"), f"expected at most {_OUTER_SHARE:g} times the {in_unit('bandwidth', slow)} of "
                f"{inner.name!r} inside it, but found {in_unit('bandwidth', fast)}",
                f"Check the units of both; {fast / 8e9:.6g} GB/s is {fast / 1e9:.6g} Gbit/s.",
            )  # fmt: skip
