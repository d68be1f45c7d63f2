"""`Group`: nodes of a cluster that have less of something than its device: memory, bandwidth of memory, compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpsearch.cluster.device import Device, MatmulTable, StreamTable
from hpsearch.errors import ClusterError, counted


@dataclass(frozen=True)
class Group:
    """A run of ranks; what it does not say is as the cluster's device has it."""

    name: str
    devices: int
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    compute: float = 1.0
    """Rate of matmuls and attention over the device's."""


def weakest_device(device: Device, groups: Sequence[Group]) -> Device:
    """`device` as work meets it that waits for all of these groups: the least memory, the slowest rates."""
    memory = min([device.memory_bytes, *(g.memory_bytes for g in groups if g.memory_bytes is not None)])
    stated = [g.memory_bytes_per_s for g in groups if g.memory_bytes_per_s is not None]
    bandwidth, compute = min([device.memory_bytes_per_s, *stated]), min([1.0, *(g.compute for g in groups)])
    slower = device.memory_bytes_per_s / bandwidth
    stream = device.stream
    found = replace(
        device, memory_bytes=memory, memory_bytes_per_s=bandwidth, matmul=(),
        peak=tuple((dtype, rate * compute) for dtype, rate in device.peak),
        stream=None if stream is None else StreamTable(stream.nbytes, tuple(s * slower for s in stream.seconds)),
    )  # fmt: skip
    return replace(found, matmul=tuple(_slowed(table, device, found) for table in device.matmul))


def _slowed(table: MatmulTable, device: Device, slower: Device) -> MatmulTable:
    """Measured products take longer as their roofline does: compute does not slow what memory bounds."""
    m = np.asarray(table.m, dtype=np.float64)
    n, k, one = (np.full_like(m, size) for size in (table.n, table.k, 1))
    share = device.roofline_s(m, n, k, one, table.dtype) / slower.roofline_s(m, n, k, one, table.dtype)
    return replace(table, flops_per_s=tuple((np.asarray(table.flops_per_s) * share).tolist()))


def check_groups(cluster: str, devices: int, node: int, groups: Sequence[Group]) -> None:
    """ClusterError unless the groups are whole nodes, or one node, and add up to the devices."""
    there = sum(group.devices for group in groups)
    if groups and there != devices:
        said = ", ".join(f"{counted(g.devices // node, 'node')} of {g.name!r}" for g in groups)
        raise ClusterError(
            f"cluster {cluster}", f"expected the {counted(there, 'device')} of its groups ({said}, {node} a node), but "
            f"got {devices}", f"Ask for {there}, or state the groups that are in use.",
        )  # fmt: skip


def names_of(groups: Sequence[Group], first: int, last: int) -> tuple[str, ...]:
    """Groups that the ranks from `first` to `last`, without it, lie in, if ranks fill them in this order."""
    found, at = [], 0
    for group in groups:
        if first < at + group.devices and at < last:
            found.append(group.name)
        at += group.devices
    return tuple(found)
