"""Units of a cluster file: to SI at the file's edge, with plausible ranges and the slip behind a wrong number."""

from __future__ import annotations

from dataclasses import dataclass

UNITS: dict[str, dict[str, float]] = {
    "bandwidth": {
        "GB/s": 1e9, "Gbit/s": 1e9 / 8, "Gbps": 1e9 / 8, "TB/s": 1e12, "Tbit/s": 1e12 / 8, "MB/s": 1e6,
        "Mbit/s": 1e6 / 8, "Mbps": 1e6 / 8, "GiB/s": 2.0**30, "B/s": 1.0,
    },
    "time": {"us": 1e-6, "ms": 1e-3, "ns": 1e-9, "s": 1.0},
    "size": {
        "GB": 1e9, "GiB": 2.0**30, "TB": 1e12, "TiB": 2.0**40, "MB": 1e6, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0,
    },
    "rate": {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "PFLOP/s": 1e15, "FLOP/s": 1.0},
    "fraction": {"fraction": 1.0},
    "count": {"devices": 1.0},
    "factor": {"times the table": 1.0},
    "power": {"W": 1.0, "kW": 1e3},
    "price": {f"{currency}/h": 1 / 3600 for currency in ("USD", "EUR", "GBP", "CNY", "JPY", "INR", "KRW", "CHF")},
    "compute": {"times the device": 1.0},
}  # fmt: skip
"""Dimension → unit → factor to SI, likeliest unit first."""

KINDS = ("measured", "published", "specification", "fitted")
"""measured: a raw measurement, table or figure. published: stated by a paper or a vendor's simulator without raw data.
specification: a data sheet. fitted: computed here from measured or published figures."""


@dataclass(frozen=True)
class Link:
    """What is plausible for one device of one kind of link, one direction."""

    bandwidth: tuple[float, float]
    """Bytes per second."""
    latency: tuple[float, float]
    """Seconds of one small message."""


def _link(low_gb_s: float, high_gb_s: float, low_us: float, high_us: float) -> Link:
    return Link((low_gb_s * 1e9, high_gb_s * 1e9), (low_us * 1e-6, high_us * 1e-6))


LINKS: dict[str, Link] = {
    "on-package": _link(50, 20_000, 0.01, 20),
    "nvlink": _link(75, 2_000, 0.05, 50),
    "nvlink-bridge": _link(20, 75, 0.05, 50),
    "xgmi": _link(20, 2_000, 0.05, 50),
    "ub": _link(30, 2_000, 0.05, 50),
    "hccs": _link(30, 1_000, 0.05, 50),
    "ici": _link(20, 2_000, 0.05, 50),
    "pcie": _link(2, 128, 0.2, 100),
    "infiniband": _link(10, 110, 0.3, 100),
    "roce": _link(10, 110, 0.3, 100),
    "efa": _link(1, 110, 0.3, 100),
    "ethernet": _link(0.001, 110, 2, 5_000),
    "memory": _link(0.001, 500, 0.05, 50_000),
}
"""Kind of link → plausible range. Wide enough for every product of that kind, narrow enough that a factor 8 or 1000
falls outside. `memory` is processes of one machine that talk through its memory or loopback."""


@dataclass(frozen=True)
class Complaint:
    """What is wrong at one place of a cluster file."""

    path: tuple[str | int, ...]
    problem: str
    remedy: str


def number(value: float) -> str:
    """Short text of a number: 450, 3.35, 5e-06."""
    return f"{value:.6g}"


def in_unit(dimension: str, si: float) -> str:
    """An SI value in the unit people use for its size: 450 GB/s, 5 us."""
    readable = {"bandwidth": ("GB/s",), "time": ("us", "ms", "s"), "size": ("GB",), "rate": ("TFLOP/s", "GFLOP/s")}
    units = readable.get(dimension, tuple(UNITS[dimension]))
    large = [u for u in units if abs(si) < 1000 * UNITS[dimension][u]] or [
        max(units, key=lambda u: UNITS[dimension][u])
    ]
    unit = next((u for u in large if abs(si) >= 0.1 * UNITS[dimension][u]), large[0])
    return f"{number(si / UNITS[dimension][unit])} {unit}"


def check_range(
    path: tuple[str | int, ...], value: float, unit: str, dimension: str, allowed: tuple[float, float], what: str
) -> Complaint | None:
    """A complaint when `value unit` lies outside `allowed` (SI, ends included), naming the unit that would fit."""
    low, high = allowed
    si = value * UNITS[dimension][unit]
    if low <= si <= high:
        return None
    problem = (
        f"expected {in_unit(dimension, low)} to {in_unit(dimension, high)} for {what}, "
        f"but found {number(value)} {unit}"
        + ("" if number(value) + " " + unit == in_unit(dimension, si) else f" = {in_unit(dimension, si)}")
    )
    fits = [u for u, factor in UNITS[dimension].items() if u != unit and low <= value * factor <= high]
    if fits:
        return Complaint(
            path, problem, f'{number(value)} {unit} looks like {number(value)} {fits[0]}: write unit = "{fits[0]}".'
        )
    return Complaint(path, problem, "Correct the value or its unit.")
