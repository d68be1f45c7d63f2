"""What ranks do in the tests of pipelines: the comparison of parity.py where each rank holds a part of the model."""

from __future__ import annotations

import time
from typing import Any

import torch

import hpsearch
from hpsearch.plan import Plan
from hpsearch.run import ParallelModule
from tests.end_to_end.models import build
from tests.end_to_end.parity import (
    DTYPES,
    LEARNING_RATE,
    NOISE,
    SHARE_OF_NORM,
    STEPS,
    Trace,
    captured_once,
    cast,
    double_throughout,
    plain_loss,
    worst,
)
from tests.end_to_end.slow import slow_devices

Errors = dict[str, float]


def compare(family: str, recipe: str, plans: list[bytes], path: str) -> list[tuple[Errors, list[str]]]:
    """For each plan the largest errors of this rank's parameters against the trace at `path`, and which those are."""
    found = []
    with double_throughout(family, recipe), captured_once():
        for plan in plans:
            found.append(_compare(family, recipe, plan, Trace(**torch.load(path))))
    return found


def compiled(family: str, recipe: str, plan: bytes) -> tuple[ParallelModule, Any]:
    """A parallel model, and this rank's rows."""
    case = build(family, DTYPES[recipe])
    parallel = hpsearch.compile(case.model, plan=Plan.from_bytes(plan), loss=case.loss, recipe=recipe)
    return parallel, parallel.local_rows(case.batch)


def _compare(family: str, recipe: str, plan: bytes, expected: Trace) -> tuple[Errors, list[str]]:
    start = time.process_time()
    parallel, local = compiled(family, recipe, plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    names = [name for name, _ in parallel.named_parameters()]
    gradients, parameters = ({n: of[n] for n in names} for of in (expected.gradients, expected.parameters))
    errors: Errors = {}
    for step in range(STEPS):
        if step == 1:  # the other way to train, for the same result
            loss = parallel(**local) if isinstance(local, dict) else parallel(*local)
            loss.backward()
        else:
            loss = parallel.step(local)
        if step == 0:
            errors["loss"] = abs(loss.item() - expected.loss) / abs(expected.loss)
            found = {n: p.grad.full_tensor() for n, p in parallel.named_parameters() if p.grad is not None}
            errors |= worst("gradient", found, gradients, NOISE[recipe])
            errors["norm"] = abs(parallel.grad_norm().item() - expected.norm) / expected.norm
            with torch.no_grad():
                alone = parallel(**local) if isinstance(local, dict) else parallel(*local)
            errors["loss"] = max(errors["loss"], abs(alone.item() - loss.item()) / abs(expected.loss))
        parallel.clip_grad_norm_(SHARE_OF_NORM * expected.norm)
        optimizer.step()
        optimizer.zero_grad()
    found = {n: p.full_tensor() for n, p in parallel.named_parameters()}
    errors |= worst("parameter", found, parameters, NOISE[recipe])
    return errors | {"cpu_s": time.process_time() - start}, names


def checkpoints(family: str, recipe: str, first: bytes, second: bytes, folder: str) -> dict[str, Any]:
    """Two steps under one plan, saved; the third under each of both, from what was loaded; and whole state dicts."""
    losses: dict[str, float] = {}
    parallel, local = compiled(family, recipe, first)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    for _ in range(2):
        parallel.step(local)
        optimizer.step()
        optimizer.zero_grad()
    parallel.save(folder, optimizer)
    before = parallel.state_dict(full=True)
    for name, plan in (("same", first), ("other", second)):
        again, rows = compiled(family, recipe, plan)
        fresh = torch.optim.AdamW(again.parameters(), lr=0.5)
        again.load(folder, fresh)
        again.step(rows)
        fresh.step()
        losses[f"{name}, after"] = again.step(rows).item()
    again, rows = compiled(family, recipe, second)
    again.load_state_dict(_told(before))
    losses["other, dict"] = again.step(rows).item()
    losses["dict"] = parallel.step(local).item()
    optimizer.step()
    optimizer.zero_grad()
    losses["after"] = parallel.step(local).item()
    return {"losses": losses, "names": list(before)}


def _told(state: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's state dict on every rank."""
    box = [state]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


FROZEN = ("vision.", "projector.", "language.model.embed_tokens.")


def partly_frozen() -> dict[str, float]:
    """`compile` finds a plan of two stages, the first with nothing to train; errors against the plain model."""
    errors: Errors = {}
    case = build("towers", torch.float64)
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    batch = cast(case.batch, torch.float64)
    expected = plain_loss(case.model, batch, case.loss)
    expected.backward()
    wanted = {n: p.grad for n, p in case.model.named_parameters() if p.grad is not None}
    fix = {"pp": 2, "cut": "1+3", "micro_batches": 3}
    parallel = hpsearch.compile(case.model, slow_devices(2), loss=case.loss, recipe="fp64", fix=fix, example=case.batch)
    local = parallel.local_rows(case.batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    for way in ("step", "call"):
        optimizer.zero_grad()
        if way == "step":
            loss = parallel.step(local)
        else:
            loss = parallel(*local)
            loss.backward()
        errors[f"{way} loss"] = abs(loss.item() - expected.item()) / expected.item()
        found = {n: p.grad.full_tensor() for n, p in parallel.named_parameters() if p.grad is not None}
        errors[f"{way} gradients"] = float(len(found))
        if found:
            errors |= worst(f"{way} gradient", found, {n: wanted[n] for n in found}, NOISE["fp64"])
    parallel.clip_grad_norm_(0.1)
    optimizer.step()
    return errors
