"""Raw samples: JSON lines that only ever grow, so that a profile that was interrupted goes on where it stopped.

The first line says what was measured with which ranks and versions; each other line is one point in one pass. A line
counts once its newline is on the disk: half a line at the end is what a crash leaves, and is cut off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpsearch.errors import ClusterError
from hpsearch.files import atomic_write

FILE_NAME = "samples.jsonl"
SCHEMA = "hpsearch.samples/1"
OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True)
class Sample:
    """One point in one pass."""

    pass_index: int
    key: str
    seconds: tuple[float, ...]
    """Of each round, on the slowest rank; empty where the point was left out: its curve had become too slow, or a rank
    has too little memory for it (`more` says so)."""
    more: dict[str, Any] = field(default_factory=dict)
    """What some kinds add: `pairs`, [first, second, seconds] of each pair; `shares` of overlap and contention; `wall_s`
    where `seconds` are CPU seconds, or at most; `compute_s` of a chain, the compute of a round alone; `out_of_memory`
    where a rank had too little. And `at_s`, seconds since the profile was started."""

    @property
    def is_short_of_memory(self) -> bool:
        return bool(self.more.get(OUT_OF_MEMORY))

    @property
    def best_s(self) -> float:
        return min(self.seconds)


@dataclass
class Samples:
    """The samples of one folder; grows while ranks measure."""

    path: Path
    header: dict[str, Any]
    found: dict[tuple[int, str], Sample] = field(default_factory=dict)

    @staticmethod
    def open(folder: Path, header: Mapping[str, Any]) -> Samples:
        """The samples in `folder`, to be continued; started when there are none.

        ClusterError when they are of other ranks, another machine or other versions than `header` says.
        """
        path = folder / FILE_NAME
        wanted = {"schema": SCHEMA, **header}
        if not path.is_file() or not whole_lines(path.read_bytes()):
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, (json.dumps(wanted) + "\n").encode())
            return Samples(path, wanted)
        found = Samples.read(folder)
        for name, value in wanted.items():
            if found.header.get(name) != value:
                raise ClusterError(
                    f"samples {path}",
                    f"expected those of {name} {value!r}, to go on with them, but found {found.header.get(name)!r}",
                    "Name another folder, or delete this one.",
                )
        whole = b"".join(whole_lines(path.read_bytes()))
        if whole != path.read_bytes():
            atomic_write(path, whole)
        return found

    @staticmethod
    def read(folder: Path) -> Samples:
        """The samples in `folder`; half a line at the end is passed over. ClusterError when they cannot be read."""
        path = folder / FILE_NAME
        if not path.is_file():
            raise ClusterError(f"profile {folder}", f"expected {FILE_NAME}, but found none", "Measure it first.")
        lines = whole_lines(path.read_bytes())
        try:
            header, *rest = [json.loads(line) for line in lines]
            samples = Samples(path, dict(header))
            for row in rest:
                more = {k: v for k, v in row.items() if k not in ("pass", "point", "seconds")}
                sample = Sample(int(row["pass"]), str(row["point"]), tuple(map(float, row["seconds"])), more)
                samples.found[sample.pass_index, sample.key] = sample
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"samples {path}", f"expected JSON lines, but {error}", "Measure again.") from error
        if header.get("schema") != SCHEMA:
            raise ClusterError(f"samples {path}", f"expected schema {SCHEMA}, but found {header.get('schema')}", "")
        return samples

    def append(self, sample: Sample) -> None:
        """Keeps one sample: one write of one line, which has reached the disk on return."""
        row = {"pass": sample.pass_index, "point": sample.key, "seconds": list(sample.seconds), **sample.more}
        with self.path.open("ab", buffering=0) as stream:
            stream.write((json.dumps(row) + "\n").encode())
            os.fsync(stream.fileno())
        self.found[sample.pass_index, sample.key] = sample

    def passes(self, key: str) -> list[Sample]:
        """The measured samples of a point, by pass."""
        return [s for (_, name), s in sorted(self.found.items()) if name == key and s.seconds]

    def best(self) -> dict[str, float]:
        """Seconds of every point: the best round of all passes, since what else a machine does can only add."""
        found: dict[str, float] = {}
        for sample in self.found.values():
            if sample.seconds:
                found[sample.key] = min(sample.best_s, found.get(sample.key, sample.best_s))
        return found


def whole_lines(content: bytes) -> list[bytes]:
    """The lines that end with a newline."""
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
