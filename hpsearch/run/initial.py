"""First values of parameters and buffers, module by module: no rank ever holds the whole model.

A real model's tensors are sliced. A model on the meta device is initialised by its own code: every initialiser
(`reset_parameters`, then `_init_weights` of Hugging Face models) runs once dry, on fake tensors, to see which tensors
it writes; then tensors written together are made real for a moment, their initialisers run in the same order under a
seed of their own, and each rank keeps its slice. Values depend on seed and names, never on plan or ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hpsearch.errors import CaptureError

Keep = Callable[[str, torch.Tensor], None]
"""Called with a tensor's first FQN and its full real value, which is freed afterwards."""


Place = tuple[dict[str, torch.Tensor | None], str]
"""A module's table of parameters or buffers, and the key under which a tensor stands in it."""


@dataclass(frozen=True)
class Initialiser:
    """One call that gives values: `call()` writes into the tensors `names` of the model."""

    call: Callable[[], object]
    names: frozenset[str]


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer once, by its first FQN."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def plain_attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that modules keep as plain attributes; capture carries them as buffers of that name."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                if value.is_meta:
                    problem = "is a tensor attribute without a value"
                    raise CaptureError(
                        f"{prefix}.{name}", problem, "Register it as a buffer, or build the model on cpu."
                    )
                yield (f"{prefix}.{name}" if prefix else name), value


def fill(model: nn.Module, keep: Keep, *, seed: int, device: torch.device) -> None:
    """Hand the first value of every parameter and buffer of `model` to `keep`, few at a time.

    The model itself is left as it was. Raises CaptureError naming the meta tensors that no initialiser writes.
    """
    everything = tensors(model)
    missing = {name for name, tensor in everything.items() if tensor.is_meta}
    for name, tensor in everything.items():
        if name not in missing:
            keep(name, tensor.detach())
    if not missing:
        return
    places = _places(model, everything)
    found = _initialisers(model, everything, places)
    _refuse_orphans(type(model).__name__, sorted(missing - frozenset().union(*(i.names for i in found))))
    for names, calls in _components(found):
        if missing.isdisjoint(names):
            continue
        for name, value in _run({n: everything[n] for n in names}, calls, places, seed, device).items():
            if name in missing:
                keep(name, value)


def _refuse_orphans(model: str, orphans: list[str]) -> None:
    if orphans:
        listed = ", ".join(orphans[:8]) + (f" and {len(orphans) - 8} more" if len(orphans) > 8 else "")
        raise CaptureError(
            f"{model} on the meta device",
            f"expected an initialiser (reset_parameters or _init_weights) for every tensor, but none writes {listed}",
            "Give the owning module a reset_parameters(), build the model on cpu, or load a checkpoint.",
        )


def _places(model: nn.Module, everything: dict[str, torch.Tensor]) -> dict[str, list[Place]]:
    """Where each tensor stands; a tied one in several places."""
    names = {id(tensor): name for name, tensor in everything.items()}
    found: dict[str, list[Place]] = {name: [] for name in everything}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    found[names[id(tensor)]].append((table, key))
    return found


@contextmanager
def _replaced(values: dict[str, torch.Tensor], places: dict[str, list[Place]]) -> Iterator[None]:
    """The model with other tensors in the places of `values`, for a moment."""
    before = [(table, key, table[key]) for name in values for table, key in places[name]]
    try:
        for name, value in values.items():
            for table, key in places[name]:
                old = table[key]
                table[key] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        yield
    finally:
        for table, key, old in before:
            table[key] = old


class _ReadsAreZero(TorchDispatchMode):
    """Reading a number out of a fake tensor gives 0: enough for an initialiser that samples until nothing is left."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].dtype.is_floating_point else 0
        return func(*args, **(kwargs or {}))


def _initialisers(
    model: nn.Module, everything: dict[str, torch.Tensor], places: dict[str, list[Place]]
) -> list[Initialiser]:
    """Dry run of every initialiser on fake tensors, noting what each writes.

    Fake and not meta: torch's own `trunc_normal_` leaves a meta tensor alone.
    """
    found = []
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        ghosts = {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for n, t in everything.items()}
    with _replaced(ghosts, places), torch.no_grad(), fake, _ReadsAreZero():
        now = {id(table[key]): name for name, spots in places.items() for table, key in spots}
        for module, call in _calls(model):
            inside = {now[id(t)]: t for t in (*module.parameters(), *module.buffers())}
            before = {name: tensor._version for name, tensor in inside.items()}
            call()
            names = frozenset(name for name, tensor in inside.items() if tensor._version != before[name])
            if names:
                found.append(Initialiser(call, names))
    return found


def _calls(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    """Initialisers in the order in which a constructor and then `from_config` would run them: children first."""
    for module in _post_order(model):
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(method := getattr(module, name, None)):
                yield module, method
    yield from _hugging_face_calls(model, getattr(model, "_init_weights", None))


def _hugging_face_calls(
    module: nn.Module, owner: Callable[[nn.Module], object] | None
) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    for child in module.children():
        yield from _hugging_face_calls(child, getattr(child, "_init_weights", None) or owner)
    if owner is not None:
        yield module, partial(owner, module)


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _post_order(child)
    yield module


def _components(found: list[Initialiser]) -> Iterator[tuple[list[str], list[Callable[[], object]]]]:
    """Initialisers that write a common tensor belong together; each group with its tensors, in call order."""
    leader: dict[str, str] = {}

    def top(name: str) -> str:
        while leader.setdefault(name, name) != name:
            name = leader[name]
        return name

    for initialiser in found:
        first, *rest = sorted(initialiser.names)
        top(first)
        for name in rest:
            leader[top(name)] = top(first)
    names: dict[str, list[str]] = {}
    calls: dict[str, list[Callable[[], object]]] = {}
    for name in leader:
        names.setdefault(top(name), []).append(name)
    for initialiser in found:
        calls.setdefault(top(min(initialiser.names)), []).append(initialiser.call)
    for key, members in names.items():
        yield sorted(members), calls[key]


def _run(
    members: dict[str, torch.Tensor],
    calls: list[Callable[[], object]],
    places: dict[str, list[Place]],
    seed: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Real values of `members`, from their initialisers under a seed made of `seed` and the first name."""
    real = {name: torch.empty_like(tensor, device=device) for name, tensor in members.items()}
    digest = hashlib.sha256(f"{seed} {min(members)}".encode()).digest()
    devices = [] if device.type == "cpu" else [device]
    with _replaced(real, places), torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        for call in calls:
            call()
    return real
