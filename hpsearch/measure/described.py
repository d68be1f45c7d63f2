"""From figures to a cluster file; nothing here measures."""

from __future__ import annotations

from typing import Any, Literal

from hpsearch.cluster.curve import bus_factor
from hpsearch.cluster.find import LOCAL_SUMMARY
from hpsearch.cluster.schema import (
    SCHEMA,
    ArrivalEntry,
    ClusterFile,
    CurveEntry,
    DeviceEntry,
    MatmulEntry,
    Number,
    Numbers,
    StreamEntry,
    TierEntry,
)
from hpsearch.cluster.units import LINKS
from hpsearch.measure.figures import CurveFigure, Figures, MatmulFigure, TierFigure

_KIND = Literal["measured", "published", "specification", "fitted"]


def describe(figures: Figures, *, name: str, summary: str, source: str) -> ClusterFile:
    """The cluster file of what was measured; `source` says with what and when."""
    return ClusterFile(
        schema_version=SCHEMA,
        name=name,
        summary=summary,
        sources={"here": source},
        device=_device(figures),
        tiers=tuple(_tier(tier, inner, figures) for inner, tier in _with_inner(figures.tiers)),
    )


def describe_local(devices: int, memory_bytes: int, measured: dict[str, Any], when: str) -> ClusterFile:
    """The file of this machine with `devices` ranks; `measured` as `hpsearch.measure.rank` prints it."""
    curves = tuple(
        CurveFigure(c["kind"], c["size"], 1, tuple(c["nbytes"]), tuple(c["seconds"])) for c in measured["curves"]
    )
    matmuls = tuple(
        MatmulFigure(t["dtype"], t["n"], t["k"], tuple(t["m"]), tuple(t["flops_per_s"])) for t in measured["matmuls"]
    )
    peak = max(rate for t in matmuls if t.dtype == "float32" for rate in t.flops_per_s)
    smallest_s = min((curve.seconds[0] for curve in curves), default=measured["launch_s"])
    rate = max(
        (bus_factor(c.kind, c.size) * c.nbytes[-1] / c.seconds[-1] for c in curves),
        default=measured["memory_bytes_per_s"],
    )
    figures = Figures(
        device="cpu-rank",
        memory_bytes=memory_bytes,
        memory_bytes_per_s=measured["memory_bytes_per_s"],
        launch_s=measured["launch_s"],
        collective_launch_s=smallest_s,
        attention_share=min(1.0, measured["attention_flops_per_s"] / peak),
        overlap=measured["overlap"],
        matmuls=matmuls,
        curves=curves,
        tiers=(TierFigure("node", devices, "memory", rate, smallest_s),),
    )
    source = f"measured by hpsearch with torch {measured['torch']}, {when}"
    return describe(figures, name="local", summary=LOCAL_SUMMARY, source=source)


def _number(value: float, unit: str, kind: _KIND = "measured") -> Number:
    return Number(value=value, unit=unit, kind=kind, source="here")


def _numbers(values: tuple[float, ...], unit: str, scale: float) -> Numbers:
    return Numbers(values=tuple(value / scale for value in values), unit=unit, kind="measured", source="here")


def _device(figures: Figures) -> DeviceEntry:
    host = figures.host_bytes_per_s
    return DeviceEntry(
        name=figures.device,
        memory=_number(figures.memory_bytes, "B"),
        memory_bandwidth=_number(figures.memory_bytes_per_s / 1e9, "GB/s"),
        memory_efficiency=_number(1.0, "fraction"),
        matmul_efficiency=_number(1.0, "fraction"),
        attention_efficiency=_number(figures.attention_share, "fraction"),
        launch=_number(figures.launch_s * 1e6, "us"),
        collective_launch=_number(figures.collective_launch_s * 1e6, "us"),
        overlap_efficiency=_number(figures.overlap, "fraction"),
        arrival=_number(max((s for _, _, s in figures.arrivals), default=0.0) * 1e6, "us"),
        arrivals=tuple(
            ArrivalEntry(group=n, stride=apart, time=_number(s * 1e6, "us")) for n, apart, s in figures.arrivals
        ),
        host_bandwidth=None if host is None else _number(host / 1e9, "GB/s"),
        host_link="pcie" if host is None or host <= LINKS["pcie"].bandwidth[1] else "nvlink",
        peak={dtype: _number(rate / 1e9, "GFLOP/s") for dtype, rate in figures.peak.items()},
        matmul=tuple(
            MatmulEntry(dtype=t.dtype, n=t.n, k=t.k, m=t.m, rate=_numbers(t.flops_per_s, "GFLOP/s", 1e9))
            for t in figures.matmuls
        ),
        stream=_stream(figures),
    )


def _stream(figures: Figures) -> StreamEntry | None:
    if not figures.streams:
        return None
    nbytes, seconds = zip(*figures.streams, strict=True)
    return StreamEntry(nbytes=nbytes, time=_numbers(seconds, "us", 1e-6))


def _with_inner(tiers: tuple[TierFigure, ...]) -> list[tuple[int, TierFigure]]:
    """Each tier with the size of the one inside it; 1 for the innermost."""
    return list(zip([1, *(tier.size for tier in tiers)], tiers, strict=False))


def _tier(tier: TierFigure, inner: int, figures: Figures) -> TierEntry:
    curves = [c for c in figures.curves if inner < c.size * c.stride <= tier.size]
    return TierEntry(
        name=tier.name,
        size=_number(tier.size, "devices"),
        link=tier.link,
        bandwidth=_number(tier.bytes_per_s / 1e9, "GB/s"),
        latency=_number(tier.latency_s * 1e6, "us"),
        collectives=tuple(
            CurveEntry(
                op=c.kind, group=c.size, stride=c.stride, nbytes=c.nbytes, time=_numbers(c.seconds, "us", 1e-6)
            )
            for c in curves
        ),
    )  # fmt: skip
