"""Numbers as people say them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """`12.3 ms`, three digits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return "0 s" if value == 0 else f"{value / 1e-9:.3g} ns"


def size(nbytes: float) -> str:
    """`1.25 GiB`, three digits, powers of 1024."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(nbytes) >= (1024 if power == 1 else 999.5 * 1024 ** (power - 1)):  # 1,013 MiB are 0.989 GiB
            return f"{nbytes / 1024**power:.3g} {unit}"
    return f"{nbytes:.0f} B"


def count(number: int) -> str:
    """`8.03 B` for parameters."""
    for scale, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:,}"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"
