"""Peak bytes a device by category, for a chosen state of every node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpsearch.cluster import Cluster
from hpsearch.cost import CostTable
from hpsearch.cost.saved import buffer_bytes, saved_bytes

RESERVE = 0.10
"""Share of a device's memory that plans leave alone: allocator fragmentation, communicator and runtime buffers.
Published runs of a peer reserve 8-22 % more than they allocate (Mist, EuroSys'25, tables of tuned plans)."""


def usable_bytes(cluster: Cluster) -> int:
    """Bytes of one device that a plan may fill."""
    return int(cluster.device.memory_bytes * (1 - RESERVE))


def bytes_by_category(table: CostTable, choice: Sequence[int], workspace: int = 0) -> dict[str, int]:
    """parameters, gradients, optimizer, gathered, buffers, activations, workspace: they add up to the peak.

    Where optimizer states rest on the host, that is the fuller of two moments: backward, and the update."""
    found = in_backward(table, choice, workspace)
    if table.job.states_on_host:
        later = at_update(table, choice)
        return later if sum(later.values()) > sum(found.values()) else found
    return found


def in_backward(table: CostTable, choice: Sequence[int], workspace: int = 0) -> dict[str, int]:
    """Bytes a device by category when activations and workspace are largest."""
    state = {key: choice[i] for i, key in enumerate(table.keys)}
    found: Counter[str] = Counter()
    for key, kept in table.storages.items():
        storage, count = kept[state[key]], table.space.nodes[key].count
        for name, nbytes in storage.static_bytes(table.job, table.mesh).items():
            found[name] += nbytes * count
        found["gathered"] += storage.passing_bytes(table.job, table.mesh) * min(2, count)
    for key, by_state in saved_bytes(table.space, table.job, table.mesh).items():
        found["activations"] += int(by_state[state[key]])
    if buffers := sum(buffer_bytes(table.space).values()):
        found["buffers"] = buffers
    found["workspace"] = workspace
    return dict(found)


def at_update(table: CostTable, choice: Sequence[int]) -> dict[str, int]:
    """Bytes a device by category while the optimizer updates, its states among them."""
    state = {key: choice[i] for i, key in enumerate(table.keys)}
    found: Counter[str] = Counter()
    for key, kept in table.storages.items():
        for name, nbytes in kept[state[key]].update_bytes(table.job, table.mesh).items():
            found[name] += nbytes * table.space.nodes[key].count
    if buffers := sum(buffer_bytes(table.space).values()):
        found["buffers"] = buffers
    return dict(found)
