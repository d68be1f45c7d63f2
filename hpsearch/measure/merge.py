"""Curves and matmul tables from elsewhere, put into a cluster file: what they measured replaces what stood there."""

from __future__ import annotations

from collections.abc import Sequence

from hpsearch.cluster.schema import ClusterFile, CurveEntry, MatmulEntry, Numbers, TierEntry
from hpsearch.errors import ClusterError
from hpsearch.measure.figures import PRICED, CurveFigure, MatmulFigure


def merged(
    base: ClusterFile, curves: Sequence[CurveFigure], matmuls: Sequence[MatmulFigure], *, key: str, source: str
) -> ClusterFile:
    """`base` with these figures, each on the innermost tier that holds its groups; `key` names the source in the file.

    Broadcasts have no place in a cluster file and are left out. ClusterError where a group is larger than the cluster,
    or a dtype has no peak.
    """
    device = base.device
    for table in matmuls:
        if table.dtype not in device.peak:
            known = ", ".join(device.peak)
            problem = f"expected matmuls of a dtype that {base.name} has a peak of ({known}), but found {table.dtype}"
            raise ClusterError(source, problem, "Add its peak to the cluster file.")
    found = [_matmul_entry(table, key) for table in matmuls]
    shapes = {(entry.dtype, entry.n, entry.k) for entry in found}
    kept = [entry for entry in device.matmul if (entry.dtype, entry.n, entry.k) not in shapes]
    tiers = list(base.tiers)
    for curve in curves:
        if curve.kind in PRICED:
            index = _place(base, curve, source)
            tiers[index] = _with_curve(tiers[index], curve, key)
    return base.model_copy(
        update={
            "sources": {**base.sources, key: source},
            "device": device.model_copy(update={"matmul": (*kept, *found)}),
            "tiers": tuple(tiers),
        }
    )


def _place(base: ClusterFile, curve: CurveFigure, source: str) -> int:
    span = curve.size * curve.stride
    for index, tier in enumerate(base.tiers):
        if span <= tier.size.value:
            return index
    most = base.tiers[-1].size.value
    problem = f"expected groups inside the {most:g} devices of {base.name}, but {curve.kind} spans {span}"
    raise ClusterError(source, problem, "Name a larger cluster.")


def _with_curve(tier: TierEntry, curve: CurveFigure, key: str) -> TierEntry:
    time = Numbers(values=tuple(s * 1e6 for s in curve.seconds), unit="us", kind="measured", source=key)
    entry = CurveEntry(op=curve.kind, group=curve.size, stride=curve.stride, nbytes=curve.nbytes, time=time)  # type: ignore[arg-type]
    kept = [c for c in tier.collectives if (c.op, c.group, c.stride) != (entry.op, entry.group, entry.stride)]
    return tier.model_copy(update={"collectives": (*kept, entry)})


def _matmul_entry(table: MatmulFigure, key: str) -> MatmulEntry:
    rates = tuple(rate / 1e12 for rate in table.flops_per_s)
    rate = Numbers(values=rates, unit="TFLOP/s", kind="measured", source=key)
    return MatmulEntry(dtype=table.dtype, n=table.n, k=table.k, m=table.m, rate=rate)
