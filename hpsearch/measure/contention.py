"""What communication and compute cost each other when they run at the same time. Collective on all ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hpsearch.measure.kernels import Bench, Ring
from hpsearch.measure.points import CHAIN_BYTES, Point

BYTES = 4 * 2**20
"""Of the all-reduce on this machine's processor."""
DEVICE_BYTES = 64 * 2**20
TURNS = 2
CHAIN_S = 0.1
"""Spent on the compute of a chain, roughly."""
CHAIN = 16
"""Rounds of compute and a collective in turn."""
BURST = 8
"""Products in a round, a sum of two tensors before and after each: some milliseconds, as a layer of a model has."""


def shares(bench: Bench) -> dict[str, float]:
    """`hidden`: share of an all-reduce of all ranks that vanishes beside a matmul of about its time; `compute_slowdown`
    and `communication_slowdown`: seconds of each while the other runs, by its seconds alone.

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
    slow = [_slowed(bench, tensor, left, count) for _ in range(TURNS)]
    beside_s = bench.slowest([min(s[0] for s in slow), min(s[1] for s in slow)])
    return {
        "hidden": max(0.0, min(1.0, hidden / min(communication_s, compute_s))),
        "compute_slowdown": max(1.0, beside_s[0] / compute_s),
        "communication_slowdown": max(1.0, beside_s[1] / communication_s),
    }


def chained(bench: Bench, point: Point) -> tuple[list[float], list[float]]:
    """(Seconds of a round of compute and one all-reduce in turn, in each of several chains; of its compute alone).

    What the two do not add up to is what compute pays for waiting: ranks that share cores come late, a core stands idle
    until the last of them is there, caches are cold afterwards. A chain is as long as a step has them, for some rounds
    are spared that and a short chain is one of those now and then; compute is priced as kernels are.
    """
    on_cpu, group = bench.on_cpu, bench.group(point.shape)
    elements, side = (2**16, 256) if on_cpu else (2**22, 2048)
    tensor = torch.ones(CHAIN_BYTES // 4, device=bench.device)
    product = Ring(bench, lambda: tuple(torch.ones(side, side, device=bench.device) for _ in range(2)), torch.mm)
    total = Ring(bench, lambda: tuple(torch.ones(elements, device=bench.device) for _ in range(2)), torch.add)
    c10d = torch.ops._c10d_functional

    def compute() -> None:
        for _ in range(BURST):
            total()
            product()
            total()

    def in_turn() -> None:
        compute()
        c10d.wait_tensor(c10d.all_reduce(tensor, "sum", group.group_name))

    compute_s = bench.cpu_rounds_s(compute, CHAIN_S)[0] if on_cpu else bench.rounds_s(compute)
    in_turn()
    return bench.chain_s(in_turn, CHAIN, point.shape[0]), compute_s


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
