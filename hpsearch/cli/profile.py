"""`hpsearch profile`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hpsearch.cli.screen import show
from hpsearch.errors import HpsearchError, LaunchError
from hpsearch.plan.tables import table
from hpsearch.plan.units import seconds

GRACE_S = 10.0
"""How long ranks may go on after one of them failed: it says why, the others wait for it in a collective."""


def profile_command(
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="DIR", help="The folder to write.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and shapes: about a minute on a laptop.")] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=64, help="Without a launcher: start so many ranks on this machine.")
    ] = None,
    tiers: Annotated[
        str, typer.Option(metavar="N,N", help="Devices in a domain of each tier, innermost first, instead of looking.")
    ] = "",
    most_spread: Annotated[
        float, typer.Option(min=0.0, help="Refuse a profile whose repeats differ by more than this, in the median.")
    ] = 0.5,
    nccl_tests: Annotated[
        list[Path] | None, typer.Option("--from-nccl-tests", metavar="FILE", help="Output of nccl-tests; repeatable.")
    ] = None,
    traces: Annotated[
        list[Path] | None, typer.Option("--from-trace", metavar="FILE", help="torch.profiler's trace; repeatable.")
    ] = None,
    onto: Annotated[
        str, typer.Option(metavar="NAME", help="The cluster that such files are of, when -o has none yet.")
    ] = "",
    collective: Annotated[
        str, typer.Option(metavar="KIND", help="Of nccl-tests output that does not name its test.")
    ] = "",
    group: Annotated[
        int | None, typer.Option(min=2, help="Ranks, of nccl-tests output that does not list them.")
    ] = None,
    compared: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="DIR DIR", help="What changed between two profiles."),
    ] = None,
) -> None:
    """Measures a machine and writes it as a cluster that plans can be made for.

    Under torchrun, on every rank: torchrun --nproc-per-node 8 -m hpsearch profile -o my-cluster/. Interrupted, the same
    command goes on where it stopped. Figures of nccl-tests and of traces can be put into a cluster instead.
    """
    if compared is not None:
        _compare(*compared)
        return
    if output is None:
        raise typer.BadParameter("name the folder to write.", param_hint="-o")
    if nccl_tests or traces:
        _import(output, onto, nccl_tests or [], traces or [], collective, group)
        return
    sizes = _tier_sizes(tiers)
    if "WORLD_SIZE" not in os.environ:
        _launch(ranks, sys.argv[1:])
        return
    _measure(output, quick, sizes, most_spread)


def _compare(first: Path, second: Path) -> None:
    from hpsearch.measure.compare import compare

    found = compare(first, second)
    made = table(
        f"{second} against {first}", "kind", "points", "median ratio", "median difference", "most changed", "its ratio"
    )
    for kind, count, ratio, differs, most in found.by_kind():
        made.add_row(kind, str(count), f"{ratio:.3f}", f"{differs:.1%}", most.key, f"{most.ratio:.2f}")
    said = [f"{name}: {a} before, {b} after." for name, a, b in found.settings]
    said += [
        f"{len(keys)} points only in {of}."
        for keys, of in ((found.only_first, first), (found.only_second, second))
        if keys
    ]
    said.append(f"{len(found.changes)} points differ by {found.median_differs:.1%} in the median; ratios of seconds.")
    show(made, Text("\n".join(said)))


def _import(
    folder: Path, onto: str, nccl_tests: list[Path], traces: list[Path], collective: str, group: int | None
) -> None:
    from hpsearch.measure.imported import put_into, sources_of

    sources = sources_of(nccl_tests, traces, collective=collective, group=group)
    put_into(folder, onto, sources)
    for source in sources:
        made = table(f"{source.text}: put into {folder}", "what", "points", "smallest", "largest")
        for c in source.curves:
            low, high = (f"{c.nbytes[i]} B in {seconds(c.seconds[i])}" for i in (0, -1))
            made.add_row(f"{c.kind} over {c.size} ranks {c.stride} apart", str(len(c.nbytes)), low, high)
        for t in source.matmuls:
            low, high = (f"m={t.m[i]} at {t.flops_per_s[i] / 1e12:.4g} TFLOP/s" for i in (0, -1))
            made.add_row(f"matmul {t.dtype} n={t.n} k={t.k}", str(len(t.m)), low, high)
        show(made)


def _measure(output: Path, quick: bool, sizes: tuple[int, ...], most_spread: float) -> None:
    """This rank's part; rank 0 writes, and speaks for all."""
    began = time.monotonic()
    from hpsearch.measure.points import FULL, QUICK
    from hpsearch.measure.profile import WARN_SPREAD, finish, unmeasured
    from hpsearch.measure.session import end, measure_here, progress
    from hpsearch.run.launch import together

    try:
        with progress() as bar:
            found = measure_here(output, QUICK if quick else FULL, bar)
        repeated = together(
            "profile", lambda: finish(output, *found, tier_sizes=sizes, most_spread=most_spread) if found else None
        )
    except HpsearchError as error:
        if int(os.environ["RANK"]):
            raise typer.Exit(error.exit_code) from error
        raise
    if repeated is not None:
        said = f"Written to {output} in {seconds(time.monotonic() - began)}. Repeats differ by {repeated.median:.1%} "
        said += f"in the median ({', '.join(f'{kind} {spread:.0%}' for kind, spread in repeated.by_kind.items())})."
        show(Text(said))
        short = unmeasured(found[0]).get("out of memory", []) if found else []
        if short:
            show(Text(f"Without a price, for they ran out of memory: {', '.join(short)}."))
        if repeated.median > WARN_SPREAD:
            show(Text(f"That is more than {WARN_SPREAD:.0%}: was the machine busy?"), stderr=True)
    end()


def _tier_sizes(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) > 1 for word in words):
        raise typer.BadParameter(f"expected whole numbers above 1, but got {text!r}.", param_hint="--tiers")
    found = tuple(int(word) for word in words)
    if any(outer <= inner or outer % inner for inner, outer in pairwise(found)):
        raise typer.BadParameter(f"expected each a multiple of the one before, but got {text!r}.", param_hint="--tiers")
    return found


def _launch(ranks: int | None, arguments: list[str]) -> None:
    """The same command on local ranks; they end with this process, whatever happens.

    Ranks that SPOILT ends are started again, from the samples that there are: gloo of torch 2.13 now and then writes
    into memory that it has freed.
    """
    if ranks is None:
        raise LaunchError(
            "profile", "expected ranks to measure, but no launcher started this process",
            "Start it with torchrun --nproc-per-node N -m hpsearch profile …, or say --ranks N.",
        )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that ranks are ended then too
    for restarts in range(RESTARTS + 1):
        codes = _once(ranks, arguments)
        spoilt = [(rank, -code) for rank, code in enumerate(codes) if -code in SPOILT]
        if not spoilt or restarts == RESTARTS:
            break
        ended = ", ".join(f"rank {rank} was ended by {signal.Signals(number).name}" for rank, number in spoilt)
        show(Text(f"{ended}; going on from what was measured."), stderr=True)
    if any(codes):
        raise typer.Exit(max(map(abs, codes)))


SPOILT = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
"""What a process ends in whose memory was written to by mistake."""
RESTARTS = 2


def _once(ranks: int, arguments: list[str]) -> list[int]:
    """Exit codes of the ranks; minus the signal where one ended them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank, **shared}
            environment = {"OMP_NUM_THREADS": "1", **os.environ, **{name: str(value) for name, value in own.items()}}
            processes.append(subprocess.Popen([sys.executable, "-m", "hpsearch", *arguments], env=environment))
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes, once all have ended, or a few seconds after the first that failed."""
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if deadline == float("inf") and any(process.poll() for process in processes):
            deadline = time.monotonic() + GRACE_S
        time.sleep(0.05)
    return [process.returncode or 0 for process in processes]
