"""A pool of gloo ranks that runs many jobs: torch is imported once, and no process outlives the pool."""

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
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT_S = 120
GRACE_S = 20.0
"""A collective that waits in vain raises after the timeout; ranks that are silent for longer hang elsewhere."""


class RankPool:
    """`run("package.module:function", ranks=4, **arguments)` calls it on ranks 0…3; results in rank order.

    Ranks that hang fail their own job only: their stacks are in its error, and the next job gets new ranks.
    """

    def __init__(self, size: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self.size = size
        self.folder = tempfile.TemporaryDirectory(prefix="hpsearch-ranks-")
        self.jobs = 0
        self.ends: list[Connection] = []
        self.processes: list[BaseProcess] = []

    def run(self, function: str, *, ranks: int, timeout_s: float = TIMEOUT_S, **arguments: Any) -> list[Any]:
        """Results by rank. Raises RanksFailed with every traceback, or with every stack where a rank hangs."""
        if not self.processes:
            self._start()
        self.jobs += 1
        store = str(Path(self.folder.name) / f"store{self.jobs}")
        for end in self.ends[:ranks]:
            end.send((function, ranks, store, timeout_s, arguments))
        answers = self._answers(ranks, timeout_s)
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        if silent := [rank for rank in range(ranks) if rank not in answers]:
            failed.append(f"no answer from ranks {silent}; the stacks of all ranks:\n{self._stacks()}")
        if silent or not all(process.is_alive() for process in self.processes):
            self._stop()
        if failed:
            raise RanksFailed("\n".join(failed))
        return [answers[rank][1] for rank in range(ranks)]

    def _answers(self, ranks: int, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        """What each rank sent; where one failed the others, who may wait for it, get only a little longer."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s + GRACE_S
        while len(answers) < ranks and (left := deadline - time.monotonic()) > 0:
            for end in wait([self.ends[rank] for rank in range(ranks) if rank not in answers], left):
                rank = self.ends.index(end)  # type: ignore[arg-type]
                answers[rank] = _answer(self.ends[rank])
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def close(self) -> None:
        self._stop()
        self.folder.cleanup()

    def _start(self) -> None:
        # Forked from a process that has imported torch but started no thread of it: one import for all ranks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.end_to_end.ranks", "torch", "transformers", "hpsearch.compiler"])
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, list(sys.path), str(self._stack_file(rank)))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def _stop(self) -> None:
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        self.ends, self.processes = [], []

    def _stacks(self) -> str:
        """Where every rank is now, by faulthandler."""
        for process in self.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(2)
        return "\n".join(f"rank {rank}:\n{self._stack_file(rank).read_text()}" for rank in range(self.size))

    def _stack_file(self, rank: int) -> Path:
        return Path(self.folder.name) / f"stack{rank}"


class RanksFailed(AssertionError):
    """Some rank raised; the text has each rank's traceback."""


def _answer(end: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = end.recv()
    except (EOFError, ConnectionError):
        answer = False, "died"
    return answer


def _serve(end: Connection, rank: int, path: list[str], stack_file: str) -> None:
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            try:
                function, ranks, store, timeout_s, arguments = end.recv()
            except EOFError:
                return
            end.send(_call(function, rank, ranks, store, timeout_s, arguments))


def _call(
    function: str, rank: int, ranks: int, store: str, timeout_s: float, arguments: dict[str, Any]
) -> tuple[bool, Any]:
    import torch.distributed as dist

    try:
        module, name = function.split(":")
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit)
        return True, getattr(importlib.import_module(module), name)(**arguments)
    except BaseException:  # noqa: BLE001 - the parent gets every failure as text
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
