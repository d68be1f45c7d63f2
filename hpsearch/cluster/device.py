"""`Device`: what one device computes in a second, as seconds for a call. Every argument may be a numpy array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from hpsearch.cluster.curve import Floats, weakest
from hpsearch.errors import ClusterError

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of one element of the dtypes that have a matmul rate, by torch's name."""


@dataclass(frozen=True)
class MatmulTable:
    """Measured rate of `[m, k] @ [k, n]` for one (n, k) over m."""

    dtype: str
    n: int
    k: int
    m: tuple[int, ...]
    flops_per_s: tuple[float, ...]
    basis: str = "measured"


@dataclass(frozen=True)
class StreamTable:
    """Measured seconds of a memory-bound kernel over the bytes it reads and writes, launch included; both growing."""

    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, nbytes: Floats) -> Floats:
        """Log-log between points. Below the first: its time. Beyond the last: at its bandwidth."""
        seconds = np.maximum.accumulate(np.asarray(self.seconds))
        known = np.log(np.asarray(self.nbytes, dtype=np.float64))
        inside = np.exp(np.interp(np.log(np.maximum(nbytes, 1.0)), known, np.log(seconds)))
        return np.asarray(inside * np.maximum(1.0, nbytes / self.nbytes[-1]))


@dataclass(frozen=True)
class Device:
    """One device: a GPU, a die, or one process of this machine. SI units throughout."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    memory_efficiency: float
    """Share of `memory_bytes_per_s` that a long streaming kernel reaches."""
    peak: tuple[tuple[str, float], ...]
    """dtype → dense peak FLOP/s."""
    matmul_efficiency: float
    """Share of peak that a large matmul reaches."""
    attention_efficiency: float | None
    """Share of peak that fused attention reaches, forward and backward together; None where nothing is known."""
    launch_s: float
    """Fixed seconds of one kernel, however small."""
    collective_launch_s: float
    """Fixed seconds of one collective, beyond its link latencies."""
    host_bytes_per_s: float | None = None
    """To host memory, one direction."""
    matmul: tuple[MatmulTable, ...] = ()
    overlap_efficiency: float = 0.0
    """Share of a parameter gather or gradient reduction that compute running beside it hides; 0 where unmeasured."""
    arrival_s: float = 0.0
    """Seconds that a collective which compute waits for costs beyond its own: ranks come late, and go on with cold
    caches. Of groups not among `arrivals`; 0 where unmeasured."""
    arrivals: tuple[tuple[int, int, float], ...] = ()
    """(size, stride, seconds): where ranks share cores, those of other groups have them while a small group waits."""
    stream: StreamTable | None = None
    """Memory-bound kernels as measured; None: launch and bandwidth."""
    power_w: float | None = None
    """Thermal design power; None where nobody states it."""
    price_a_second: float | None = None
    """In `currency`; None where nobody states it."""
    currency: str = ""

    @property
    def sixteen(self) -> str:
        """The 16-bit format that tables and peaks are in: bfloat16, or float16 on devices older than it."""
        peaks = dict(self.peak)
        return "float16" if "float16" in peaks and "bfloat16" not in peaks else "bfloat16"

    def arrival_of(self, size: int, stride: int) -> float:
        """Seconds of `arrival_s` for groups of `size` ranks, `stride` apart."""
        if size == 1:
            return 0.0
        return next((seconds for n, apart, seconds in self.arrivals if (n, apart) == (size, stride)), self.arrival_s)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak; ClusterError when the description has none for `dtype`."""
        peaks = dict(self.peak)
        if dtype not in peaks:
            raise ClusterError(
                f"device {self.name}", f"expected a peak for {dtype}, but only {', '.join(peaks)} are described",
                f"Add {dtype} under [device.peak] of the cluster file.",
            )  # fmt: skip
        return peaks[dtype]

    def matmul_basis(self, dtype: str) -> str:
        """What `matmul_s` rests on for this dtype: measured, published or modelled."""
        bases = {table.basis for table in self.matmul if table.dtype == dtype}
        return weakest(sorted(bases)) if bases else "modelled"

    def matmul_s(self, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str, batch: ArrayLike = 1) -> Floats:
        """Seconds of `batch` products [m, k] @ [k, n] in one kernel; shape = broadcast of the arguments.

        A roofline (peak · efficiency, memory bandwidth, launch) times the ratio measured ÷ roofline of the nearest
        tables, weighted by distance in (log min(m, n), log max(m, n), log k). Exact at measured points. Leaving one
        of five published (n, k) tables out predicts it with 5 % (H100) and 8 % (A100) median error, 16 % at the 90th
        centile. A batch fills the device as more rows would.
        """
        m, n, k, batch = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (m, n, k, batch)))
        roof = self.roofline_s(m, n, k, batch, dtype)
        table = self._ratios.get(dtype)
        if table is None:
            return roof
        points, log_ratio = table
        query = _shape_point(m * batch, n, k)
        distance = np.linalg.norm(query[..., None, :] - points, axis=-1)
        weight = 1.0 / (distance**3 + 1e-12)
        return np.asarray(roof * np.exp((weight * log_ratio).sum(-1) / weight.sum(-1)))

    def fastest_matmul(self, dtype: str) -> float:
        """FLOP/s that no product of `matmul_s` exceeds: ratios to the roofline are averages of the tables' own."""
        rate, table = self.peak_flops_per_s(dtype) * self.matmul_efficiency, self._ratios.get(dtype)
        return rate if table is None else rate / float(np.exp(table[1].min()))

    def attention_s(self, flops: ArrayLike, nbytes: ArrayLike, dtype: str) -> Floats:
        """Seconds of one fused attention kernel that computes `flops` and moves `nbytes`; ClusterError when unknown."""
        if self.attention_efficiency is None:
            raise ClusterError(
                f"device {self.name}", "expected the share of peak that attention reaches, but no source states it",
                "Write attention_efficiency under [device] of a copy of the cluster file.",
            )  # fmt: skip
        compute = np.asarray(flops, dtype=np.float64) / (self.peak_flops_per_s(dtype) * self.attention_efficiency)
        return np.asarray(self.launch_s + np.maximum(compute, self._stream_s(np.asarray(nbytes, dtype=np.float64))))

    def memory_bound_s(self, nbytes: ArrayLike) -> Floats:
        """Seconds of one kernel that reads and writes `nbytes` and computes next to nothing; its launch included."""
        moved = np.asarray(nbytes, dtype=np.float64)
        return self.stream.at(moved) if self.stream else np.asarray(self.launch_s + self._stream_s(moved))

    def _stream_s(self, nbytes: Floats) -> Floats:
        return nbytes / (self.memory_bytes_per_s * self.memory_efficiency)

    def roofline_s(self, m: Floats, n: Floats, k: Floats, batch: Floats, dtype: str) -> Floats:
        """Seconds of products by peak, bandwidth and launch alone."""
        compute = 2 * batch * m * n * k / (self.peak_flops_per_s(dtype) * self.matmul_efficiency)
        moved = batch * (m * k + k * n + m * n) * ITEM_BYTES[dtype]
        return self.launch_s + np.maximum(compute, self._stream_s(moved))

    @cached_property
    def _ratios(self) -> dict[str, tuple[Floats, Floats]]:
        """dtype → (points in log shape space [p, 3], log(measured ÷ roofline) [p])."""
        found: dict[str, tuple[Floats, Floats]] = {}
        for dtype in sorted({table.dtype for table in self.matmul}):
            rows = [
                (m, table.n, table.k, rate)
                for table in self.matmul if table.dtype == dtype
                for m, rate in zip(table.m, table.flops_per_s, strict=True)
            ]  # fmt: skip
            m, n, k, rate = np.asarray(rows, dtype=np.float64).T
            roof = self.roofline_s(m, n, k, np.ones_like(m), dtype)
            found[dtype] = _shape_point(m, n, k), np.log(2 * m * n * k / rate / roof)
        return found


def _shape_point(m: Floats, n: Floats, k: Floats) -> Floats:
    """Log2 shape; m and n stand for each other, because a transposed product is the same work."""
    m, n, k = (np.maximum(x, 1.0) for x in (m, n, k))
    return np.stack([np.log2(np.minimum(m, n)), np.log2(np.maximum(m, n)), np.log2(k)], axis=-1)
