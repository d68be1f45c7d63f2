"""What the ranks do in the tests of this room; each function runs on every rank of a pool and returns plain values."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

import hpsearch
from hpsearch.plan import Plan
from hpsearch.run import ParallelModule
from tests.end_to_end.models import build

LEARNING_RATE = 1e-2


def parallel_llama(plan: bytes, **options: Any) -> tuple[ParallelModule, dict[str, Any]]:
    case = build("llama", torch.float64)
    return hpsearch.compile(case.model, plan=Plan.from_bytes(plan), recipe="fp64", **options), case.batch


def failure(call: Any) -> tuple[str, str]:
    """Class and text of the error that `call` ends in."""
    try:
        call()
    except hpsearch.HpsearchError as error:
        return type(error).__name__, str(error)
    return "", ""


def disagree(plans: list[bytes | None]) -> tuple[str, str, float]:
    start = time.monotonic()
    given = plans[dist.get_rank()]
    case = build("llama", torch.float64)
    plan = None if given is None else Plan.from_bytes(given)
    found = failure(lambda: hpsearch.compile(case.model, plan=plan, recipe="fp64", example=case.batch))
    return *found, time.monotonic() - start


def search_fails() -> tuple[str, str]:
    case = build("llama", torch.float64)
    return failure(lambda: hpsearch.compile(case.model, "no-such-cluster", recipe="fp64", example=case.batch))


def another_model(plan: bytes) -> tuple[str, str]:
    """Rank 1 alone comes with a model of other sizes."""
    family = "qwen2" if dist.get_rank() == 1 else "llama"
    case = build(family, torch.float64)
    given = Plan.from_bytes(plan)
    return failure(lambda: hpsearch.compile(case.model, plan=given, recipe="fp64", example=case.batch))


def bad_batches(plan: bytes) -> dict[str, tuple[str, str]]:
    parallel, batch = parallel_llama(plan)
    local = parallel.local_rows(batch)
    rank = dist.get_rank()
    found = {}

    def with_leaf(name: str, value: torch.Tensor, only: int | None = None) -> dict[str, Any]:
        return {**local, name: value} if only in (None, rank) else local

    ids, whole = local["input_ids"], batch["input_ids"]
    cases = {
        "a row too few": with_leaf("input_ids", ids[:-1]),
        "a row too few on rank 1": with_leaf("input_ids", ids[:-1], only=1),
        "floats": with_leaf("input_ids", ids.double()),
        "another leaf": {**local, "position": ids},
        "longer on rank 1": {k: torch.cat([v, v], 1) if rank == 1 else v for k, v in local.items() if k != "use_cache"}
        | {"use_cache": False},
        "global batches that differ": {**batch, "input_ids": (whole + rank) % 96},
        "other rows on rank 1": with_leaf("input_ids", (ids + 1) % 96, only=1),
    }
    for name, bad in cases.items():
        found[name] = failure(lambda bad=bad: parallel.step(bad))
    found["good"] = failure(lambda: parallel.step(local))
    return found


def uneven_targets(plan: bytes) -> tuple[str, str]:
    """A loss that takes its own mean, over micro-batches with different numbers of targets."""
    case = build("t5", torch.float64)
    parallel = hpsearch.compile(case.model, plan=Plan.from_bytes(plan), recipe="fp64")
    local = parallel.local_rows(case.batch)
    return failure(lambda: parallel.step(local))


def several_shapes(plan: bytes, batches: list[dict[str, Any]]) -> list[float]:
    """Losses of batches of several lengths, whole on every rank, with gradients and without."""
    parallel, _ = parallel_llama(plan)
    found = []
    for batch in [*batches, batches[0]]:
        found.append(parallel.step(batch).item())
        with torch.no_grad():
            found.append(parallel.eval()(**batch).item())
        parallel.train()
    return found


def names(plan: bytes) -> dict[str, Any]:
    case = build("qwen2", torch.float64)
    parallel = hpsearch.compile(case.model, plan=Plan.from_bytes(plan), recipe="fp64").prepare(case.batch)
    state = parallel.state_dict()
    full = parallel.state_dict(full=True)
    twice = parallel.get_parameter("lm_head.weight") is parallel.get_parameter("model.embed_tokens.weight")
    parallel.load_state_dict(case.model.state_dict())
    after = parallel.state_dict(full=True)
    return {
        "sharded": list(state),
        "full": full,
        "same after loading": all(torch.equal(full[n], after[n]) for n in full),
        "parameters": [n for n, _ in parallel.named_parameters()],
        "tied": twice,
        "errors": failure(lambda: parallel.load_state_dict({"model.norm.weight": torch.zeros(48)})),
    }


def train(
    plan: bytes, steps: int, load: Path | None = None, save: Path | None = None, optimizer: str = "AdamW"
) -> dict[str, Any]:
    """Train on from `load`, and write to `save`; the full parameters on rank 0."""
    parallel, batch = parallel_llama(plan)
    parallel.prepare(batch)
    optimizer_ = getattr(torch.optim, optimizer)(parallel.parameters(), lr=LEARNING_RATE)
    if load is not None:
        parallel.load(load, optimizer_)
    for _ in range(steps):
        parallel.step(batch)
        optimizer_.step()
        optimizer_.zero_grad()
    if save is not None:
        parallel.save(save, optimizer_)
    return parallel.state_dict(full=True)


def saved_behind(plan: bytes, save: Path) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Trains on while a checkpoint is written: parameters when the saving began, those at the end, whether it was whole
    as soon as `wait` returned."""
    parallel, batch = parallel_llama(plan)
    parallel.prepare(batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    _steps(parallel, optimizer, batch, 2)
    before = parallel.state_dict(full=True)
    saving = parallel.save(save, optimizer, wait=False)
    _steps(parallel, optimizer, batch, 3)
    saving.wait()
    return before, parallel.state_dict(full=True), saving.is_done and (save / "manifest.json").exists()


def saves_in_a_row(plan: bytes, save: Path) -> dict[str, Any]:
    """Two savings to one folder, the second begun at once, and a load that waits for it."""
    parallel, batch = parallel_llama(plan)
    parallel.prepare(batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    for _ in range(2):
        _steps(parallel, optimizer, batch, 1)
        parallel.save(save, optimizer, wait=False)
    second = parallel.state_dict(full=True)
    _steps(parallel, optimizer, batch, 1)
    parallel.load(save, optimizer)
    found = parallel.state_dict(full=True)
    return {name: (found[name] - second[name]).abs().max().item() for name in second}


def killed_while_saving(plan: bytes, save: Path) -> None:
    """Saves once, trains on, and every rank is killed while a second saving is being written."""
    parallel, batch = parallel_llama(plan)
    parallel.prepare(batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    _steps(parallel, optimizer, batch, 1)
    parallel.save(save, optimizer, wait=False).wait()
    _steps(parallel, optimizer, batch, 1)
    _slow_writer()
    parallel.save(save, optimizer, wait=False)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _slow_writer() -> None:
    """Pieces are written, but nobody gets to say so."""
    plain = FileSystemWriter.write_data

    def write_data(self: Any, *args: Any) -> Any:
        plain(self, *args).wait()
        time.sleep(60)

    FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


def no_room(plan: bytes, save: Path) -> tuple[str, str]:
    """The disk of rank 1 is full."""
    parallel, batch = parallel_llama(plan)
    parallel.prepare(batch)

    def write_data(self: Any, *args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    return failure(lambda: parallel.save(save, wait=False).wait())


def _steps(parallel: ParallelModule, optimizer: torch.optim.Optimizer, batch: Any, count: int) -> None:
    for _ in range(count):
        parallel.step(batch)
        optimizer.step()
        optimizer.zero_grad()


def load_fails(plan: bytes, folder: Path, with_optimizer: bool = True) -> tuple[str, str]:
    parallel, batch = parallel_llama(plan)
    parallel.prepare(batch)
    optimizer = torch.optim.AdamW(parallel.parameters()) if with_optimizer else None
    return failure(lambda: parallel.load(folder, optimizer))


def pretrained(plan: bytes, folder: Path, family: str = "llama") -> Any:
    """A model on the meta device, filled from a checkpoint directory."""
    from tests.end_to_end.models import FAMILIES

    with torch.device("meta"):
        model = FAMILIES[family]().model.to(torch.float64)
    batch = build(family, torch.float64).batch
    parallel = hpsearch.compile(model, plan=Plan.from_bytes(plan), recipe="fp64", example=batch)
    error = failure(lambda: parallel.load_pretrained(folder))
    return error, parallel.state_dict(full=True)


def norms(plan: bytes) -> dict[str, Any]:
    """Norms by ours and by torch's on the same DTensors, and what clipping leaves."""
    parallel, batch = parallel_llama(plan)
    parallel.step(batch)
    found: dict[str, Any] = {
        "ours": parallel.grad_norm().item(),
        "infinite": parallel.grad_norm(float("inf")).item(),
        "torch": torch.nn.utils.get_total_norm([p.grad for p in parallel.parameters()]).full_tensor().item(),
    }
    full = {n: p.grad.full_tensor() for n, p in parallel.named_parameters()}
    found["plain"] = torch.nn.utils.get_total_norm(full.values()).item()
    found["plain infinite"] = max(g.abs().max().item() for g in full.values())
    parallel.clip_grad_norm_(0.1)
    found["clipped"] = parallel.grad_norm().item()
    return found


def decay_groups(plan: bytes) -> list[str]:
    """Parameters that a step with zero gradients and weight decay on matrices alone changes."""
    parallel, batch = parallel_llama(plan)
    parallel.prepare(batch)
    before = parallel.state_dict(full=True)
    matrices = [p for p in parallel.parameters() if p.ndim >= 2]
    rest = [p for p in parallel.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], weight_decay=0.1)
    for parameter in parallel.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = parallel.state_dict(full=True)
    return [name for name in before if not torch.equal(before[name], after[name])]


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, a scalar, and a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(10, 7)
        self.narrow = nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.linspace(1, 2, 6), requires_grad=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = self.narrow(torch.tanh(self.wide(x))) * self.scale * self.frozen
        return nn.functional.mse_loss(found, target)


def uneven_case() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Uneven().double(), (torch.randn(12, 10).double(), torch.randn(12, 6).double())


def uneven(plan: bytes, save: Path | None = None, load: Path | None = None) -> dict[str, Any]:
    model, batch = uneven_case()
    parallel = hpsearch.compile(model, plan=Plan.from_bytes(plan), recipe="fp64").prepare(batch)
    if load is not None:
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        parallel.load(load)
    loss = parallel.step(batch)
    grads = {n: p.grad.full_tensor() for n, p in parallel.named_parameters() if p.grad is not None}
    if save is not None:
        parallel.save(save)
    shapes = {n: tuple(p.to_local().shape) for n, p in parallel.named_parameters()}
    return {"loss": loss.item(), "grads": grads, "full": parallel.state_dict(full=True), "shapes": shapes}
