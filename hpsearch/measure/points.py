"""What a profile measures: one `Point` a figure, listed before anything runs. No torch.

A point's key names it in the file of samples, so that a profile that was interrupted goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
MATMUL_SHAPES = ((64, 64), (256, 256), (256, 1024), (1024, 256), (768, 768))
"""(n, k) of a rank of this machine's processor."""
LARGE_MATMUL_SHAPES = ((128, 1024), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096), (8192, 8192))
"""(n, k) of an accelerator: attention heads and MLPs of models of 1 to 400 billion parameters, cut by tp."""
STREAMS = ("add", "copy", "sum")
"""Memory-bound kernels: two tensors in and one out, one in and one out, one in."""
COMPUTE = ("launch", *STREAMS, "matmul", "attention")
"""Kinds that one rank does alone."""
CHAIN_BYTES = 2**19
"""Of the all-reduce in a chain, among the sizes of every effort."""
PAIR_BYTES = (512, 2**20)
"""A message that shows latency and one that shows bandwidth."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    name: str
    sizes: tuple[int, ...]
    """Bytes of collectives, growing; a curve ends early where one call takes longer than `longest_s`."""
    streams: tuple[int, ...]
    """Bytes that a memory-bound kernel moves, growing."""
    rows: tuple[int, ...]
    """m of matmuls."""
    longest_s: float
    budget_s: float
    """Seconds spent on the rounds of one point, roughly."""
    compute_s: float
    """The same for what one rank of a processor does alone, which is timed in CPU seconds and repeats better."""
    rounds: int
    passes: int
    """Times that everything is measured; what changes between passes is the repeatability."""
    more_passes: int
    """Of collectives alone, which other programs disturb most: they should be seen at several times."""
    again_s: float
    """Until when, in seconds since the start, points on which two passes disagree are measured once more."""


QUICK = Effort(
    "quick",
    sizes=tuple(512 * 4**i for i in range(8)),
    streams=tuple(4096 * 8**i for i in range(5)),
    rows=(16, 64, 256, 1024),
    longest_s=0.06,
    budget_s=0.03,
    compute_s=0.009,
    rounds=3,
    passes=2,
    more_passes=1,
    again_s=38.0,
)
FULL = Effort(
    "full",
    sizes=tuple(512 * 2**i for i in range(24)),
    streams=tuple(2048 * 2**i for i in range(19)),
    rows=(1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    longest_s=2.0,
    budget_s=0.2,
    compute_s=0.2,
    rounds=5,
    passes=2,
    more_passes=1,
    again_s=3600.0,
)


@dataclass(frozen=True)
class Point:
    """One thing to measure."""

    kind: str
    """A collective, or pair, matmul, attention, a stream, launch, to_device, to_host, overlap, chain."""
    shape: tuple[int, ...] = ()
    """collective, chain: (group size, stride in ranks); pair: (round,); matmul: (m, n, k); attention: (batch, heads,
    tokens, head dim)."""
    dtype: str = ""
    nbytes: int = 0
    """By the convention of `hpsearch.layout.redistribute`; broadcast and pair: bytes of the message."""

    @property
    def key(self) -> str:
        parts = [self.kind, "x".join(map(str, self.shape)), self.dtype, f"{self.nbytes}B" if self.nbytes else ""]
        return " ".join(part for part in parts if part)

    @property
    def curve(self) -> str:
        """What this point shares with the points that differ only in bytes; empty for points of no curve."""
        return " ".join([self.kind, "x".join(map(str, self.shape)), self.dtype]) if self.nbytes else ""


@dataclass(frozen=True)
class Place:
    """The ranks to be measured, as far as the list of points depends on them."""

    world: int
    device: str
    """`cpu`, `cuda`, `npu`, …"""
    memory_bytes: int
    """Of one rank."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float32", "bfloat16", "float64") if self.device == "cpu" else ("bfloat16", "float16", "float32")

    @property
    def matmul_shapes(self) -> tuple[tuple[int, int], ...]:
        return MATMUL_SHAPES if self.device == "cpu" else LARGE_MATMUL_SHAPES


def group_shapes(world: int) -> tuple[tuple[int, int], ...]:
    """(size, stride) of every group that an axis of a mesh over `world` ranks can have, one rank left out.

    The ranks inside an axis and those outside it make whole meshes, so size times stride divides the world.
    """
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    return tuple((size, stride) for size in divisors[1:] for stride in divisors if world % (size * stride) == 0)


def pair_rounds(world: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Every pair of ranks once, in rounds of pairs that share no rank (the circle method of tournaments)."""
    seats = list(range(world)) + ([-1] if world % 2 else [])
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(tuple(sorted((min(p), max(p)) for p in pairs if -1 not in p)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def points(place: Place, effort: Effort) -> Iterator[Point]:
    """Every point in the order in which it is measured; curves by growing bytes."""
    most_bytes = place.memory_bytes // 16
    if place.world > 1:
        for index in range(len(pair_rounds(place.world))):
            yield from (Point("pair", (index,), nbytes=nbytes) for nbytes in PAIR_BYTES)
    yield Point("launch")
    for kind in STREAMS:
        for dtype in place.dtypes[:2]:
            yield from (Point(kind, dtype=dtype, nbytes=n) for n in effort.streams if n <= most_bytes)
    for dtype in place.dtypes:
        shapes = place.matmul_shapes if dtype in place.dtypes[:2] or effort.name == "full" else place.matmul_shapes[1:3]
        for n, k in shapes:
            yield from (Point("matmul", (m, n, k), dtype) for m in effort.rows)
    for dtype in place.dtypes[:2]:
        yield from (Point("attention", shape, dtype) for shape in _attention_shapes(place, effort))
    if place.device != "cpu":
        for kind in ("to_device", "to_host"):
            yield from (Point(kind, nbytes=n) for n in effort.sizes if n <= most_bytes)
    for shape in group_shapes(place.world):
        for kind in COLLECTIVES:
            sizes = [n for n in effort.sizes if n >= 4 * shape[0] and n <= most_bytes]
            yield from (Point(kind, shape, nbytes=n) for n in sizes)
        yield Point("chain", shape)
    if place.world > 1:
        yield Point("overlap")


def _attention_shapes(place: Place, effort: Effort) -> tuple[tuple[int, int, int, int], ...]:
    """(batch, heads, tokens, head dim)."""
    if place.device == "cpu":
        return ((4, 8, 64, 32), (1, 8, 256, 64))
    long = ((1, 16, 8192, 128),) if effort.name == "full" else ()
    return ((4, 16, 1024, 128), (1, 16, 4096, 128), *long)
