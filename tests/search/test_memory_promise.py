"""A plan promises its peak bytes; the program is held to it: measured <= predicted, and not by much.

Measured: storages that the step allocates and that are alive at once, by a dispatch mode, on one process and one
device (multi-device programs allocate by the same rules). Parameters are the caller's and added by size.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hpsearch
from hpsearch.capture import capture
from hpsearch.search import search
from tests.end_to_end.models import ROWS, build
from tests.search.toy import toy_cluster

SLACK = 1.5
"""How far above the measurement a prediction may lie: tiny models magnify what is rounded up (two blocks in flight)."""


class Alive(TorchDispatchMode):
    """Bytes of the storages made while it is open, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._leave_out(leaf.untyped_storage())
            elif isinstance(leaf, torch.UntypedStorage):
                self._leave_out(leaf)
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor)
        return result

    def _leave_out(self, storage: torch.UntypedStorage) -> None:
        """Not made by an op that was seen: the caller's, or host memory."""
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            weakref.finalize(storage, self._seen.discard, storage._cdata)

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


CASES = [
    ("llama", "fp32", {"recompute": "none"}),
    ("gpt2", "bf16", {"micro_batches": 3, "recompute": "none"}),
    ("t5", "fp32", {"recompute": "full"}),
]
"""All of {llama, gpt2, t5} x {fp32, bf16} x {none, 3 micro-batches, recompute} lay in 0.78-0.99 of their predictions
(T5 without micro-batches: its loss is a mean)."""


@pytest.mark.parametrize(("family", "recipe", "fix"), CASES, ids=str)
def test_measured_bytes_stay_within_the_plan(family: str, recipe: str, fix: dict[str, object]) -> None:
    case = build(family, torch.float32)
    graph = capture(case.model, case.batch, loss=case.loss, recipe=recipe).graph
    plan = search(graph, toy_cluster(devices=1), global_batch=ROWS, fix=fix)
    parallel = hpsearch.compile(case.model, plan=plan, loss=case.loss, recipe=recipe)
    batch = parallel.local_rows(case.batch)
    with Alive() as alive:
        parallel.step(batch)
    predicted = plan.file.predicted.bytes
    measured = predicted["parameters"] + predicted["optimizer"] + alive.peak
    print(f"measured / predicted = {measured / plan.file.predicted.peak_bytes:.3f}")
    assert measured <= plan.file.predicted.peak_bytes
    assert plan.file.predicted.peak_bytes <= SLACK * measured
