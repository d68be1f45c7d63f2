"""A profile on running ranks: every point in every pass, kept as it comes. All ranks call `measure_here`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpsearch.measure.contention import chained, shares
from hpsearch.measure.kernels import SHORT_ROUNDS, Bench, Call, call_of, message, ranks_a_core, usable_cores
from hpsearch.measure.launch import PRICED, blocks, cold_cpu_s
from hpsearch.measure.local import memory_bytes
from hpsearch.measure.points import COLLECTIVES, COMPUTE, Effort, Place, Point, points
from hpsearch.measure.samples import OUT_OF_MEMORY, Sample, Samples
from hpsearch.run.launch import is_first, local_device, start, together

AGREES = 0.1
"""Difference between passes up to which they agree."""

Show = Callable[[str, int, int], None]
"""(what is being measured, points done, points in all)."""


@dataclass(frozen=True)
class Work:
    """One point in one pass."""

    pass_index: int
    point: Point


def work_list(place: Place, effort: Effort) -> list[Work]:
    everything = list(points(place, effort))
    found = [Work(p, point) for p in range(effort.passes) for point in everything]
    together = [point for point in everything if point.kind in COLLECTIVES and point.kind != "broadcast"]  # no price
    return found + [Work(effort.passes + p, point) for p in range(effort.more_passes) for point in together]


def disagreeing(place: Place, effort: Effort, done: dict[tuple[int, str], tuple[float, ...]]) -> list[Work]:
    """The points whose best two passes differ, the worst first, to be measured in one pass more."""
    found = []
    for order, point in enumerate(points(place, effort)):
        last = effort.passes + effort.more_passes
        best = sorted(min(done[p, point.key]) for p in range(last) if done.get((p, point.key)))
        if len(best) < 2 or (last, point.key) in done or point.kind == "pair":
            continue
        if best[1] > (1 + AGREES) * best[0]:
            found.append((-best[1] / best[0], order, Work(last, point)))
    return [work for _, _, work in sorted(found, key=lambda f: f[:2])]


def measure_here(folder: Path, effort: Effort, show: Show | None = None) -> tuple[Samples, dict[str, Any]] | None:
    """Measures what `folder` does not have yet. Rank 0 gets the samples and the environment, the others None.

    Raises ClusterError on every rank when the folder holds samples of something else.
    """
    began = time.monotonic()
    start()
    device = local_device()
    control = dist.group.WORLD if device.type == "cpu" else dist.new_group(backend="gloo")
    assert control is not None
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, platform.node(), group=control)
    bench = Bench(device, effort, control, hosts.count(platform.node()))
    header, environment = _described(bench, hosts)
    samples = together("samples", lambda: Samples.open(folder, header) if is_first() else None)
    done = _shared({key: sample.seconds for key, sample in samples.found.items()} if samples else {}, control)
    place = Place(dist.get_world_size(), device.type, header["memory_bytes"])
    todo = work_list(place, effort)
    environment["points"], environment["continued"] = len(todo), len(done)

    def measured(index: int, works: list[Work]) -> None:
        work = works[index]
        if show:
            show(work.point.key, index, len(works))
        sample = _sample(bench, work, works[:index], done)
        done[work.pass_index, work.point.key] = sample.seconds
        if samples:
            samples.append(replace(sample, more=sample.more | {"at_s": round(time.monotonic() - began, 3)}))

    for index, work in enumerate(todo):
        if (work.pass_index, work.point.key) not in done:
            measured(index, todo)
    again = disagreeing(place, effort, done)
    for index in range(len(again)):
        if bench.slowest([time.monotonic() - began])[0] < effort.again_s:
            measured(index, again)
    bench.release()
    environment["load_at_end"] = os.getloadavg()
    return (samples, environment) if samples else None


def _sample(bench: Bench, work: Work, before: list[Work], done: dict[tuple[int, str], tuple[float, ...]]) -> Sample:
    """The point measured now, or left out where its curve has become too slow; decided alike on every rank."""
    point = work.point
    if _is_left_out(bench.effort, work, before, done):
        return Sample(work.pass_index, point.key, ())
    if point.kind == "pair":
        return _pair_sample(bench, work)
    if point.kind == "overlap":
        found = shares(bench)
        return Sample(work.pass_index, point.key, (1.0,), {"shares": found})
    if point.kind == "launch":
        return Sample(work.pass_index, point.key, tuple(_launch_rounds_s(bench)))
    if point.kind == "chain":
        rounds, compute_s = chained(bench, point)
        return Sample(work.pass_index, point.key, tuple(rounds), {"compute_s": compute_s})
    call = _affordable(bench, point)
    if call is None:
        return Sample(work.pass_index, point.key, (), {OUT_OF_MEMORY: True})
    if bench.on_cpu and point.kind in COMPUTE:
        seconds, wall = bench.cpu_rounds_s(call)
        return Sample(work.pass_index, point.key, tuple(seconds), {"wall_s": wall})
    if point.kind in COLLECTIVES:
        return _collective_sample(bench, work, call)
    return Sample(work.pass_index, point.key, tuple(bench.rounds_s(call, key=point.key)))


def _affordable(bench: Bench, point: Point) -> Call | None:
    """The point's call, made, and called where it is this rank's alone; None on every rank if one lacks the memory.

    Such a point has no price, nor have larger ones of its curve; the profile goes on.
    """
    call, lacks = None, False
    try:
        call = call_of(bench, point)
        if point.kind not in COLLECTIVES:
            call()
        bench.wait()
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        lacks = True
    if bench.slowest([float(lacks)])[0] == 0.0:
        return call
    del call
    if not bench.on_cpu:
        torch.accelerator.memory.empty_cache()
    return None


def lacks_memory(error: BaseException) -> bool:
    """Whether an allocator says no: an accelerator's, the CPU's (a plain RuntimeError), or Python's."""
    refused = ("can't allocate memory", "out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in refused)


def _collective_sample(bench: Bench, work: Work, call: Call) -> Sample:
    """Seconds of one collective, of those that a call has in flight."""
    key, count = work.point.key, bench.in_flight
    if not bench.is_beside_others:
        return Sample(work.pass_index, key, tuple(s / count for s in bench.rounds_s(call, key=key)))
    seconds, wall = bench.rounds_beside_s(call, key)
    return Sample(work.pass_index, key, tuple(s / count for s in seconds), {"wall_s": [s / count for s in wall]})


def _launch_rounds_s(bench: Bench) -> list[float]:
    """Seconds of an operator besides its work, in each round."""
    run = blocks(bench.device)
    if not bench.on_cpu:
        return [seconds / PRICED for seconds in bench.rounds_s(run)]
    run()
    crowd = ranks_a_core(bench.ranks_here)
    rounds = []
    for _ in range(bench.effort.rounds):
        dist.barrier(group=bench.control)
        rounds.append(crowd * cold_cpu_s(run) / PRICED)
    return bench.slowest(rounds)


def _is_left_out(
    effort: Effort, work: Work, before: list[Work], done: dict[tuple[int, str], tuple[float, ...]]
) -> bool:
    """A later pass leaves out what the first did; the first leaves out what follows a call longer than `longest_s`."""
    if work.pass_index > 0:  # what is measured once more was measured before
        return not done[0, work.point.key]
    if not work.point.curve or not before or before[-1].point.curve != work.point.curve:
        return False
    last = done[before[-1].pass_index, before[-1].point.key]
    return not last or min(last) > effort.longest_s


def _pair_sample(bench: Bench, work: Work) -> Sample:
    """Seconds of one message, one way, between the two ranks of each pair, all pairs of the round at once."""
    call = message(bench, work.point)
    call()
    (once,) = bench.slowest([bench.round_s(call, 1)])
    count = max(1, min(100, int(bench.effort.budget_s / SHORT_ROUNDS / max(once, 1e-7))))
    own = min(bench.round_s(call, count) for _ in range(SHORT_ROUNDS)) / 2
    everyone: list[float] = _gathered(own, bench)
    pairs = [[a, b, max(everyone[a], everyone[b])] for a, b in bench.pairs(work.point.shape[0])]
    return Sample(work.pass_index, work.point.key, tuple(s for _, _, s in pairs), {"pairs": pairs})


def _gathered(value: float, bench: Bench) -> list[float]:
    everyone = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor([value], dtype=torch.float64), group=bench.control)
    return [float(v) for v in everyone]


def _shared(value: Any, control: dist.ProcessGroup) -> Any:
    """Rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, group=control, group_src=0)
    return box[0]


def _described(bench: Bench, hosts: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What samples belong to (must be the same to go on with them), and what else is worth knowing. Collective."""
    backend = dist.get_backend() if bench.on_cpu else dist.get_backend_config().split(f"{bench.device.type}:")[-1]
    header = {
        "world": dist.get_world_size(),
        "hosts": hosts,
        "device": bench.device.type,
        "device_name": _device_name(bench.device),
        "backend": backend.split(",")[0],
        "memory_bytes": _shared(_memory_bytes(bench.device, bench.ranks_here), bench.control),
        "effort": bench.effort.name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    told = ("NCCL_", "HCCL_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    environment = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": usable_cores(),
        "load_at_start": os.getloadavg(),
        "effort": asdict(bench.effort),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(told)},
    }
    return header, environment


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device))


def _memory_bytes(device: torch.device, ranks_here: int) -> int:
    """Of one rank, rounded so that a second look at the same machine says the same."""
    if device.type == "cpu":
        return memory_bytes() // ranks_here
    _, total = torch.accelerator.get_memory_info(device)
    return int(total)


@contextmanager
def progress() -> Iterator[Show | None]:
    """A bar on rank 0's terminal; None elsewhere."""
    from rich.console import Console
    from rich.progress import Progress, TimeRemainingColumn

    console = Console(stderr=True)
    if int(os.environ.get("RANK", "0")) or not console.is_terminal:
        yield None
        return
    with Progress(*Progress.get_default_columns()[:3], TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("profile", total=None)
        last = time.monotonic()

        def show(what: str, index: int, count: int) -> None:
            nonlocal last
            if time.monotonic() - last > 0.1:
                last = time.monotonic()
                bar.update(task, description=what, completed=index, total=count)

        yield show


def end() -> None:
    """Leaves the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
