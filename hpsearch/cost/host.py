"""Seconds of copies between device and host memory: kept activations out and back, optimizer states in and out.

Copies of activations run beside the compute of their own block, on a link of their own: what is longer than that
compute is exposed, and of the rest the part that measured overlap does not hide. States are waited for.
"""

from __future__ import annotations

import numpy as np

from hpsearch.cluster import Cluster
from hpsearch.cost.job import Job, optimizer_states
from hpsearch.cost.offload import moving_calls
from hpsearch.cost.op_time import Floats, NodeKey
from hpsearch.cost.saved import moved_bytes
from hpsearch.cost.storage import Storage
from hpsearch.errors import ClusterError
from hpsearch.layout import Mesh
from hpsearch.solve import Hinge
from hpsearch.strategy import SearchSpace


def host_bytes_per_s(cluster: Cluster) -> float:
    """Of one direction. Raises ClusterError where the cluster file does not state it."""
    if cluster.device.host_bytes_per_s is None:
        name = cluster.device.name
        raise ClusterError(
            f"device {name}", "expected host_bandwidth, to price offload, but found none",
            "Write host_bandwidth under [device] of a copy of the cluster file, or pin offload=none.",
        )  # fmt: skip
    return cluster.device.host_bytes_per_s


def copies_s(space: SearchSpace, cluster: Cluster, mesh: Mesh, job: Job) -> dict[NodeKey, Floats]:
    """Seconds in which one call's activations reach host memory, by the node that makes them and its state."""
    if not job.offload:
        return {}
    rate = host_bytes_per_s(cluster)
    return {key: nbytes / rate for key, nbytes in moved_bytes(space, job, mesh).items() if nbytes.any()}


def unhidden_s(seconds: dict[NodeKey, Floats], space: SearchSpace, job: Job, eta: float) -> dict[NodeKey, Floats]:
    """What of the copies of a step nothing hides, out and back."""
    return {key: s * ((1 - eta) * 2 * _calls(space, key[0], job) * job.micro_batches) for key, s in seconds.items()}


def hinge(
    graph: str, phase: str, seconds: dict[int, Floats], budget: dict[int, Floats], space: SearchSpace, job: Job,
    eta: float,
) -> Hinge:  # fmt: skip
    """What of the copies in one phase of a block is longer than the block's compute."""
    coefficients = {n: -s for n, s in budget.items()}
    for n, s in seconds.items():
        coefficients[n] = coefficients.get(n, np.zeros(len(s))) + s
    return Hinge(f"{graph} {phase} host", coefficients, 0.0, eta * _calls(space, graph, job) * job.micro_batches)


def _calls(space: SearchSpace, graph: str, job: Job) -> int:
    return moving_calls(sum(1 for block, _ in space.model.instances if block == graph), job)


def states_s(storage: Storage, cluster: Cluster, job: Job, mesh: Mesh) -> float:
    """Seconds a step of bringing one parameter's optimizer states to the device and back."""
    if not job.states_on_host or storage.gradient is None or not optimizer_states(job.optimizer):
        return 0.0
    return 2 * storage.states_bytes(job, mesh) / host_bytes_per_s(cluster)
