"""Imported by the process that ranks are forked from: it fills the caches that every rank would fill by itself.

One capture, one search and one lowering import what torch imports late and evaluate the sharding rules of common ops.
"""

from __future__ import annotations

import os
import threading

import torch

from hpsearch.capture import capture
from hpsearch.lower import lower
from hpsearch.search import search
from tests.end_to_end.models import ROWS, build
from tests.end_to_end.slow import slow_devices


def warm() -> None:
    torch.set_num_threads(1)
    for family in ("llama", "gpt2"):
        case = build(family, torch.float64)
        graph = capture(case.model, case.batch, loss=case.loss, recipe="fp64", rows=2).graph
        plan = search(graph, slow_devices(4), global_batch=ROWS, fix={"dp_shard": 2, "tp": 2})
        lower(capture(case.model, case.batch, loss=case.loss, recipe="fp64", rows=plan.micro_batch_rows), plan)
    assert len(os.listdir("/proc/self/task")) == 1, "a process that is forked has one thread"


if threading.current_thread() is threading.main_thread():
    warm()
