"""Measured curves: time over message size for one collective and one group, a latency and a bandwidth between each two
neighbouring sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""Kinds, as in `hpsearch.layout.redistribute`, whose convention for `nbytes` holds here too."""

BASES = ("exact", "measured", "published", "modelled")
"""What a price rests on, strongest first."""


_STILL_FASTER = 0.8
"""The least time a byte beyond the last size may take, by the time a byte takes there: noise must not make it free."""


def weakest(bases: list[str]) -> str:
    """The basis of something made of parts."""
    return max(bases, key=BASES.index)


def bus_factor(kind: str, size: int) -> float:
    """Bytes a rank sends over its link, per byte of `nbytes`, in a ring: busbw = factor · nbytes / seconds."""
    return (2.0 if kind == "all_reduce" else 1.0) * (size - 1) / size


@dataclass(frozen=True)
class Curve:
    """Seconds of one collective over `size` ranks that stand `stride` apart, all such groups running at once."""

    kind: str
    size: int
    stride: int
    nbytes: tuple[int, ...]
    """Growing."""
    seconds: tuple[float, ...]
    """As measured; prices use `smooth`."""
    basis: str = "measured"

    @cached_property
    def smooth(self) -> Floats:
        """`seconds` made non-decreasing: neighbours that fall are pooled to their geometric mean (isotonic regression).

        Published curves are noisy (59 of 64 fall somewhere); a price must not fall when bytes grow.
        """
        pools: list[tuple[float, int]] = []
        for value in np.log(self.seconds):
            pools.append((float(value), 1))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (b, m), (a, n) = pools.pop(), pools.pop()
                pools.append(((a * n + b * m) / (n + m), n + m))
        return np.asarray(np.exp(np.repeat([mean for mean, _ in pools], [count for _, count in pools])))

    @property
    def latency_s(self) -> float:
        return float(self.smooth[0])

    def at(self, nbytes: Floats) -> Floats:
        """Seconds for each size. Below the first size: its time (latency). Above the last: growing as it did last.

        Between sizes in bytes, not in their logarithms: with every second size left out of the 64 shipped tables, 1.9 %
        off in the median (90th centile 11.5 %), where log-log is 2.9 % (11.5 %) off.
        """
        last = float(self.nbytes[-1])
        inside = np.interp(nbytes, np.asarray(self.nbytes, dtype=np.float64), self.smooth)
        return np.where(nbytes > last, self.smooth[-1] + (nbytes - last) * self._seconds_per_byte, inside)

    @property
    def _seconds_per_byte(self) -> float:
        """Beyond the last size: the slope over the last factor 4, at most 1/_STILL_FASTER of the bandwidth there.

        Half the error of keeping that bandwidth: all_reduce of 8 GiB from tables up to 512 MiB is 2 % off on A100,
        0.2 % on H200 and 12 % on B200, where it was 6, 4 and 19 %
        (https://github.com/stas00/ml-engineering/blob/master/network/README.md).
        """
        flat = float(self.smooth[-1] / self.nbytes[-1])
        if len(self.nbytes) < 3:
            return flat
        slope = (self.smooth[-1] - self.smooth[-3]) / (self.nbytes[-1] - self.nbytes[-3])
        return float(np.clip(slope, _STILL_FASTER * flat, flat))


def price_from_curves(curves: tuple[Curve, ...], size: int, nbytes: Floats) -> tuple[Floats, str, str]:
    """Seconds over `size` ranks from curves of one kind and shape that differ in group size; with basis and wording.

    Same size: the curve. Between two sizes: bus time (seconds by bytes a rank sends) interpolated over log size.
    Outside: the nearest size; its latency scaled by ring steps, the rest by bytes a rank sends.
    """
    by_size = {curve.size: curve for curve in curves}
    if size in by_size:
        return by_size[size].at(nbytes), by_size[size].basis, f"measured at {size}"
    kind = curves[0].kind
    below = max((s for s in by_size if s < size), default=None)
    above = min((s for s in by_size if s > size), default=None)
    if below is not None and above is not None:
        weight = (np.log(size) - np.log(below)) / (np.log(above) - np.log(below))
        low, high = (np.log(by_size[s].at(nbytes) / bus_factor(kind, s)) for s in (below, above))
        seconds = np.exp(low + weight * (high - low)) * bus_factor(kind, size)
        return seconds, "modelled", f"between {below} and {above} measured"
    near = below if below is not None else above
    assert near is not None
    curve = by_size[near]
    moved = (curve.at(nbytes) - curve.latency_s) * bus_factor(kind, size) / bus_factor(kind, near)
    return curve.latency_s * (size - 1) / (near - 1) + moved, "modelled", f"scaled from {near} measured"
