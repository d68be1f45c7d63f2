"""What the ranks do in the cases; each function runs on every rank of a pool and returns plain values."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.nn import functional as F

import hpsearch
from hpsearch.measure import points, profile
from hpsearch.measure.session import measure_here
from hpsearch.plan import Plan
from hpsearch.run import ParallelModule
from hpsearch.run.gradients import clip, global_norm
from tests.cases.plans import slow_devices


def short_of_memory(folder: Path) -> tuple[dict[str, list[str]], list[str]]:
    """A profile with a matmul that is too large for the last rank: what has no price, and what has."""
    points.MATMUL_SHAPES = ((64, 64),)
    effort = points.Effort("quick", (512,), (4096,), (16, 2**20), 1.0, 0.001, 0.001, 1, 1, 0, 0.0)
    profile.EFFORTS["quick"] = effort
    if dist.get_rank() == dist.get_world_size() - 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    found = measure_here(folder, effort)
    if found is None:
        return {}, []
    profile.finish(folder, *found, most_spread=1e6)
    return profile.unmeasured(found[0]), [sample.key for sample in found[0].found.values() if sample.seconds]


def norms() -> dict[str, float]:
    """A replicated gradient of norm 3 and one of which every rank holds a piece of norm 4."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = DTensor.from_local(torch.tensor([3.0, 0.0]), mesh, [Replicate()], run_check=False)
    cut = DTensor.from_local(torch.tensor([0.0, 4.0]), mesh, [Shard(0)], run_check=False)
    parameters = [nn.Parameter(torch.zeros_like(t)) for t in (whole, cut)]
    for parameter, grad in zip(parameters, (whole, cut), strict=True):
        parameter.grad = grad
    grads = [p.grad for p in parameters if p.grad is not None]
    found = {"two": global_norm(grads).item(), "infinite": global_norm(grads, float("inf")).item()}
    clip(parameters, global_norm(grads), 1.0)
    return found | {"clipped": global_norm(grads).item()}


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(F.dropout(self.inner(x).relu(), 0.3, self.training)).square().mean()


def dropped(fix: dict[str, int]) -> list[float]:
    """Losses of three steps that nothing is learned in; the model's first values are the search's own."""
    with torch.device("meta"):
        model = Dropped().double()
    devices = dist.get_world_size() if dist.is_initialized() else 1
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)
    parallel = hpsearch.compile(model, slow_devices(devices), recipe="fp64", fix=fix, example=(x,))
    return [parallel.step((x,)).item() for _ in range(3)]


class Decayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh().square().mean()


def decayed_case() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Decayed(), (torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double(),)


def decay(plan: bytes) -> list[str]:
    """Parameters that a step with zero gradients changes when only those of two dims are decayed."""
    model, batch = decayed_case()
    parallel = hpsearch.compile(model, plan=Plan.from_bytes(plan), recipe="fp64").prepare(batch)
    before = {n: p.full_tensor().clone() for n, p in parallel.named_parameters()}
    groups = [
        {"params": [p for p in parallel.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parallel.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    for parameter in parallel.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return [n for n, p in parallel.named_parameters() if not torch.equal(p.full_tensor(), before[n])]


class Saved(nn.Module):
    """Parameters huge and tiny beside each other, and one that four ranks cut into 2+2+2+0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(1517, 8)
        self.gain, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) * self.gain + self.shift
        return self.down(self.up(x).tanh()).square().mean()


def saved_case() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Saved(), (torch.randint(0, 1517, (12, 4), generator=torch.Generator().manual_seed(1)),)


def train(plan: bytes, steps: int, load: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    """Adam steps from `load`, then the full state, this rank's rows of `up.bias`, and the moments."""
    model, batch = saved_case()
    parallel = hpsearch.compile(model, plan=Plan.from_bytes(plan), recipe="fp64").prepare(batch)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-2)
    if load is not None:
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        parallel.load(load, optimizer)
    for _ in range(steps):
        parallel.step(batch)
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        parallel.save(save, optimizer)
    moments = {n: _full(optimizer.state[p]["exp_avg"]) for n, p in parallel.named_parameters()}
    local = parallel.get_parameter("up.bias").to_local().numel()
    return {"full": parallel.state_dict(full=True), "moments": moments, "local": local}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loads(plan: bytes, folder: Path) -> str:
    """What loading says, or nothing."""
    parallel: ParallelModule = hpsearch.compile(saved_case()[0], plan=Plan.from_bytes(plan), recipe="fp64")
    parallel.prepare(saved_case()[1])
    try:
        parallel.load(folder, torch.optim.Adam(parallel.parameters(), lr=1e-2))
    except hpsearch.HpsearchError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Numbered(nn.Module):
    """Layers whose weights are their numbers, from one on."""

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            nn.init.constant_(self.linear.weight, number)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.linear(x)).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(self.Block(i + 1) for i in range(7))
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def numbered_case() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Numbered(), (torch.randint(0, 16, (4, 3), generator=torch.Generator().manual_seed(1)),)


def numbered(plan: bytes, save: Path | None = None, load: Path | None = None) -> dict[str, float]:
    """The one number that each of this rank's parameters is made of; loaded over zeros."""
    model, batch = numbered_case()
    parallel = hpsearch.compile(model, plan=Plan.from_bytes(plan), recipe="fp64").prepare(batch)
    if load is not None:
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        parallel.load(load)
    if save is not None:
        parallel.save(save)
    whole = {name: _full(parameter.detach()) for name, parameter in parallel.named_parameters()}
    return {name: float(t.flatten()[0]) for name, t in whole.items() if bool((t == t.flatten()[0]).all())}
