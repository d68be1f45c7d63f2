"""Whether the matmul rates of a device belong to its peaks: a unit slip in one of them is a factor of a thousand."""

from __future__ import annotations

from collections.abc import Iterator

from hpsearch.cluster.schema import DeviceEntry
from hpsearch.cluster.units import UNITS, Complaint, in_unit

BESIDE_PEAK = (0.02, 1.15)
"""Best rate of a table over the dtype's peak: clocks above the nominal one, small tables of narrow formats."""


def rates_beside_peaks(device: DeviceEntry) -> Iterator[Complaint]:
    """A complaint for each table whose best rate cannot be of a device with this peak, at whichever of the two is
    smaller than it should be."""
    for i, table in enumerate(device.matmul):
        peak = device.peak.get(table.dtype)
        if peak is None or table.rate.unit not in UNITS["rate"] or not table.rate.values:
            continue
        best = max(table.rate.values) * UNITS["rate"][table.rate.unit]
        most = peak.value * UNITS["rate"][peak.unit]
        if BESIDE_PEAK[0] * most <= best <= BESIDE_PEAK[1] * most:
            continue
        at_peak = best > most
        path = ("device", "peak", table.dtype) if at_peak else ("device", "matmul", i, "rate")
        unit = peak.unit if at_peak else table.rate.unit
        larger = {"GFLOP/s": "TFLOP/s", "FLOP/s": "GFLOP/s"}.get(unit)
        yield Complaint(
            path,
            f"expected matmuls of {table.dtype} at {BESIDE_PEAK[0]:.0%} to {BESIDE_PEAK[1]:.0%} of the peak, but found "
            f"{in_unit('rate', best)} beside {in_unit('rate', most)}",
            f'{unit} looks like {larger}: write unit = "{larger}".' if larger else "Check both numbers.",
        )
