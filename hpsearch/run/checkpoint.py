"""Checkpoints: written under one plan, read under any other, all of it or nothing.

`torch.distributed.checkpoint` writes every rank's pieces beside the goal (`folder.partial`); rank 0 adds a manifest of
file lengths and renames. A folder without a manifest, or with a file of another length, never loads.
Optimizer state stands under `optimizer.<fqn>.<key>`, so it follows its parameter to any layout.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from hpsearch.errors import CheckpointError
from hpsearch.lower import ParamSlot
from hpsearch.plan import Plan
from hpsearch.run.launch import together
from hpsearch.run.store import Store
from hpsearch.run.tree import names_of

FORMAT = "hpsearch.checkpoint/1"
MANIFEST = "manifest.json"


def gathered(state: dict[str, Any], store: Store) -> dict[str, Any]:
    """Plain CPU tensors on rank 0, an empty dict elsewhere; one tensor at a time is whole. Collective."""
    found: dict[str, Any] = {}
    for slot in store.program.params:
        whole = _whole(state.get(slot.fqn), slot, store)
        found |= dict.fromkeys((slot.fqn, *slot.aliases), whole)
    found |= {name: value.detach().cpu() for name, value in state.items() if name not in store.first}
    return found if dist.get_rank() == 0 else {}


def _whole(value: torch.Tensor | None, slot: ParamSlot, store: Store) -> torch.Tensor | None:
    """A parameter as a plain CPU tensor on rank 0, from the first pipeline rank that holds it; None elsewhere."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    holder = store.holder(slot.fqn) * store.ranks.mesh.num_ranks
    if holder and dist.get_rank() == holder:
        assert whole is not None
        dist.send(whole.detach().contiguous(), 0)
    if dist.get_rank() != 0:
        return None
    if holder:
        whole = torch.empty(slot.shape, dtype=slot.master_dtype, device=store.ranks.device)
        dist.recv(whole, holder)
    assert whole is not None
    return whole.detach().cpu()


def save(folder: Path, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Write model (and optimizer) to `folder`, replacing a checkpoint that is there; `step`: how many were taken.
    Collective."""
    state, entries = begin(folder, model, plan, optimizer)
    together(f"checkpoint {folder}", lambda: _write(state, partial_of(folder)))
    together(f"checkpoint {folder}", lambda: finish(folder, plan, entries, step))


def partial_of(folder: Path) -> Path:
    """Where `folder` is written before it is whole."""
    return folder.with_name(folder.name + ".partial")


def begin(
    folder: Path, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Any], Any]:
    """Empties the place beside `folder`; tensors to be written there by name, and what is no tensor. Collective."""
    together(f"checkpoint {folder}", lambda: _clear(partial_of(folder)))
    tensors, entries = _optimizer_state(model, optimizer) if optimizer is not None else ({}, None)
    entries = _joined(entries) if plan.pipeline_ranks > 1 else entries
    return {f"model.{name}": value for name, value in model.state_dict().items()} | tensors, entries


def _clear(partial: Path) -> None:
    if dist.get_rank() == 0:
        try:
            shutil.rmtree(partial, ignore_errors=False) if partial.exists() else None
            partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(
                str(partial), f"cannot be made ({error.strerror})", "Choose another folder."
            ) from error


def _write(state: dict[str, Any], partial: Path) -> None:
    try:
        dcp.save(state, checkpoint_id=partial)
    except (OSError, dcp.CheckpointException) as error:
        raise unwritten(partial, error) from error


def unwritten(partial: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(str(partial), f"cannot be written ({error})", "The old checkpoint is unchanged.")


def finish(folder: Path, plan: Plan, entries: Any, step: int) -> None:
    """Rank 0 makes what all ranks have written the checkpoint."""
    if dist.get_rank() != 0:
        return
    partial = partial_of(folder)
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    manifest = {
        "format": FORMAT,
        "model": plan.file.model.name,
        "plan": plan.digest,
        "files": files,
        "optimizer": entries,
        "step": step,
    }
    old = folder.with_name(folder.name + ".old")
    try:
        (partial / "plan.json").write_bytes(plan.content)
        with (partial / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        if old.exists():
            shutil.rmtree(old)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        if old.exists():
            shutil.rmtree(old)
    except OSError as error:
        raise CheckpointError(
            str(folder), f"cannot be written ({error.strerror})", f"Look at {partial} and {old}."
        ) from error


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, elsewhere: Collection[str] = ()
) -> int:
    """Read `folder` into the model's (and optimizer's) own pieces; the steps that were taken. `elsewhere` names the
    parameters of other pipeline ranks. Collective."""
    manifest = together(f"checkpoint {folder}", lambda: _manifest(folder))
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    sizes = together(f"checkpoint {folder}", lambda: _check(folder, state, manifest, elsewhere))
    slots: dict[str, Any] = {}
    if optimizer is not None:
        slots = together(f"checkpoint {folder}", lambda: _optimizer_slots(folder, model, optimizer, manifest, sizes))
    together(f"checkpoint {folder}", lambda: _read({**state, **slots}, folder))
    if optimizer is not None:
        _put_optimizer(model, optimizer, slots, manifest["optimizer"])
    return int(manifest.get("step", 0))


def _read(state: dict[str, Any], folder: Path) -> None:
    try:
        dcp.load(state, checkpoint_id=folder)
    except (OSError, dcp.CheckpointException) as error:
        raise CheckpointError(str(folder), f"cannot be read ({error})", "Use an older checkpoint.") from error


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        old = folder.with_name(folder.name + ".old")
        remedy = (
            f"{old} holds the checkpoint before it."
            if old.exists()
            else "Its writing was cut short, or the path is wrong."
        )
        raise CheckpointError(str(folder), f"has no {MANIFEST} ({error.strerror})", remedy) from error
    except ValueError as error:
        raise CheckpointError(str(folder), f"{MANIFEST} is damaged ({error})", "Use an older checkpoint.") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(str(folder), f"expected format {FORMAT}, but found {manifest.get('format')}")
    for name, size in manifest["files"].items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            problem = f"expected {size} bytes, but found {'no such file' if found is None else f'{found} bytes'}"
            raise CheckpointError(str(path), problem, "The checkpoint is damaged; use an older one.")
    return manifest


def _check(folder: Path, state: dict[str, Any], manifest: dict[str, Any], elsewhere: Collection[str]) -> dict[str, Any]:
    """Shapes of the tensors on disk, by name, after comparing the model's with them."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    sizes = {name: tuple(m.size) for name, m in metadata.items() if hasattr(m, "size")}
    missing = [name for name in state if name not in sizes]
    known = {*state, *(f"model.{name}" for name in elsewhere)}
    extra = [name for name in sizes if name.startswith("model.") and name not in known]
    reshaped = [n for n, t in state.items() if n in sizes and sizes[n] != tuple(t.shape)]
    problems = [
        f"{len(names)} {kind}, first {names[0].removeprefix('model.')}"
        for kind, names in (("missing", missing), ("unexpected", extra), ("of another shape", reshaped))
        if names
    ]
    if problems:
        problem = f"a checkpoint of {manifest['model']} does not fit the model; {'; '.join(problems)}"
        raise CheckpointError(str(folder), problem, "Load it into the model it was saved from.")
    return sizes


def _parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[tuple[str, torch.Tensor]]]:
    """FQN and parameter of every member of every group."""
    names = names_of(model.named_parameters())
    found = []
    for group in optimizer.param_groups:
        strangers = sum(id(p) not in names for p in group["params"])
        if strangers:
            problem = f"{strangers} of its parameters are not the parallel model's"
            raise CheckpointError("optimizer", problem, "Build it on parallel.parameters().")
        found.append([(names[id(p)], p) for p in group["params"]])
    return found


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], Any]:
    """Tensors of the optimizer by name, and everything that is not a tensor, as JSON."""
    tensors: dict[str, Any] = {}
    plain: dict[str, dict[str, Any]] = {}
    groups = []
    for group, members in zip(optimizer.param_groups, _parameters_of(model, optimizer), strict=True):
        settings = {key: _jsonable(value) for key, value in group.items() if key != "params"}
        groups.append({"settings": settings, "parameters": [name for name, _ in members]})
        for name, parameter in members:
            plain[name] = {"tensors": [], "values": {}}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value
                    plain[name]["tensors"].append(key)
                else:
                    plain[name]["values"][key] = value
    return tensors, {"groups": groups, "state": plain, "type": type(optimizer).__name__}


def _joined(own: Any) -> Any:
    """What every pipeline rank says of the optimizer's state of its own parameters. Collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    if own is None:
        return None
    groups: list[dict[str, Any]] = [{**group, "parameters": []} for group in own["groups"]]
    for one in told:
        for group, theirs in zip(groups, one["groups"], strict=True):
            group["parameters"] = list(dict.fromkeys([*group["parameters"], *theirs["parameters"]]))
    return {**own, "groups": groups, "state": {name: state for one in told for name, state in one["state"].items()}}


def _jsonable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _optimizer_slots(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, manifest: dict[str, Any], sizes: dict[str, Any]
) -> dict[str, Any]:
    """Empty tensors in this model's layouts for every tensor of the saved optimizer."""
    saved = manifest["optimizer"]
    if saved is None:
        raise CheckpointError(str(folder), "holds no optimizer state", "Load it without optimizer to start afresh.")
    if saved["type"] != type(optimizer).__name__:
        problem = f"holds the state of {saved['type']}, but the optimizer is {type(optimizer).__name__}"
        raise CheckpointError(str(folder), problem, "Build the same optimizer.")
    stepped = max((state["tensors"] for state in saved["state"].values()), key=len, default=[])
    slots: dict[str, Any] = {}
    lost = []
    for name, parameter in (member for group in _parameters_of(model, optimizer) for member in group):
        keys = saved["state"].get(name, {"tensors": []})["tensors"]
        keys = stepped if parameter.requires_grad else keys
        for key in keys:
            full = f"optimizer.{name}.{key}"
            if full not in sizes:
                lost.append(full)
            elif sizes[full] == tuple(parameter.shape) and key != "step":
                slots[full] = torch.zeros_like(parameter, requires_grad=False)
            else:
                slots[full] = torch.zeros(sizes[full], dtype=torch.float32)
    if lost:
        problem = f"{len(lost)} tensors of optimizer state are missing, first {lost[0]}"
        raise CheckpointError(str(folder), problem, "Load it without optimizer to start afresh.")
    return slots


def _put_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, slots: dict[str, Any], saved: Any) -> None:
    settings = {name: group["settings"] for group in saved["groups"] for name in group["parameters"]}
    for group, members in zip(optimizer.param_groups, _parameters_of(model, optimizer), strict=True):
        for name, parameter in members:
            prefix = f"optimizer.{name}."
            own = {key.removeprefix(prefix): value for key, value in slots.items() if key.startswith(prefix)}
            own |= saved["state"].get(name, {"values": {}})["values"]
            if own:
                optimizer.state[parameter] = own
        if members and members[0][0] in settings:
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in settings[members[0][0]].items()})
