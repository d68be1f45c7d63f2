"""What a candidate trains: rows, micro-batches, recompute, and what waits in host memory."""

from __future__ import annotations

from hpsearch.cost import Job, recipe_of
from hpsearch.graph import ModelGraph
from hpsearch.search.fix import Fix


def job_of(
    model: ModelGraph, global_batch: int, micro_batches: int, optimizer: str, recompute: frozenset[str], fix: Fix,
    *, pipelined: bool = False,
) -> Job:  # fmt: skip
    """The job of one candidate; what is pinned to host memory is so for every block class."""
    away = frozenset(model.blocks) if fix.offloads("activations") else frozenset()
    recipe = recipe_of(model.recipe)
    return Job(
        global_batch, micro_batches, recipe, optimizer, recompute, away, fix.offloads("optimizer"), pipelined
    )  # fmt: skip
