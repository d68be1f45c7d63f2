"""What one rank measures, all ranks at once: collectives, matmuls, attention, memory, launch, overlap.

Run by `hpsearch.measure.local` as a program of its own, which imports torch and nothing else of ours. Rank 0 prints one
JSON object a line: progress (`{"step": …, "share": …}`), then the result (`{"measured": …}`). A time is the best of
three rounds on each rank (what else runs on the machine can only add), and of these the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = (*(1024 * 4**i for i in range(7)), 8 * 2**20)
"""Bytes, 1 KiB to 8 MiB."""
MATMULS = ((64, 64), (256, 256), (256, 1024), (1024, 256), (768, 768))
"""(n, k)."""
ROWS = (16, 128, 1024)
DTYPES = ("float32", "bfloat16", "float64")
BUDGET_S = 0.03
"""Seconds spent on one point, roughly."""


def seconds_of(call: Callable[[], object], budget_s: float = BUDGET_S) -> float:
    """Seconds of one call on the slowest rank: the best of three rounds, as many calls a round on every rank."""
    call()
    once = _slowest(_round_s(call, 1))
    count = max(1, min(200, int(budget_s / 3 / max(once, 1e-7))))
    return _slowest(min(_round_s(call, count) for _ in range(3)))


def _round_s(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _slowest(seconds: float) -> float:
    if dist.get_world_size() == 1:
        return seconds
    worst = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def collective_call(kind: str, nbytes: int, group: dist.ProcessGroup, size: int) -> Callable[[], object]:
    """One collective of `nbytes` (the convention of `hpsearch.layout.redistribute`), as emitted programs call it."""
    elements = max(nbytes // 4 // size, 1)
    large, small = torch.ones(elements * size), torch.ones(elements)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(large, small, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(small, large, group=group)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(large, group=group)
    received = torch.empty_like(large)
    return lambda: dist.all_to_all_single(received, large, group=group)


def own_group(size: int) -> dist.ProcessGroup:
    """This rank's group when the world is cut into neighbours of `size`; every rank calls it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return groups[rank // size]


def group_sizes(world: int) -> tuple[int, ...]:
    return tuple(size for size in range(2, world + 1) if world % size == 0)


Point = tuple[str, Callable[[], Any]]
"""What is measured, for the progress bar, and the measurement."""


def plan(found: dict[str, Any]) -> Iterator[Point]:
    """Every measurement in order; each puts its figures into `found`."""
    for size in group_sizes(dist.get_world_size()):
        group = own_group(size)
        for kind in COLLECTIVES:
            yield f"{kind} over {size}", lambda k=kind, g=group, s=size: found["curves"].append(_curve(k, g, s))
    for dtype in DTYPES:
        for n, k in MATMULS:
            yield f"matmul {dtype}", lambda d=dtype, n=n, k=k: found["matmuls"].append(_matmul(d, n, k))
    yield "memory", lambda: found.update(memory_bytes_per_s=_memory_bytes_per_s())
    yield "launch", lambda: found.update(launch_s=_launch_s())
    yield "attention", lambda: found.update(attention_flops_per_s=_attention_flops_per_s())
    yield "overlap", lambda: found.update(overlap=_overlap())


def _curve(kind: str, group: dist.ProcessGroup, size: int) -> dict[str, Any]:
    sizes = [nbytes for nbytes in SIZES if nbytes >= 4 * size]
    seconds = [seconds_of(collective_call(kind, nbytes, group, size)) for nbytes in sizes]
    return {"kind": kind, "size": size, "nbytes": sizes, "seconds": seconds}


def _matmul(dtype: str, n: int, k: int) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    right = torch.ones(k, n, dtype=kind)
    rates = []
    for m in ROWS:
        left = torch.ones(m, k, dtype=kind)
        rates.append(2 * m * n * k / seconds_of(lambda left=left: left @ right))  # type: ignore[misc]
    return {"dtype": dtype, "n": n, "k": k, "m": list(ROWS), "flops_per_s": rates}


def _memory_bytes_per_s() -> float:
    """Of a sum that reads two tensors of 16 MiB and writes one."""
    a, b, c = (torch.ones(4 * 2**20) for _ in range(3))
    return 3 * 16 * 2**20 / seconds_of(lambda: torch.add(a, b, out=c), 0.2)


def _launch_s() -> float:
    a, b = torch.ones(16), torch.ones(16)
    return seconds_of(lambda: torch.add(a, b), 0.02)


def _attention_flops_per_s() -> float:
    """Forward and backward of causal attention, 8 heads of 64 over 256 tokens; FLOPs counted as not causal."""
    q, k, v = (torch.randn(1, 8, 256, 64, requires_grad=True) for _ in range(3))

    def step() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]

    return 3.5 * 4 * 8 * 256 * 256 * 64 / seconds_of(step, 0.2)


def _overlap() -> float:
    """Share of an all-reduce of 4 MiB that vanishes beside a matmul of about the same time; 0 on one rank."""
    world = dist.get_world_size()
    if world == 1:
        return 0.0
    tensor, left = torch.ones(2**20), torch.ones(512, 512)
    communication = seconds_of(lambda: dist.all_reduce(tensor), 0.2)
    count = max(1, round(communication / seconds_of(lambda: left @ left)))

    def compute() -> None:
        for _ in range(count):
            left @ left

    def both() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        compute()
        work.wait()

    alone = seconds_of(compute, 0.2)
    hidden = min(communication + alone - seconds_of(both, 0.1) for _ in range(2))  # noise must not look like overlap
    return max(0.0, min(1.0, hidden / min(communication, alone)))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--world", "--timeout"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--store", required=True)
    given = parser.parse_args()
    signal.alarm(given.timeout)  # a rank whose parent is gone ends too
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{given.store}", rank=given.rank, world_size=given.world,
        timeout=timedelta(seconds=given.timeout),
    )  # fmt: skip
    found: dict[str, Any] = {"curves": [], "matmuls": [], "torch": torch.__version__}
    total = 4 * len(group_sizes(given.world)) + len(DTYPES) * len(MATMULS) + 4
    for done, (name, point) in enumerate(plan(found)):
        _tell(given.rank, {"step": name, "share": done / total})
        point()
    _tell(given.rank, {"measured": found})
    dist.barrier()
    dist.destroy_process_group()


def _tell(rank: int, message: dict[str, Any]) -> None:
    if rank == 0:
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
