"""Samples of machines that were never built: every point by a formula."""

from __future__ import annotations

import random
from pathlib import Path

from hpsearch.cluster.curve import bus_factor
from hpsearch.measure.points import CHAIN_BYTES, QUICK, Effort, Place, Point, pair_rounds
from hpsearch.measure.samples import Sample, Samples
from hpsearch.measure.session import work_list

LATENCY_S, BYTES_PER_S = 20e-6, 2e9
ACROSS = 8.0
"""How much slower a message between hosts is than one inside."""
COMPUTE_S = 5e-3
"""Of a round of a chain."""
MATMUL_FLOPS_PER_S, STREAM_BYTES_PER_S, LAUNCH_S = 5e10, 2e10, 4e-6
ENVIRONMENT = {
    "when": "2026-01-02T03:04:05", "load_at_start": (0.1, 0.1, 0.1), "load_at_end": (0.2, 0.1, 0.1), "cores": 2.0
}  # fmt: skip


def waiting_s(size: int, stride: int) -> float:
    """What compute pays for a collective that it waits for."""
    return 1e-4 * (size + stride / 8)


def header(hosts: list[str], effort: Effort = QUICK) -> dict[str, object]:
    return {
        "world": len(hosts), "hosts": hosts, "device": "cpu", "device_name": "x86_64", "backend": "gloo",
        "memory_bytes": 4 * 10**9, "effort": effort.name, "torch": "2.13.0", "threads": 1,
    }  # fmt: skip


def seconds_of(point: Point, hosts: list[str]) -> float:
    """Kernels at fixed rates; collectives as rings over the slowest link they span."""
    if point.kind == "launch":
        return LAUNCH_S
    if point.kind in ("add", "copy", "sum"):
        return 1e-6 + point.nbytes / STREAM_BYTES_PER_S
    if point.kind == "matmul":
        m, n, k = point.shape
        return 2e-6 + 2 * m * n * k / MATMUL_FLOPS_PER_S
    if point.kind == "attention":
        batch, heads, tokens, dim = point.shape
        return 3.5 * 4 * batch * heads * tokens**2 * dim / (0.5 * MATMUL_FLOPS_PER_S)
    size, stride = point.shape
    slow = ACROSS if hosts[0] != hosts[(size - 1) * stride] else 1.0
    factor = 1.0 if point.kind == "broadcast" else bus_factor(point.kind, size)
    return slow * ((size - 1) * LATENCY_S + factor * point.nbytes / BYTES_PER_S)


def sample(pass_index: int, point: Point, hosts: list[str], noise: random.Random | None = None) -> Sample:
    def late() -> float:
        return 1 + 0.2 * noise.random() if noise else 1.0

    if point.kind == "overlap":
        shares = {"hidden": 0.25, "compute_slowdown": 1.5, "communication_slowdown": 2.0}
        return Sample(pass_index, point.key, (1.0,), {"shares": shares})
    if point.kind == "chain":
        alone = seconds_of(Point("all_reduce", point.shape, nbytes=CHAIN_BYTES), hosts)
        rounds = tuple(COMPUTE_S + alone + waiting_s(*point.shape) + extra for extra in (2e-3, 0.0))
        return Sample(pass_index, point.key, rounds, {"compute_s": [1.2 * COMPUTE_S, COMPUTE_S]})
    if point.kind == "pair":
        pairs = []
        for a, b in pair_rounds(len(hosts))[point.shape[0]]:
            slow = ACROSS if hosts[a] != hosts[b] else 1.0
            pairs.append([a, b, slow * (LATENCY_S + point.nbytes / BYTES_PER_S) * late()])
        return Sample(pass_index, point.key, tuple(s for _, _, s in pairs), {"pairs": pairs})
    seconds = seconds_of(point, hosts)
    return Sample(pass_index, point.key, (1.3 * seconds * late(), seconds * late()))


def samples(folder: Path, hosts: list[str], seed: int | None = None) -> Samples:
    """A complete quick profile in `folder`, exact, or with noise by `seed`."""
    noise = random.Random(seed) if seed is not None else None
    found = Samples.open(folder, header(hosts))
    for work in work_list(Place(len(hosts), "cpu", 4 * 10**9), QUICK):
        one = sample(work.pass_index, work.point, hosts, noise)
        found.found[one.pass_index, one.key] = one
    return found
