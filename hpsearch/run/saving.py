"""Checkpoints that are written while training goes on.

`dcp.async_save` copies every rank's pieces to host memory before it returns; a thread writes them, and agrees with the
other ranks' threads over a gloo group of its own, because collectives of two threads on one group would mix. When rank
0's thread ends, every piece is on disk, and the folder gets its manifest and its name (`checkpoint.finish`).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from hpsearch.plan import Plan
from hpsearch.run import checkpoint
from hpsearch.run.launch import together


class Saving:
    """A checkpoint on its way to disk."""

    def __init__(self, folder: Path, written: Future[None]) -> None:
        self.folder, self._written = folder, written

    @staticmethod
    def saved(folder: Path) -> Saving:
        """One that is there."""
        written: Future[None] = Future()
        written.set_result(None)
        return Saving(folder, written)

    @property
    def is_done(self) -> bool:
        """Whether this rank's part is over; on rank 0, whether the checkpoint can be loaded."""
        return self._written.done()

    def wait(self) -> None:
        """Until the checkpoint can be loaded. Collective. Raises CheckpointError if it could not be written."""
        together(f"checkpoint {self.folder}", self._result)

    def _result(self) -> None:
        self._written.result()


class Saver:
    """Starts one saving at a time."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._running: Saving | None = None

    def settle(self) -> None:
        """Waits for the last saving. Collective."""
        running, self._running = self._running, None
        if running is not None:
            running.wait()

    def start(
        self, folder: Path, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None, step: int
    ) -> Saving:
        """Copies the state and returns. Collective."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        state, entries = checkpoint.begin(folder, model, plan, optimizer)
        partial = checkpoint.partial_of(folder)
        writing: Any = dcp.async_save(state, checkpoint_id=partial, process_group=self._group)

        def end() -> None:
            if (error := writing.exception()) is not None:
                raise checkpoint.unwritten(partial, error)
            checkpoint.finish(folder, plan, entries, step)

        waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running = Saving(folder, waiter.submit(end))
        waiter.shutdown(wait=False)
        return self._running
