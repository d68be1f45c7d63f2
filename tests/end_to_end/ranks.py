"""A pool of gloo ranks that runs many jobs: torch is imported once, and no process outlives the pool."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 120


class RankPool:
    """`run("package.module:function", ranks=4, **arguments)` calls it on ranks 0…3; results in rank order."""

    def __init__(self, size: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        # Forked from a process that has imported torch but started no thread of it: one import for all ranks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.end_to_end.ranks", "torch", "transformers", "hpsearch.compiler"])
        self.folder = tempfile.TemporaryDirectory(prefix="hpsearch-ranks-")
        self.jobs = 0
        self.ends: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, list(sys.path)), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def run(self, function: str, *, ranks: int, timeout_s: float = TIMEOUT_S, **arguments: Any) -> list[Any]:
        """Results by rank. Raises RanksFailed with every traceback, or when a rank does not answer in time."""
        self.jobs += 1
        store = str(Path(self.folder.name) / f"store{self.jobs}")
        for end in self.ends[:ranks]:
            end.send((function, ranks, store, timeout_s, arguments))
        answers = []
        for rank, end in enumerate(self.ends[:ranks]):
            if not end.poll(timeout_s + 20):
                self.close()
                raise RanksFailed(f"rank {rank} did not answer within {timeout_s + 20} s")
            answers.append(end.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            raise RanksFailed("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


class RanksFailed(AssertionError):
    """Some rank raised; the text has each rank's traceback."""


def _serve(end: Connection, rank: int, path: list[str]) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, ranks, store, timeout_s, arguments = end.recv()
        except EOFError:
            return
        try:
            module, name = function.split(":")
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, ranks),
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=timeout_s),
            )
            result = True, getattr(importlib.import_module(module), name)(**arguments)
        except BaseException:  # noqa: BLE001 - the parent gets every failure as text
            result = False, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        end.send(result)
