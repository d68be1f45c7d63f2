"""`Figures`: what a machine measured as, ready to be written as a cluster file; and how they are read off samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hpsearch.cluster.curve import bus_factor
from hpsearch.errors import ClusterError
from hpsearch.measure.points import CHAIN_BYTES, PAIR_BYTES, STREAMS, Effort, Place, Point, points
from hpsearch.measure.samples import Samples
from hpsearch.measure.tiers import Partition, agreed, find_tiers, from_hosts, nested

PRICED = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""Collectives that a cluster file has curves of."""


@dataclass(frozen=True)
class CurveFigure:
    kind: str
    size: int
    stride: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class MatmulFigure:
    dtype: str
    n: int
    k: int
    m: tuple[int, ...]
    flops_per_s: tuple[float, ...]


@dataclass(frozen=True)
class TierFigure:
    name: str
    size: int
    link: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Figures:
    device: str
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float
    collective_launch_s: float
    attention_share: float
    """Of the fp32 (or else first) peak."""
    overlap: float
    matmuls: tuple[MatmulFigure, ...]
    curves: tuple[CurveFigure, ...]
    tiers: tuple[TierFigure, ...]
    arrivals: tuple[tuple[int, int, float], ...] = ()
    """(size, stride, seconds) that compute pays for waiting for a collective, beyond the collective."""
    streams: tuple[tuple[int, float], ...] = ()
    """(bytes moved, seconds) of a memory-bound kernel."""
    host_bytes_per_s: float | None = None

    @property
    def peak(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for table in self.matmuls:
            found[table.dtype] = max(found.get(table.dtype, 0.0), *table.flops_per_s)
        return found


def figures_of(samples: Samples, effort: Effort, tier_sizes: Sequence[int] = ()) -> Figures:
    """The figures in a complete set of samples; `tier_sizes` instead of what is found, innermost first.

    ClusterError where tiers are not blocks of neighbouring ranks.
    """
    header, best = samples.header, in_a_step(samples)
    place = Place(header["world"], header["device"], header["memory_bytes"])
    found = [point for point in points(place, effort) if point.key in best]
    curves = curve_figures(found, best)
    streams = _streams(found, best)
    matmuls = _matmuls(found, best)
    attention = [_attention_flops(p) / best[p.key] / _peak(matmuls, p.dtype) for p in found if p.kind == "attention"]
    launch_s = best["launch"]
    host = [p.nbytes / best[p.key] for p in found if p.kind in ("to_device", "to_host")]
    return Figures(
        device=f"{header['device']}-rank" if header["device"] == "cpu" else header["device_name"],
        memory_bytes=header["memory_bytes"],
        memory_bytes_per_s=max(n / s for n, s in streams[-2:]),
        launch_s=launch_s,
        collective_launch_s=min((c.seconds[0] for c in curves), default=launch_s),
        attention_share=min(1.0, median(attention)),
        overlap=contention(samples).get("hidden", 0.0),
        arrivals=arrivals(found, samples, curves),
        matmuls=matmuls,
        curves=tuple(c for c in curves if c.kind in PRICED),
        tiers=tier_figures(samples, curves, _sizes(samples, tier_sizes)),
        streams=streams,
        host_bytes_per_s=max(host, default=None),
    )


def in_a_step(samples: Samples) -> dict[str, float]:
    """Seconds of every point as it stands in a step: kernels measured one like the other find the way to them in the
    cache, and in a step none does.

    On a processor the host's time and the kernel's add up, so each kernel gets what a launch costs beyond the smallest
    kernel of a row. An accelerator works while the host issues: no kernel takes less than a launch.
    """
    best = samples.best()
    warm_s = min(seconds for key, seconds in best.items() if key.split()[0] in STREAMS)
    cold_s = max(0.0, best["launch"] - warm_s)
    found = dict(best)
    for key, seconds in best.items():
        if key.split()[0] in (*STREAMS, "matmul"):
            on_cpu = samples.header["device"] == "cpu"
            found[key] = seconds + cold_s if on_cpu else max(seconds, best["launch"])
    return found


def curve_figures(found: Sequence[Point], best: Mapping[str, float]) -> tuple[CurveFigure, ...]:
    """The curves of every collective, broadcast included."""
    curves: dict[str, list[Point]] = {}
    for point in found:
        if point.kind in (*PRICED, "broadcast"):
            curves.setdefault(point.curve, []).append(point)
    return tuple(
        CurveFigure(
            ps[0].kind, *ps[0].shape, tuple(p.nbytes for p in ps), no_longer_than_larger([best[p.key] for p in ps])
        )
        for ps in curves.values()
    )


def no_longer_than_larger(seconds: Sequence[float]) -> tuple[float, ...]:
    """Seconds by growing bytes without what noise added: a message takes no longer than any larger one did.

    What else a machine does only ever adds, so the larger messages are repeats that bound the smaller ones.
    """
    found: list[float] = []
    for value in reversed(seconds):
        found.append(min(value, found[-1]) if found else value)
    return tuple(reversed(found))


def _matmuls(found: Sequence[Point], best: Mapping[str, float]) -> tuple[MatmulFigure, ...]:
    tables: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for p in found:
        if p.kind == "matmul":
            m, n, k = p.shape
            tables.setdefault((p.dtype, n, k), []).append((m, 2 * m * n * k / best[p.key]))
    return tuple(
        MatmulFigure(dtype, n, k, tuple(m for m, _ in rows), tuple(rate for _, rate in rows))
        for (dtype, n, k), rows in tables.items()
    )


def _peak(matmuls: Sequence[MatmulFigure], dtype: str) -> float:
    return max(rate for table in matmuls if table.dtype == dtype for rate in table.flops_per_s)


def _attention_flops(point: Point) -> float:
    """Forward and backward, counted as not causal, as captured graphs count it."""
    batch, heads, tokens, dim = point.shape
    return 3.5 * 4.0 * batch * heads * tokens * tokens * dim


def arrivals(
    found: Sequence[Point], samples: Samples, curves: Sequence[CurveFigure]
) -> tuple[tuple[int, int, float], ...]:
    """(size, stride, seconds) of each chain: its round less what the compute and the collective in it are priced at.

    Of rounds and passes the best counts for each of the three, as it does everywhere else. Ranks that share cores come
    late by no more than the compute of a round: what is beyond, other programs took.
    """
    priced = {(c.size, c.stride): dict(zip(c.nbytes, c.seconds, strict=True)) for c in curves if c.kind == "all_reduce"}
    late: list[tuple[int, int, float]] = []
    for point in found:
        if point.kind == "chain" and CHAIN_BYTES in priced.get(point.shape, {}):
            passes = samples.passes(point.key)
            compute_s = min(seconds for sample in passes for seconds in sample.more["compute_s"])
            left_s = min(sample.best_s for sample in passes) - compute_s - priced[point.shape][CHAIN_BYTES]
            late.append((point.shape[0], point.shape[1], min(max(0.0, left_s), compute_s)))
    return tuple(late)


def _streams(found: Sequence[Point], best: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """By bytes moved, the median over kernels and dtypes."""
    by_size: dict[int, list[float]] = {}
    for p in found:
        if p.kind in STREAMS:
            by_size.setdefault(p.nbytes, []).append(best[p.key])
    return tuple((nbytes, median(seconds)) for nbytes, seconds in sorted(by_size.items()))


def contention(samples: Samples) -> dict[str, float]:
    """Overlap and contention: the least overlap and the median slowdown over the passes."""
    found = [sample.more["shares"] for sample in samples.passes("overlap")]
    if not found:
        return {}
    least_hidden = {"hidden": min(s["hidden"] for s in found)}
    return least_hidden | {
        name: median(s[name] for s in found) for name in ("compute_slowdown", "communication_slowdown")
    }


def pair_seconds(samples: Samples, nbytes: int, pass_index: int | None = None) -> list[list[float]]:
    """Seconds of a message of `nbytes` between each two ranks: best of all passes, or of one."""
    world = samples.header["world"]
    matrix = [[float("inf")] * world for _ in range(world)]
    for (index, _), sample in sorted(samples.found.items()):
        if sample.key.startswith("pair ") and sample.key.endswith(f" {nbytes}B") and pass_index in (None, index):
            for a, b, seconds in sample.more.get("pairs", ()):
                matrix[int(a)][int(b)] = matrix[int(b)][int(a)] = min(seconds, matrix[int(a)][int(b)])
    return matrix


def partitions(samples: Samples) -> tuple[Partition, ...]:
    """The domains inside the whole: hosts, and what latency or bandwidth shows in every pass."""
    found: list[Partition] = []
    hosts = from_hosts(samples.header["hosts"])
    for nbytes in PAIR_BYTES:
        if samples.header["world"] < 3:
            break
        indices = sorted({index for index, key in samples.found if key.startswith("pair ")})
        shown = find_tiers(pair_seconds(samples, nbytes))
        for index in indices:
            shown = agreed(shown, find_tiers(pair_seconds(samples, nbytes, index)))
        found += shown
    unique = {p.domains: p for p in sorted(found, key=lambda p: p.factor)}
    if hosts is not None:
        unique[hosts.domains] = hosts
    return nested(tuple(unique.values()))


def _sizes(samples: Samples, given: Sequence[int]) -> tuple[int, ...]:
    """Devices in a domain of each tier, the whole last."""
    world = samples.header["world"]
    if given:
        return (*(size for size in given if size < world), world)
    for partition in partitions(samples):
        if not partition.is_regular:
            raise ClusterError(
                "tiers",
                f"expected domains of equally many neighbouring ranks, but messages are fast among {partition.domains}",
                "Start ranks so that those of one domain follow each other, or say --tiers, sizes from the innermost.",
            )
    return (*(p.sizes[0] for p in partitions(samples)), world)


def tier_figures(samples: Samples, curves: Sequence[CurveFigure], sizes: Sequence[int]) -> tuple[TierFigure, ...]:
    """Name, link, bandwidth and latency of each tier, from messages and collectives that cross it and nothing more."""
    header, inner, found = samples.header, 1, []
    per_host = len(header["hosts"]) // len(set(header["hosts"]))
    for size in sizes:
        latency_s, rate = _crossing(samples, inner, size)
        buses = [
            bus_factor(c.kind, c.size) * c.nbytes[-1] / c.seconds[-1] / max(1, inner // c.stride)
            for c in curves
            if inner < c.size * c.stride <= size and c.kind != "broadcast"
        ]
        rate = max([rate, *buses])
        name = _tier_name(size, per_host, header["world"])
        found.append(TierFigure(name, size, _link(header, size <= per_host, rate), rate, latency_s))
        inner = size
    return tuple(found)


def _crossing(samples: Samples, inner: int, size: int) -> tuple[float, float]:
    """(seconds of a small message, bytes per second of a large one) of ranks that share only this tier's domain."""
    small, large = (pair_seconds(samples, nbytes) for nbytes in PAIR_BYTES)
    world = samples.header["world"]
    if world == 1:
        return samples.best()["launch"], PAIR_BYTES[1] / samples.best()["launch"]
    pairs = [(a, b) for a in range(world) for b in range(a) if a // size == b // size and a // inner != b // inner]
    return median(small[a][b] for a, b in pairs), PAIR_BYTES[1] / median(large[a][b] for a, b in pairs)


def _tier_name(size: int, per_host: int, world: int) -> str:
    if size == per_host or size == world <= per_host:
        return "node"
    if size < per_host:
        return f"switch of {size}"
    return "fabric" if size == world else f"supernode of {size}"


def _link(header: Mapping[str, object], inside_host: bool, bytes_per_s: float) -> str:
    """The kind of link, by device and what it carries: kinds decide only what is plausible."""
    if header["device"] == "cpu":
        return "memory" if inside_host else "ethernet"
    if not inside_host:
        return "infiniband" if bytes_per_s >= 10e9 else "ethernet"
    fast = {"cuda": "nvlink", "npu": "hccs"}.get(str(header["device"]), "xgmi")
    return fast if bytes_per_s >= 75e9 else "pcie"
