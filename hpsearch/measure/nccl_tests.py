"""Curves from the output of nccl-tests (https://github.com/NVIDIA/nccl-tests), and of tests that print alike (rccl).

A row is size, count, type, redop, root, then time in us, algbw, busbw, #wrong twice: out of place and in place. Older
ones print `error` for `#wrong`, and columns a collective has no use for are left out or -1; so the last eight columns
are read. By doc/PERFORMANCE.md there, `size` is

    all_reduce, broadcast, all_to_all   bytes of the buffer of one rank
    all_gather                          bytes of the gathered buffer
    reduce_scatter                      bytes of the input buffer

which is the convention of `hpsearch.layout.redistribute`, and algbw = size / time, busbw = algbw times 2(n-1)/n for
all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all, 1 for broadcast. Seconds are taken from `time`; algbw
and busbw must agree with it, or the columns, or the number of ranks, are not what they seem.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpsearch.cluster.curve import bus_factor
from hpsearch.errors import ClusterError
from hpsearch.measure.figures import CurveFigure

KINDS = {
    "all_reduce": "all_reduce", "allreduce": "all_reduce", "all_gather": "all_gather", "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "all_to_all": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip
TOLERANCE = 0.02
"""Times are printed with four digits, rates with two decimals; slow rates are let off by `_ROUNDING`."""
_ROUNDING_GB_S = 0.006
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b(?:.*\bon\s+(\S+))?", re.MULTILINE)
_PERF = re.compile(r"\b(\w+?)_perf\b")


@dataclass(frozen=True)
class _Row:
    nbytes: int
    time_us: float
    algbw: float
    busbw: float


def read_nccl_tests(
    text: str, file: str, *, kind: str = "", ranks: int | None = None, in_place: bool = False
) -> CurveFigure:
    """The curve in one output, out of place unless `in_place`.

    kind: by default what the text names (`all_reduce_perf`), or the file's name.
    ranks: by default the number of `# Rank` lines.
    ClusterError where kind or ranks are not said and do not follow, and where time, algbw and busbw contradict.
    """
    rows = _rows(text, file, in_place)
    found = len({rank for rank, _ in _RANK.findall(text)})
    size = ranks or found
    if size < 2:
        raise ClusterError(
            file, f"expected at least two ranks, but found {found} lines '#  Rank …'", "Say how many with --group."
        )
    name = _kind(text, kind, file)
    for row in rows:
        _check(row, _factor(name, size), file, name, size)
    rows = [row for index, row in enumerate(rows) if index == 0 or row.nbytes > rows[index - 1].nbytes]
    return CurveFigure(name, size, 1, tuple(r.nbytes for r in rows), tuple(r.time_us * 1e-6 for r in rows))


def hosts_of(text: str) -> tuple[str, ...]:
    """The host of each rank, as the heading tells; empty where it does not."""
    return tuple(host for _, host in sorted(_RANK.findall(text), key=lambda match: int(match[0])) if host)


def _factor(kind: str, size: int) -> float:
    return 1.0 if kind == "broadcast" else bus_factor(kind, size)


def _kind(text: str, given: str, file: str) -> str:
    if given:
        if given not in KINDS:
            raise ClusterError(f"collective {given!r}", f"expected one of {', '.join(sorted(set(KINDS.values())))}", "")
        return KINDS[given]
    named = [KINDS[word] for word in _PERF.findall(text) if word in KINDS]
    named += [KINDS[word] for word in re.findall(r"[a-z_]+", file.lower().replace("_perf", "")) if word in KINDS]
    if not named:
        raise ClusterError(
            file, "expected the name of the test (all_reduce_perf, …) in the output or the file's name, but found none",
            "Say it with --collective.",
        )  # fmt: skip
    return named[0]


def _rows(text: str, file: str, in_place: bool) -> list[_Row]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if len(words) < 10 or not words[0].isdigit():
            continue
        half = words[-4:] if in_place else words[-8:-4]
        try:
            row = _Row(int(words[0]), float(half[0]), float(half[1]), float(half[2]))
        except ValueError as error:
            raise ClusterError(f"{file}, line {number}", f"expected numbers, but {error}", "") from error
        if row.nbytes and row.time_us > 0:
            found.append(row)
    if not found:
        raise ClusterError(file, "expected a table of nccl-tests (size, …, time, algbw, busbw), but found no row", "")
    return sorted(found, key=lambda row: row.nbytes)


def _check(row: _Row, factor: float, file: str, kind: str, size: int) -> None:
    """The three columns say one thing: algbw = size / time, busbw = algbw times the factor of the collective."""
    algbw = row.nbytes / row.time_us / 1e3
    if abs(row.algbw - algbw) > TOLERANCE * algbw + _ROUNDING_GB_S:
        raise ClusterError(
            f"{file}, size {row.nbytes}",
            f"expected algbw {algbw:.2f} GB/s of {row.nbytes} bytes in {row.time_us:g} us, but found {row.algbw:.2f}",
            "Is time in us, and the fourth column from the right of its half?",
        )
    if abs(row.busbw - factor * row.algbw) > TOLERANCE * row.busbw + _ROUNDING_GB_S:
        raise ClusterError(
            f"{file}, size {row.nbytes}",
            f"expected busbw {factor * row.algbw:.2f} GB/s, {factor:g} times algbw, for {kind} over {size} ranks, but "
            f"found {row.busbw:.2f}",
            "Is the number of ranks, or the collective, another one?",
        )
