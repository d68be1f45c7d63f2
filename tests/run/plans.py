"""Plans for the jobs of this room, made once in the parent process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from hpsearch.capture import capture
from hpsearch.search import search
from tests.end_to_end.models import ROWS, build
from tests.end_to_end.test_parity import slow_devices
from tests.run.jobs import uneven_case


@cache
def _graph(family: str) -> Any:
    if family == "uneven":
        model, batch = uneven_case()
        return capture(model, batch, recipe="fp64", rows=2).graph
    case = build(family, torch.float64)
    return capture(case.model, case.batch, loss=case.loss, recipe="fp64", rows=2).graph


def plan_bytes(family: str, devices: int, **fix: Any) -> bytes:
    """The plan for `family` on `devices` slow devices, pinned by `fix`."""
    return search(_graph(family), slow_devices(devices), global_batch=ROWS, fix=fix).content
