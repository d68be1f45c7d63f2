"""gloo ranks for one job after another: torch is imported once, and no job's processes outlive it."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT_S = 120
GRACE_S = 20.0
"""A collective that waits in vain raises after the timeout; ranks that are silent for longer hang elsewhere."""
PRELOAD = ["tests.end_to_end.ranks", "tests.end_to_end.warm"]

SPOILT = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
"""What a process ends in whose memory was written to by mistake; a rank that was killed has another reason."""

Answer = tuple[bool, Any]
"""Whether the rank's function returned, and what; or the text of what it raised."""


class RankPool:
    """`run("package.module:function", ranks=4, **arguments)` calls it on ranks 0…3; results in rank order.

    Ranks are forked from a process that has imported torch but started no thread of it. They serve one job only: torch
    keeps meshes of a destroyed process group in DTensor's caches, and would go on using its connections.
    """

    def __init__(self, size: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self.size = size
        self.folder = tempfile.TemporaryDirectory(prefix="hpsearch-ranks-")
        self.jobs = 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    def run(self, function: str, *, ranks: int, timeout_s: float = TIMEOUT_S, **arguments: Any) -> list[Any]:
        """Results by rank. Raises RanksFailed with every traceback, or with every stack where a rank hangs.

        A job in which a rank is ended by one of SPOILT is run once more, with a warning. Seen in 3 of about 400 jobs on
        busy cores: gloo of torch 2.13 writes into memory that it has freed (a core file has the table of the deleter of
        gloo::ShareableNonOwningPtr<UnboundBuffer> in a free block), and malloc aborts in a thread of gloo.
        """
        assert ranks <= self.size
        failed, spoilt = self._job(function, ranks, timeout_s, arguments)
        if spoilt:
            warnings.warn(f"{function} is run again:\n{failed}", stacklevel=2)
            failed, spoilt = self._job(function, ranks, timeout_s, arguments)
        if isinstance(failed, str):
            raise RanksFailed(failed)
        return failed

    def _job(self, function: str, ranks: int, timeout_s: float, arguments: Any) -> tuple[list[Any] | str, bool]:
        """(results, or why there are none; whether a rank ended in one of SPOILT)."""
        self.jobs += 1
        folder = Path(self.folder.name) / str(self.jobs)
        folder.mkdir()
        ends: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank in range(ranks):
                ours, theirs = self.context.Pipe()
                told = (
                    theirs,
                    function,
                    rank,
                    ranks,
                    str(folder),
                    timeout_s,
                    (list(sys.path), dict(os.environ)),
                    arguments,
                )
                processes.append(self.context.Process(target=_serve, args=told, daemon=True))
                processes[-1].start()
                theirs.close()
                ends.append(ours)
            answers = _answers(ends, timeout_s)
            failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
            if silent := [rank for rank in range(ranks) if rank not in answers]:
                failed.append(f"no answer from ranks {silent}")
            if failed:
                failed.append(f"the stacks of all ranks:\n{_stacks(processes, folder)}")
            ended = [(rank, process.exitcode) for rank, process in enumerate(processes) if not process.is_alive()]
        finally:
            _stop(ends, processes)
        signals = ", ".join(f"rank {rank} was ended by signal {-code}" for rank, code in ended if code and code < 0)
        if failed:
            return "\n".join([signals, *failed] if signals else failed), any(
                -code in SPOILT for _, code in ended if code
            )
        return [answers[rank][1] for rank in range(ranks)], False

    def close(self) -> None:
        self.folder.cleanup()


class RanksFailed(AssertionError):
    """Some rank raised; the text has each rank's traceback."""


def _answers(ends: list[Connection], timeout_s: float) -> dict[int, Answer]:
    """What each rank sent; where one failed the others, who may wait for it, get only a little longer."""
    answers: dict[int, Answer] = {}
    deadline = time.monotonic() + timeout_s + GRACE_S
    while len(answers) < len(ends) and (left := deadline - time.monotonic()) > 0:
        for end in wait([end for rank, end in enumerate(ends) if rank not in answers], left):
            rank = ends.index(end)  # type: ignore[arg-type]
            try:
                answers[rank] = ends[rank].recv()
            except (EOFError, ConnectionError):
                answers[rank] = False, "died"
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return answers


def _stacks(processes: list[BaseProcess], folder: Path) -> str:
    """Where every rank is now, by faulthandler."""
    for process in processes:
        if process.is_alive() and process.pid:
            with suppress(ProcessLookupError):  # it may end in between
                os.kill(process.pid, signal.SIGUSR1)
    time.sleep(2)
    found = [folder / f"stack{rank}" for rank in range(len(processes))]
    return "\n".join(f"rank {i}:\n{file.read_text() if file.exists() else ''}" for i, file in enumerate(found))


def _stop(ends: list[Connection], processes: list[BaseProcess]) -> None:
    """Ranks leave together once all ends are closed, so that none sees another's connections break."""
    for end in ends:
        end.close()
    deadline = time.monotonic() + 5
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _serve(
    end: Connection,
    function: str,
    rank: int,
    ranks: int,
    folder: str,
    timeout_s: float,
    surroundings: tuple[list[str], dict[str, str]],
    arguments: Any,
) -> None:
    sys.path[:], environment = surroundings
    os.environ.clear()  # that of the process ranks are forked from is of whoever asked first
    os.environ.update(environment)
    signal.alarm(int(timeout_s + 2 * GRACE_S))  # longer than the parent waits: for when it was killed
    with open(Path(folder) / f"stack{rank}", "w") as stacks:
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        end.send(_call(function, rank, ranks, str(Path(folder) / "store"), timeout_s, arguments))
        end.poll(None)  # until the parent has all answers
        os._exit(0)  # no destructor of torch runs


def _call(function: str, rank: int, ranks: int, store: str, timeout_s: float, arguments: dict[str, Any]) -> Answer:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        module, name = function.split(":")
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit)
        return True, getattr(importlib.import_module(module), name)(**arguments)
    except BaseException:  # noqa: BLE001 - the parent gets every failure as text
        return False, traceback.format_exc()
