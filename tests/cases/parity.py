"""One step under a plan, all ranks in one process, against the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpsearch.capture import capture
from hpsearch.lower import ParallelProgram, lower
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.cases.plans import slow_devices
from tests.lower.reference import Errors, compare


def planned(
    model: nn.Module,
    batches: list[Any],
    devices: int,
    fix: Mapping[str, object],
    recipe: str = "fp64",
    loss: Any = None,
) -> tuple[Errors, Plan, ParallelProgram]:
    """The errors of the searched plan's program on every rank; one global batch for each micro-batch of the step."""
    captured = capture(model, batches[0], loss=loss, recipe=recipe)
    rows = captured.rows * len(batches)
    plan = search(captured.graph, slow_devices(devices), global_batch=rows, fix={**fix, "micro_batches": len(batches)})
    program = lower(captured, plan)
    return compare(model, batches, captured, program, loss), plan, program


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
