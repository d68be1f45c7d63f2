"""From raw measurements to a cluster file; nothing here measures."""

from __future__ import annotations

from typing import Any, Literal

from hpsearch.cluster.curve import bus_factor
from hpsearch.cluster.find import LOCAL_SUMMARY
from hpsearch.cluster.schema import (
    SCHEMA,
    ClusterFile,
    CurveEntry,
    DeviceEntry,
    MatmulEntry,
    Number,
    Numbers,
    TierEntry,
)

_KIND = Literal["measured", "published", "specification", "fitted"]


def describe_local(devices: int, memory_bytes: int, measured: dict[str, Any], when: str) -> ClusterFile:
    """The file of this machine with `devices` ranks; `measured` as `hpsearch.measure.rank` prints it."""
    return ClusterFile(
        schema_version=SCHEMA,
        name="local",
        summary=LOCAL_SUMMARY,
        sources={"here": f"measured by hpsearch with torch {measured['torch']}, {when}"},
        device=_device(memory_bytes, measured),
        tiers=(_tier(devices, measured),),
    )


def _number(value: float, unit: str, kind: _KIND = "measured") -> Number:
    return Number(value=value, unit=unit, kind=kind, source="here")


def _numbers(values: list[float], unit: str) -> Numbers:
    return Numbers(values=tuple(values), unit=unit, kind="measured", source="here")


def _device(memory_bytes: int, measured: dict[str, Any]) -> DeviceEntry:
    peak: dict[str, float] = {}
    for table in measured["matmuls"]:
        peak[table["dtype"]] = max(peak.get(table["dtype"], 0.0), *table["flops_per_s"])
    attention = measured["attention_flops_per_s"] / peak["float32"]
    return DeviceEntry(
        name="cpu-rank",
        memory=_number(memory_bytes, "B"),
        memory_bandwidth=_number(measured["memory_bytes_per_s"] / 1e9, "GB/s"),
        memory_efficiency=_number(1.0, "fraction"),
        matmul_efficiency=_number(1.0, "fraction"),
        attention_efficiency=_number(min(1.0, attention), "fraction"),
        launch=_number(measured["launch_s"] * 1e6, "us"),
        collective_launch=_number(_smallest_s(measured) * 1e6, "us"),
        overlap_efficiency=_number(measured["overlap"], "fraction"),
        peak={dtype: _number(rate / 1e9, "GFLOP/s") for dtype, rate in peak.items()},
        matmul=tuple(
            MatmulEntry(
                dtype=t["dtype"], n=t["n"], k=t["k"], m=tuple(t["m"]),
                rate=_numbers([rate / 1e9 for rate in t["flops_per_s"]], "GFLOP/s"),
            )
            for t in measured["matmuls"]
        ),
    )  # fmt: skip


def _smallest_s(measured: dict[str, Any]) -> float:
    """Seconds of the smallest collective; of one launch where no group exists."""
    return float(min((curve["seconds"][0] for curve in measured["curves"]), default=measured["launch_s"]))


def _tier(devices: int, measured: dict[str, Any]) -> TierEntry:
    """One node of `devices` ranks; bandwidth and latency are for groups that were not measured, there are none."""
    curves = measured["curves"]
    rate = max(
        (bus_factor(c["kind"], c["size"]) * c["nbytes"][-1] / c["seconds"][-1] for c in curves),
        default=measured["memory_bytes_per_s"],
    )
    return TierEntry(
        name="node",
        size=_number(devices, "devices"),
        link="memory",
        bandwidth=_number(rate / 1e9, "GB/s", "fitted"),
        latency=_number(_smallest_s(measured) * 1e6, "us", "fitted"),
        collectives=tuple(
            CurveEntry(
                op=c["kind"], group=c["size"], nbytes=tuple(c["nbytes"]),
                time=_numbers([s * 1e6 for s in c["seconds"]], "us"),
            )
            for c in curves
        ),
    )  # fmt: skip
