"""One step, and three AdamW steps with clipping, by the plain model and by every rank of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor

import hpsearch
from hpsearch import compiler
from hpsearch.capture import CapturedGraph
from hpsearch.plan import Plan
from tests.end_to_end.models import build

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
STEPS, LEARNING_RATE, SHARE_OF_NORM = 3, 1e-3, 0.5
"""Gradients are clipped to half the first step's norm, so clipping is active."""
NOISE = {"fp64": 1e-9, "fp32": 1e-5}
"""A gradient this much smaller than the largest of the model is rounding noise (keys' biases in plain attention have
none in exact arithmetic); it is compared against the largest gradient instead of against itself."""


@dataclass
class Trace:
    """What is compared: the loss, every gradient and the norm of the first step, parameters after the last."""

    loss: float = 0.0
    norm: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def plain_loss(model: nn.Module, batch: Any, loss: Any) -> torch.Tensor:
    if loss is not None:
        return loss(model(*batch[: len(inspect.signature(model.forward).parameters)]), batch)
    return model(**batch).loss


def cast(batch: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {k: one(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(one(v) for v in batch)


DOUBLED = {"gemma3"}
"""Families that cast to fp32 by themselves where sums over rows follow; other files add theirs."""


@contextmanager
def double_throughout(family: str, recipe: str) -> Iterator[None]:
    """While open, a model that sums in fp32 by itself does so in fp64.

    Gemma's norms cast to fp32, gain included, so the gain's gradient is a sum over rows in fp32: any other order of the
    rows changes it by 1e-7. Routers of experts do so too. That is the model's rounding, not the program's.
    """
    if family not in DOUBLED or recipe != "fp64":
        yield
        return
    classes = (torch.Tensor, FunctionalTensor)  # the second is what a trace runs on
    originals = [(kind.float, kind.type) for kind in classes]
    for kind, (_, cast) in zip(classes, originals, strict=True):
        kind.float = kind.double  # type: ignore[method-assign]
        kind.type = partialmethod(_type, cast)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        for kind, (as_float, cast) in zip(classes, originals, strict=True):
            kind.float, kind.type = as_float, cast  # type: ignore[method-assign]


def _type(tensor: torch.Tensor, cast: Any, dtype: Any = None, *rest: Any, **more: Any) -> Any:
    """`tensor.type(dtype)` with fp64 for fp32."""
    return cast(tensor, torch.float64 if dtype is torch.float32 else dtype, *rest, **more)


def reference(family: str, recipe: str, path: Path) -> None:
    """The plain model's trace, written to `path`."""
    with double_throughout(family, recipe):
        torch.save(vars(_plain_trace(family, recipe)), path)


def _plain_trace(family: str, recipe: str) -> Trace:
    case = build(family, DTYPES[recipe])
    batch = cast(case.batch, DTYPES[recipe])
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=LEARNING_RATE)
    trace = Trace()
    for step in range(STEPS):
        loss = plain_loss(case.model, batch, case.loss)
        loss.backward()
        if step == 0:
            trace.loss = loss.item()
            trace.gradients = {n: p.grad.clone() for n, p in case.model.named_parameters()}
            trace.norm = torch.nn.utils.get_total_norm(trace.gradients.values()).item()
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), SHARE_OF_NORM * trace.norm)
        optimizer.step()
        optimizer.zero_grad()
    trace.parameters = {n: p.detach() for n, p in case.model.named_parameters()}
    return trace


def compare(family: str, recipe: str, plan: bytes, path: str) -> dict[str, float]:
    """Largest errors of the parallel model against the trace at `path`; runs on every rank."""
    return compare_all(family, recipe, [plan], path)[0]


def compare_all(family: str, recipe: str, plans: list[bytes], path: str) -> list[dict[str, float]]:
    """`compare` for one plan after the other."""
    with double_throughout(family, recipe), captured_once():
        return [_compare(family, recipe, plan, Trace(**torch.load(path))) for plan in plans]


@contextmanager
def captured_once() -> Iterator[None]:
    """While open, `compile` captures the one model that it is given once for each count of rows.

    Most of a small model's time is its capture, which does not depend on the plan.
    """
    original, found = compiler.capture, {}

    def once(model: nn.Module, batch: Any, *, rows: int, **told: Any) -> CapturedGraph:
        if rows not in found:
            found[rows] = original(model, batch, rows=rows, **told)
        return found[rows]

    compiler.capture = once  # type: ignore[assignment]
    try:
        yield
    finally:
        compiler.capture = original


def _compare(family: str, recipe: str, plan: bytes, expected: Trace) -> dict[str, float]:
    case = build(family, DTYPES[recipe])
    parallel = hpsearch.compile(case.model, plan=Plan.from_bytes(plan), loss=case.loss, recipe=recipe)
    local = parallel.local_rows(case.batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
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
            errors |= worst("gradient", found, expected.gradients, NOISE[recipe])
            errors["norm"] = abs(parallel.grad_norm().item() - expected.norm) / expected.norm
        if step == 1:
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), SHARE_OF_NORM * expected.norm)
        else:
            parallel.clip_grad_norm_(SHARE_OF_NORM * expected.norm)
        optimizer.step()
        optimizer.zero_grad()
    found = {n: p.full_tensor() for n, p in parallel.named_parameters()}
    return errors | worst("parameter", found, expected.parameters, NOISE[recipe])


def worst(
    what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], noise: float
) -> dict[str, float]:
    """The largest max|a-b| / max|b| over all tensors."""
    assert set(found) == set(expected)
    largest = max(b.abs().max().item() for b in expected.values())
    worst_error = -1.0
    for name, b in expected.items():
        scale = b.abs().max().item()
        scale = largest if scale < noise * largest else scale
        error = (found[name].to(b.dtype) - b).abs().max().item() / scale
        assert error == error, f"{what} of {name} is not a number"
        worst_error = max(worst_error, error)
    return {what: worst_error}
