"""The call behind each point, on this rank's device: the same code for CPU and every accelerator, any backend."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpsearch.errors import InternalError
from hpsearch.measure.points import Effort, Point, pair_rounds

Call = Callable[[], object]
SHORT_ROUNDS = 6
"""Of a call that several ranks do together."""
RING_BYTES = 16 * 2**20
DEVICE_RING_BYTES = 512 * 2**20
"""More than the caches of a core with its share of a processor's last level, and those of an accelerator."""
MOST_SETS = 96
"""Of operands, of which three take turns in form."""
IN_FLIGHT = 4
"""Collectives that are issued before the first is waited for, on a processor, where waiting holds up the program: a
step issues the gathers and reductions of a block together. An accelerator's stream has them one behind the other."""
MOST_CALLS = 20_000
"""In one round."""


def usable_cores() -> float:
    """Cores that this process may use: those it may run on, and no more than its container is given."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    limit = Path("/sys/fs/cgroup/cpu.max")
    words = limit.read_text().split() if limit.is_file() else []
    return min(cores, int(words[0]) / int(words[1])) if len(words) == 2 and words[0].isdigit() else cores


def ranks_a_core(ranks_here: int) -> float:
    """How many ranks share a core when each has its threads; at least 1."""
    return max(1.0, ranks_here * torch.get_num_threads() / usable_cores())


@dataclass
class Bench:
    """This rank with what it needs to measure: its device, a group for agreeing, the groups of the shape at hand."""

    device: torch.device
    effort: Effort
    control: dist.ProcessGroup
    """Over CPU tensors, whatever the backend of the device."""
    ranks_here: int = 1
    """Ranks on this host."""
    _shape: tuple[int, ...] = ()
    _group: Any = None
    _counts: dict[str, tuple[int, float]] = field(default_factory=dict)
    _pairs: tuple[tuple[tuple[int, int], ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        self._pairs = pair_rounds(dist.get_world_size())

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def wait(self) -> None:
        """Until all that this rank issued has run."""
        if not self.on_cpu:
            torch.accelerator.synchronize()

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks; everybody waits for everybody."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return [float(value) for value in tensor]

    def round_s(self, call: Call, count: int) -> float:
        """Seconds of one of `count` calls in a row on this rank, after all ranks met."""
        return self._timed(call, count)[0]

    def _timed(self, call: Call, count: int) -> tuple[float, float]:
        """(Seconds on the wall, CPU seconds of this process) of one of `count` calls in a row, after all ranks met."""
        self.wait()
        dist.barrier(group=self.control)
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - start) / count, (time.process_time() - cpu) / count

    def rounds_s(self, call: Call, budget_s: float | None = None, key: str = "") -> list[float]:
        """Seconds of one call in each round, on the slowest rank; as many calls a round on every rank.

        Many short rounds: what else a machine does spoils a long round for sure, and leaves some short ones alone.
        `key`: what is measured, where it will be again: how many calls make a round is then found out once.
        """
        return self.slowest([wall for wall, _ in self._short_rounds(call, budget_s, key)])

    def rounds_beside_s(self, call: Call, key: str) -> tuple[list[float], list[float]]:
        """(Seconds of a call, seconds on the wall) in each round, of a call that ranks which share a core make.

        Here all ranks call at once, and each waits for the others' turns on the cores. In a step they go their own
        ways: while one waits, another computes. A call takes from a step its CPU seconds times the ranks that share a
        core, and no more than it takes on the wall; what waiting itself costs is an arrival (`contention.chained`).
        """
        return self.beside_s(self._short_rounds(call, None, key))

    def chain_s(self, call: Call, count: int, size: int) -> list[float]:
        """Seconds of one of `count` calls in each of several chains, of a call in which groups of `size` ranks wait: on
        the wall, or like `rounds_beside_s` where other ranks of the host have a core meanwhile."""
        timed = [self._timed(call, count) for _ in range(self.effort.rounds)]
        if self.is_beside_others and size < self.ranks_here:
            return self.beside_s(timed)[0]
        return self.slowest([wall for wall, _ in timed])

    def beside_s(self, rounds: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
        """`rounds_beside_s` of (seconds on the wall, CPU seconds) of this rank."""
        wall, own = zip(*rounds, strict=True)
        crowd = ranks_a_core(self.ranks_here)
        found = self.slowest([*wall, *(crowd * seconds for seconds in own)])
        slowest = found[: len(wall)]
        return [min(pair) for pair in zip(slowest, found[len(wall) :], strict=True)], slowest

    @property
    def is_beside_others(self) -> bool:
        """Whether another rank has a rank's core while it waits."""
        return self.on_cpu and ranks_a_core(self.ranks_here) > 1

    @property
    def in_flight(self) -> int:
        """Collectives of one `collective` call."""
        return IN_FLIGHT if self.on_cpu else 1

    def _short_rounds(self, call: Call, budget_s: float | None, key: str) -> list[tuple[float, float]]:
        """(Seconds on the wall, CPU seconds) of one call on this rank in each round."""
        rounds, budget_s = SHORT_ROUNDS, self.effort.budget_s if budget_s is None else budget_s
        call()
        if key not in self._counts:
            self._counts[key] = self._calls_for(call, budget_s / rounds)
        count, once = self._counts[key] if key else self._counts.pop(key)
        rounds = max(2, min(rounds, round(budget_s / (once * count))))
        return [self._timed(call, count) for _ in range(rounds)]

    def cpu_rounds_s(self, call: Call, budget_s: float | None = None) -> tuple[list[float], list[float]]:
        """(Seconds of a call, seconds on the wall) in each round, of a call that computes on processor cores.

        CPU seconds, to which other programs add nothing, times the ranks that share a core; all ranks compute at once.
        """
        call()
        budget_s = self.effort.compute_s if budget_s is None else budget_s
        count, _ = self._calls_for(call, budget_s / self.effort.rounds)
        wall, own = zip(*(self._timed(call, count) for _ in range(self.effort.rounds)), strict=True)
        crowd = ranks_a_core(self.ranks_here)
        found = self.slowest([crowd * seconds / torch.get_num_threads() for seconds in own] + list(wall))
        return found[: len(own)], found[len(own) :]

    def _calls_for(self, call: Call, round_s: float) -> tuple[int, float]:
        """(Calls that take about `round_s`, seconds of one), the same on every rank.

        Grown step by step: a single call is over before the other ranks have begun theirs, and tells too little.
        """
        count = 1
        while True:
            (once,) = self.slowest([self.round_s(call, count)])
            if once * count > 0.5 * round_s or count >= MOST_CALLS:
                return count, once
            count = min(MOST_CALLS, max(2 * count, round(0.8 * round_s / max(once, 1e-7))))

    def group(self, shape: tuple[int, ...]) -> dist.ProcessGroup:
        """This rank's group when the world is cut into groups of (size, stride), as a mesh axis cuts it. Collective.

        Groups of one shape live at a time: communicators hold device memory.
        """
        if shape != self._shape:
            self.release()
            size, stride = shape
            ranks = torch.arange(dist.get_world_size()).view(-1, size, stride).transpose(1, 2).reshape(-1, size)
            self._group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
            self._shape = shape
        return self._group

    def release(self) -> None:
        """Lets the groups at hand go. Collective."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._shape, self._group = (), None

    def partner(self, round_index: int) -> int | None:
        """Whom this rank exchanges messages with in a round of pairs; None when it sits out."""
        rank = dist.get_rank()
        return next((a + b - rank for a, b in self._pairs[round_index] if rank in (a, b)), None)

    def pairs(self, round_index: int) -> tuple[tuple[int, int], ...]:
        return self._pairs[round_index]


def call_of(bench: Bench, point: Point) -> Call:
    """What is timed for a point of one call; InternalError for a kind that has a measurement of its own."""
    if point.kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        return collective(bench, point)
    makers = {
        "add": stream, "copy": stream, "sum": stream, "matmul": matmul, "attention": attention,
        "to_device": host_copy, "to_host": host_copy,
    }  # fmt: skip
    if point.kind not in makers:
        raise InternalError(f"point {point.key}", f"expected one of {', '.join(makers)}")
    return makers[point.kind](bench, point)


def collective(bench: Bench, point: Point) -> Call:
    """`in_flight` collectives of `nbytes` (the convention of `hpsearch.layout.redistribute`) in this rank's group,
    issued and waited for as emitted programs do."""
    group, size = bench.group(point.shape), point.shape[0]
    elements = max(point.nbytes // 4 // size, 1)
    name, c10d, each = group.group_name, torch.ops._c10d_functional, [elements] * size
    issue: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "all_gather": lambda small: c10d.all_gather_into_tensor(small, size, name),
        "reduce_scatter": lambda large: c10d.reduce_scatter_tensor(large, "sum", size, name),
        "all_reduce": lambda large: c10d.all_reduce(large, "sum", name),
        "all_to_all": lambda large: c10d.all_to_all_single(large, each, each, name),
        "broadcast": lambda large: c10d.broadcast(large, 0, name),
    }
    own = elements if point.kind == "all_gather" else elements * size
    start = Ring(bench, lambda: (torch.ones(own, device=bench.device),), issue[point.kind])

    def several() -> None:
        for made in [start() for _ in range(bench.in_flight)]:
            c10d.wait_tensor(made)

    return several


def message(bench: Bench, point: Point) -> Call:
    """A message to the partner and one back; nothing for a rank that sits out."""
    partner = bench.partner(point.shape[0])
    if partner is None:
        return lambda: None
    sent = torch.ones(max(1, point.nbytes // 4), device=bench.device)
    received = torch.empty_like(sent)
    first = dist.get_rank() < partner

    def there_and_back() -> None:
        if first:
            dist.send(sent, partner)
            dist.recv(received, partner)
        else:
            dist.recv(received, partner)
            dist.send(sent, partner)

    return there_and_back


def _dtype(point: Point) -> torch.dtype:
    return getattr(torch, point.dtype)


class Ring:
    """Calls that take their operands in turn out of more memory than caches hold, and keep as many results: in a step
    an operator reads what was written long ago, and writes where nothing was read lately."""

    def __init__(self, bench: Bench, make: Callable[[], tuple[torch.Tensor, ...]], run: Callable[..., object]) -> None:
        first = make()
        nbytes = sum(t.numel() * t.element_size() for t in first)
        wanted = RING_BYTES if bench.on_cpu else DEVICE_RING_BYTES
        count = max(3, min(MOST_SETS, wanted // max(nbytes, 1))) // 3 * 3
        self.sets = [first, *(make() for _ in range(count - 1))]
        self.results: list[object] = [None] * count
        self.run, self.turn = run, 0

    def __call__(self) -> Any:
        self.turn = (self.turn + 1) % len(self.sets)
        self.results[self.turn] = self.run(*self.sets[self.turn])
        return self.results[self.turn]


def stream(bench: Bench, point: Point) -> Call:
    """A kernel that moves `nbytes` in all, its result in memory of its own, as in a training step."""
    dtype = _dtype(point)
    count = {"add": 2, "copy": 1, "sum": 1}[point.kind]
    tensors = {"add": 3, "copy": 2, "sum": 1}[point.kind]
    elements = max(1, point.nbytes // tensors // dtype.itemsize)
    run = {"add": torch.add, "copy": torch.clone, "sum": torch.sum}[point.kind]
    return Ring(bench, lambda: tuple(torch.ones(elements, dtype=dtype, device=bench.device) for _ in range(count)), run)


def matmul(bench: Bench, point: Point) -> Call:
    """[m, k] @ [k, n]; a step has as many with the right factor transposed (forward), with none (gradients of inputs)
    and with the left one (gradients of weights), so the three take turns."""
    m, n, k = point.shape
    forms = iter(range(MOST_SETS * 3))

    def make() -> tuple[torch.Tensor, ...]:
        form = next(forms) % 3
        left = torch.ones((k, m) if form == 2 else (m, k), dtype=_dtype(point), device=bench.device)
        right = torch.ones((n, k) if form == 0 else (k, n), dtype=_dtype(point), device=bench.device)
        return left.t() if form == 2 else left, right.t() if form == 0 else right

    return Ring(bench, make, torch.mm)


def attention(bench: Bench, point: Point) -> Call:
    """Forward and backward of causal attention."""
    q, k, v = (torch.randn(point.shape, dtype=_dtype(point), device=bench.device, requires_grad=True) for _ in range(3))
    given = torch.ones(point.shape, dtype=_dtype(point), device=bench.device)

    def both_passes() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), given)

    return both_passes


def host_copy(bench: Bench, point: Point) -> Call:
    """Between the device and page-locked host memory."""
    on_host = torch.ones(max(1, point.nbytes), dtype=torch.uint8).pin_memory()
    on_device = on_host.to(bench.device)
    if point.kind == "to_device":
        return lambda: on_device.copy_(on_host, non_blocking=True)
    return lambda: on_host.copy_(on_device, non_blocking=True)
