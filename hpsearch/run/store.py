"""Filling a parallel model: stored parameters as DTensors, buffers as plain tensors, each rank only its pieces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpsearch.errors import CheckpointError, InternalError
from hpsearch.lower import ParallelProgram, ParamSlot, PipelineProgram
from hpsearch.run import initial
from hpsearch.run.pretrained import match
from hpsearch.run.ranks import Ranks
from hpsearch.run.tree import hang, persistent_buffers


class Store:
    """This rank's pieces of one model, hung under a root module at the model's own names."""

    def __init__(self, program: ParallelProgram | PipelineProgram, ranks: Ranks) -> None:
        self.ranks, self.program = ranks, program
        own = program.params_of(ranks.pipeline_rank) if isinstance(program, PipelineProgram) else program.params
        self.slots: dict[str, ParamSlot] = {slot.fqn: slot for slot in own}
        self.first = {name: slot.fqn for slot in own for name in (slot.fqn, *slot.aliases)}
        """Any name of a parameter → its first."""
        self.elsewhere = {n: s.fqn for s in program.params for n in (s.fqn, *s.aliases) if n not in self.first}
        """Names of parameters that only other pipeline ranks hold."""
        self.params: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}

    def fill(self, model: nn.Module, root: nn.Module, seed: int) -> None:
        """First values, from `model`'s own tensors or its own initialisers, a module at a time."""
        initial.fill(model, self._keep, seed=seed, device=self.ranks.device)
        for name, tensor in initial.plain_attributes(model):
            self.buffers.setdefault(name, tensor.detach().to(self.ranks.device, copy=True))
        lost = [fqn for fqn in self.slots if fqn not in self.params]
        if lost:
            raise InternalError(f"parameter {lost[0]}", f"the program has it, but {type(model).__name__} does not")
        persistent = persistent_buffers(model)
        for fqn, slot in self.slots.items():
            for name in (fqn, *slot.aliases):
                hang(root, name, self.params[fqn])
        for name, buffer in self.buffers.items():
            hang(root, name, buffer, persistent=name in persistent)

    def _keep(self, name: str, full: torch.Tensor) -> None:
        if name in self.elsewhere:
            return
        if name not in self.first:
            self.buffers[name] = full.to(self.ranks.device, copy=True)
            return
        slot = self.slots[self.first[name]]
        local = full[self.ranks.piece(slot.shape, slot.stored)].to(self.ranks.device, slot.master_dtype, copy=True)
        stored = self.ranks.as_dtensor(local.contiguous(), slot.shape, slot.stored)
        self.params[slot.fqn] = nn.Parameter(stored, requires_grad=slot.trainable)

    def local(self) -> dict[str, torch.Tensor]:
        """Local pieces by FQN, sharing memory with the parameters."""
        with torch.no_grad():
            return {fqn: local_of(p) for fqn, p in self.params.items()}

    def holder(self, fqn: str) -> int:
        """The first pipeline rank that holds a parameter: its copy stands for it."""
        return self.program.holders[fqn][0] if isinstance(self.program, PipelineProgram) else 0

    def counts(self, fqn: str) -> bool:
        """Whether this rank's copy of a parameter stands for it."""
        return self.holder(fqn) == self.ranks.pipeline_rank

    def written(self) -> int:
        """Grows whenever a parameter is written to, through its DTensor (optimizers) or its piece (loading)."""
        return sum(p._version + local_of(p)._version for p in self.params.values())

    def gradients(self, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Local gradients as DTensors in the stored layout."""
        return {
            fqn: self.ranks.as_dtensor(g, self.slots[fqn].shape, self.slots[fqn].stored) for fqn, g in local.items()
        }

    def load(self, state: Mapping[str, torch.Tensor], source: str, *, strict: bool) -> None:
        """Copy in tensors by full name: plain global ones, or DTensors in any layout; collective if there are any."""
        wanted = {**self.first, **{name: name for name in self.buffers}}
        unexpected = [name for name in state if name not in wanted and name not in self.elsewhere]
        missing = [fqn for fqn, slot in self.slots.items() if not any(n in state for n in (fqn, *slot.aliases))]
        reshaped = [n for n in state if n in self.first and tuple(state[n].shape) != self.slots[self.first[n]].shape]
        problems = [
            f"{len(names)} {kind}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
            for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
            if names
        ]
        if problems and (strict or reshaped):
            raise CheckpointError(source, f"does not fit the model; {'; '.join(problems)}", "Check model and names.")
        with torch.no_grad():
            for name, value in state.items():
                if name in self.first:
                    self._assign(self.first[name], value)
                elif name in self.buffers:
                    self.buffers[name].copy_(value.full_tensor() if isinstance(value, DTensor) else value)

    def _assign(self, fqn: str, value: torch.Tensor) -> None:
        mine, slot = local_of(self.params[fqn]), self.slots[fqn]
        if isinstance(value, DTensor):
            target = self.params[fqn]
            assert isinstance(target, DTensor)
            if value.device_mesh != target.device_mesh:
                value = value.full_tensor()
            else:
                value = local_of(value.redistribute(placements=target.placements))
                mine.copy_(value)
                return
        mine.copy_(value[self.ranks.piece(slot.shape, slot.stored)])

    def load_pretrained(self, model: nn.Module, folder: Path) -> None:
        """Slices of a Hugging Face checkpoint straight into the stored pieces."""
        wanted = {slot.fqn: (slot.shape, slot.aliases) for slot in self.program.params}
        kept = persistent_buffers(model) & set(self.buffers)
        wanted |= {name: (tuple(self.buffers[name].shape), ()) for name in sorted(kept)}
        with torch.no_grad():
            for name, entry in match(model, folder, wanted).items():
                if name in self.slots:
                    cut = self.ranks.piece(self.slots[name].shape, self.slots[name].stored)
                    local_of(self.params[name]).copy_(entry.read(cut))
                elif name in self.buffers:
                    self.buffers[name].copy_(entry.read(tuple(slice(None) for _ in entry.shape)))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local piece of a DTensor, in place; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
