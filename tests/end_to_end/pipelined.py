"""The same comparison as in parity.py on ranks that hold a part of the model each."""

from __future__ import annotations

import torch

import hpsearch
from hpsearch.plan import Plan
from tests.end_to_end.models import build
from tests.end_to_end.parity import (
    DTYPES,
    LEARNING_RATE,
    NOISE,
    SHARE_OF_NORM,
    STEPS,
    Trace,
    double_throughout,
    worst,
)


def compare(family: str, recipe: str, plan: bytes, path: str) -> tuple[dict[str, float], list[str]]:
    """Largest errors of this rank's parameters against the trace at `path`, and which parameters those are."""
    with double_throughout(family, recipe):
        return _compare(family, recipe, plan, Trace(**torch.load(path)))


def _compare(family: str, recipe: str, plan: bytes, expected: Trace) -> tuple[dict[str, float], list[str]]:
    case = build(family, DTYPES[recipe])
    parallel = hpsearch.compile(case.model, plan=Plan.from_bytes(plan), loss=case.loss, recipe=recipe)
    local = parallel.local_rows(case.batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    names = [name for name, _ in parallel.named_parameters()]
    gradients, parameters = ({n: of[n] for n in names} for of in (expected.gradients, expected.parameters))
    errors: dict[str, float] = {}
    for step in range(STEPS):
        if step == 1:  # the other way to train, for the same result
            loss = parallel(**local) if isinstance(local, dict) else parallel(*local)
            loss.backward()
        else:
            loss = parallel.step(local)
        if step == 0:
            errors["loss"] = abs(loss.item() - expected.loss) / abs(expected.loss)
            found = {n: p.grad.full_tensor() for n, p in parallel.named_parameters()}
            errors |= worst("gradient", found, gradients, NOISE[recipe])
            errors["norm"] = abs(parallel.grad_norm().item() - expected.norm) / expected.norm
            with torch.no_grad():
                alone = parallel(**local) if isinstance(local, dict) else parallel(*local)
            errors["loss"] = max(errors["loss"], abs(alone.item() - loss.item()) / abs(expected.loss))
        parallel.clip_grad_norm_(SHARE_OF_NORM * expected.norm)
        optimizer.step()
        optimizer.zero_grad()
    found = {n: p.full_tensor() for n, p in parallel.named_parameters()}
    return errors | worst("parameter", found, parameters, NOISE[recipe]), names
