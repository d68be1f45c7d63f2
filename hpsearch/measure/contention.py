"""What communication and compute cost each other when they run at the same time. Collective on all ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hpsearch.measure.kernels import Bench

BYTES = 4 * 2**20
"""Of the all-reduce on this machine's processor."""
DEVICE_BYTES = 64 * 2**20
TURNS = 2
BURST = 8
"""Matmuls between two collectives."""


def shares(bench: Bench) -> dict[str, float]:
    """`hidden`: share of an all-reduce of all ranks that vanishes beside a matmul of about its time; `compute_slowdown`
    and `communication_slowdown`: seconds of each while the other runs, by its seconds alone; `arrival_s`, see there.

    Noise must not look like overlap: of several turns the least hidden share counts.
    """
    tensor = torch.ones((BYTES if bench.on_cpu else DEVICE_BYTES) // 4, device=bench.device)
    side = 512 if bench.on_cpu else 4096
    left = torch.ones(side, side, device=bench.device)
    communication_s = _best(bench, lambda: dist.all_reduce(tensor))
    count = max(1, round(communication_s / _best(bench, lambda: left @ left)))

    def compute(times: int = count) -> None:
        for _ in range(times):
            left @ left

    def both() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        compute()
        work.wait()

    compute_s = _best(bench, compute)
    hidden = min(communication_s + compute_s - _best(bench, both) for _ in range(TURNS))
    arrival_s = arrival(bench)
    slow = [_slowed(bench, tensor, left, count) for _ in range(TURNS)]
    beside_s = bench.slowest([min(s[0] for s in slow), min(s[1] for s in slow)])
    return {
        "arrival_s": arrival_s,
        "hidden": max(0.0, min(1.0, hidden / min(communication_s, compute_s))),
        "compute_slowdown": max(1.0, beside_s[0] / compute_s),
        "communication_slowdown": max(1.0, beside_s[1] / communication_s),
    }


def arrival(bench: Bench) -> float:
    """Seconds by which the last rank comes late to a collective after compute of a few milliseconds on every rank.

    Of rounds of compute and a small all-reduce in turn: what is left of the wall's seconds when the all-reduce and the
    compute are taken off, compute as it is priced. The best round counts.
    """
    tensor, side = torch.ones(128, device=bench.device), 256 if bench.on_cpu else 2048
    left = torch.ones(side, side, device=bench.device)

    def compute() -> None:
        for _ in range(BURST):
            left @ left

    def in_turn() -> None:
        compute()
        dist.all_reduce(tensor)
        if not bench.on_cpu:
            bench.wait()

    alone_s = _best(bench, lambda: dist.all_reduce(tensor))
    if bench.on_cpu:
        wall = bench.rounds_s(in_turn, 4 * bench.effort.budget_s)
        compute_s = min(bench.cpu_rounds_s(compute)[0])
        return max(0.0, min(wall) - compute_s - alone_s)
    return max(0.0, _best(bench, in_turn) - _best(bench, compute) - alone_s)


def _best(bench: Bench, call: object) -> float:
    return min(bench.rounds_s(call, 4 * bench.effort.budget_s))  # type: ignore[arg-type]


def _slowed(bench: Bench, tensor: torch.Tensor, left: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds of `count` matmuls while three all-reduces run, and of one all-reduce while matmuls run all along.

    On an accelerator the end of a collective is seen from a stream of its own, which waits for it and for nothing else.
    """
    compute_s = _compute_beside(bench, tensor, left, count)
    bench.wait()
    dist.barrier(group=bench.control)
    start = time.perf_counter()
    if bench.on_cpu:
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            left @ left
        work.wait()
        return compute_s, time.perf_counter() - start
    events = [torch.Event(bench.device, enable_timing=True) for _ in range(2)]
    events[0].record()
    work = dist.all_reduce(tensor, async_op=True)
    for _ in range(3 * count):
        left @ left
    aside = torch.Stream(bench.device)
    with aside:
        work.wait()
        events[1].record(aside)
    bench.wait()
    return compute_s, events[0].elapsed_time(events[1]) / 1e3


def _compute_beside(bench: Bench, tensor: torch.Tensor, left: torch.Tensor, count: int) -> float:
    bench.wait()
    dist.barrier(group=bench.control)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    if bench.on_cpu:
        start = time.perf_counter()
        for _ in range(count):
            left @ left
        seconds = time.perf_counter() - start
    else:
        events = [torch.Event(bench.device, enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(count):
            left @ left
        events[1].record()
        bench.wait()
        seconds = events[0].elapsed_time(events[1]) / 1e3
    for work in works:
        work.wait()
    return seconds
