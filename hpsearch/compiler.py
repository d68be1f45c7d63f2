"""The compiler on one page: `compile` hangs a pipeline behind a model, and `pipeline` is the way from model to program.

No decision is taken here: what is searched stands in `search`, what runs in `lower`, when in `run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hpsearch.capture import capture
from hpsearch.cluster import LOCAL, Cluster
from hpsearch.errors import CaptureError
from hpsearch.lower import lower
from hpsearch.measure import load_cluster
from hpsearch.plan import Plan
from hpsearch.run import Built, ParallelModule
from hpsearch.run.asked import Asked
from hpsearch.run.batch import Batch, normal, rows_of
from hpsearch.run.choose import Given, Where, check_plan, choose_plan, subject_of
from hpsearch.run.launch import together
from hpsearch.search import search

Loss = Callable[[Any, Any], torch.Tensor]


def compile(
    model: nn.Module,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    *,
    plan: Given = None,
    loss: Loss | None = None,
    recipe: str = "bf16",
    global_batch: int | None = None,
    fix: Mapping[str, object] | None = None,
    optimizer: str | None = None,
    example: Batch | None = None,
    seed: int = 0,
    inductor: bool = False,
) -> ParallelModule:
    """`model`, trained in parallel on `cluster` by the plan that the search proves best, or by `plan`.

    model: any nn.Module whose training step is one graph; on the meta device it is initialised shard by shard.
    cluster: a Cluster, or its name or path; by default this machine ("local") with as many devices as there are ranks.
    loss: `loss(outputs, batch)`; without it the model's own.
    global_batch: rows of one optimizer step over all ranks; by default those of the first batch.
    fix: what the search must keep, {"tp": 4, "micro_batches": 2}.
    optimizer: whose states take memory, "adamw" by default.
    With a plan, fix, global_batch, optimizer and recipe may only say what the plan says.
    example: a global batch (meta tensors will do); without it the model is captured at the first call.
    seed: of initial values and of dropout, which are the same under every plan.
    inductor: compile each function of the program when it first runs, a block's once whatever the depth. The plan is
    priced without it.

    Raises HpsearchError: CaptureError, LegalityError, InfeasibleError, PlanError, LaunchError (see hpsearch.errors).
    """
    _check_kinds(model, loss)
    on = cluster if isinstance(cluster, Cluster) else partial(load_cluster, cluster or LOCAL)
    find = partial(search, fix=fix, optimizer=optimizer or "adamw")
    asked = Asked(fix, global_batch, optimizer)
    build = partial(pipeline, model, plan, asked, on, on if cluster else None, find, loss, recipe)
    parallel = ParallelModule(model, build, global_batch=global_batch, seed=seed, inductor=inductor)
    return parallel if example is None else parallel.prepare(example)


def _check_kinds(model: object, loss: object) -> None:
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        found = f"the class {model.__name__}" if is_class else type(model).__name__
        remedy = "Pass an instance of it." if is_class else "Pass the model itself."
        raise CaptureError("model", f"expected an nn.Module, but found {found}", remedy)
    if loss is not None and not callable(loss):
        raise CaptureError(
            "loss", f"expected a function, but found {type(loss).__name__}", "Pass loss=function(outputs, batch)."
        )


def pipeline(
    model: nn.Module,
    given: Given,
    asked: Asked,
    on: Where,
    named: Where | None,
    find: Callable[..., Plan],
    loss: Loss | None,
    recipe: str,
    batch: Batch,
    base: Built | None = None,
) -> Built:
    """From a model and a global batch to the program that every rank runs; beside `base`, if that runs already."""
    trace = partial(capture, model, batch, loss=loss, recipe=recipe)
    plan = choose_plan(given, on, partial(find, global_batch=rows_of(batch)), trace, base)
    if base is None and given is not None:
        together("plan", partial(asked.check, plan, subject_of(given)))
    if base is None:
        together("first batch", partial(normal, batch, plan.file.job.global_batch))
    captured = together("capture", partial(trace, rows=plan.micro_batch_rows))
    checked = plan if base else check_plan(plan, captured.graph, given, named)
    program = together("lowering", partial(lower, captured, checked))
    return Built(captured.graph, checked, program, batch)
