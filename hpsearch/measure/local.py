"""This machine as a cluster: gloo ranks are started, measured together, and the description is kept for next time."""

from __future__ import annotations

import datetime
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress

from hpsearch.cluster import LOCAL, Cluster
from hpsearch.cluster.find import is_whole, local_file, seal
from hpsearch.cluster.read import read
from hpsearch.cluster.write import write
from hpsearch.errors import ClusterError
from hpsearch.files import atomic_write
from hpsearch.measure.described import describe_local

RANK_PROGRAM = Path(__file__).with_name("rank.py")
MOST_RANKS = 64
TIMEOUT_S = 180
RESERVE = 0.2
"""Share of the machine's memory that is left to everything else."""


def load_cluster(name: str | Path, *, devices: int) -> Cluster:
    """`Cluster.load`, except that `local` is measured first where that was not done yet."""
    return local_cluster(devices) if os.fspath(name) == LOCAL else Cluster.load(name, devices=devices)


def local_cluster(devices: int, *, timeout_s: int = TIMEOUT_S, refresh: bool = False) -> Cluster:
    """This machine with `devices` gloo ranks, from the cache or measured now (some ten seconds).

    ClusterError: a device count out of range, a rank that failed or hung (all ranks are ended), figures that cannot
    be believed. The cache is $HPSEARCH_CACHE or ~/.cache/hpsearch.
    """
    if not 1 <= devices <= MOST_RANKS:
        raise ClusterError(
            "cluster 'local'", f"expected 1 to {MOST_RANKS} devices, but got {devices}", "Each one is a process here."
        )
    path = local_file(devices)
    if refresh or not is_whole(path):
        measured = measure(devices, timeout_s)
        when = datetime.date.today().isoformat()
        text = seal(write(describe_local(devices, memory_bytes() // devices, measured, when)))
        read(text, "the measurement of this machine")
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text.encode())
    return Cluster.load(LOCAL, devices=devices)


def memory_bytes() -> int:
    """Memory that ranks may fill together: the machine's or the container's, less a reserve."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(limit)
        if path.is_file() and path.read_text().strip().isdigit():
            total = min(total, int(path.read_text()))
    return int(total * (1 - RESERVE))


def measure(devices: int, timeout_s: int) -> dict[str, Any]:
    """The figures that rank 0 prints; every rank has ended when this returns or raises."""
    with tempfile.TemporaryDirectory(prefix="hpsearch-measure-") as folder, _ranks(devices, timeout_s, folder) as ranks:
        return _listen(ranks, timeout_s, Path(folder))


def rank_command(rank: int, devices: int, timeout_s: int, folder: str) -> list[str]:
    """The command line of one rank."""
    given = {"--rank": rank, "--world": devices, "--timeout": timeout_s, "--store": f"{folder}/store"}
    return [sys.executable, "-P", str(RANK_PROGRAM), *(str(word) for pair in given.items() for word in pair)]


@contextmanager
def _ranks(devices: int, timeout_s: int, folder: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The started ranks; all of them are gone at the end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(devices):
            with open(f"{folder}/stderr-{rank}", "w") as errors:
                ranks.append(
                    subprocess.Popen(
                        rank_command(rank, devices, timeout_s, folder), text=True, env=environment,
                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        stderr=errors,
                    )
                )  # fmt: skip
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def _listen(ranks: list[subprocess.Popen[str]], timeout_s: int, folder: Path) -> dict[str, Any]:
    """Follows rank 0's lines until the result; a rank that fails or a deadline that passes ends the measurement."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert ranks[0].stdout is not None
    pump = threading.Thread(target=_pump, args=(ranks[0].stdout, lines), daemon=True)
    pump.start()
    step, deadline = "starting", time.monotonic() + timeout_s
    with _bar(len(ranks)) as show:
        while True:
            try:
                message = json.loads(lines.get(timeout=0.1))
            except queue.Empty:
                if all(process.poll() == 0 for process in ranks):
                    pump.join(10)
                    if not lines.empty():
                        continue
                _check(ranks, folder, step, deadline, timeout_s)
                continue
            if "measured" in message:
                return dict(message["measured"])
            step = message["step"]
            show(step, message["share"])


def _pump(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in stream:
        if line.startswith("{"):
            lines.put(line)


def _check(ranks: list[subprocess.Popen[str]], folder: Path, step: str, deadline: float, timeout_s: int) -> None:
    """ClusterError when a rank has ended without a result or time is up."""
    for rank, process in enumerate(ranks):
        code = process.poll()
        if code not in (None, 0):
            last = (folder / f"stderr-{rank}").read_text(errors="replace").strip().splitlines()[-1:]
            raise ClusterError(
                "cluster 'local'", f"expected every rank to measure {step}, but rank {rank} of {len(ranks)} ended with "
                f"code {code}: {''.join(last) or 'it said nothing'}", "Correct that, or name another cluster.",
            )  # fmt: skip
    if all(process.poll() == 0 for process in ranks):
        raise ClusterError(
            "cluster 'local'", f"expected a result from {len(ranks)} ranks, but they ended at: {step}",
            "Measure again; if it stays, report it.",
        )  # fmt: skip
    if time.monotonic() > deadline:
        raise ClusterError(
            "cluster 'local'",
            f"expected {len(ranks)} ranks to finish in {timeout_s} s, but they were still at: {step}",
            "Use fewer devices or a quieter machine.",
        )  # fmt: skip


@contextmanager
def _bar(devices: int) -> Iterator[Any]:
    """A progress bar on a terminal's stderr, shown once a second has passed."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"measuring this machine with {devices} ranks", total=1.0, visible=False)
        start = time.monotonic()

        def show(step: str, share: float) -> None:
            text = f"measuring this machine with {devices} ranks: {step}"
            progress.update(task, description=text, completed=share, visible=time.monotonic() - start > 1)

        yield show
