"""`ParallelProgram`: the noun of this room: readable Python, the actions that run it, and what it stores."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

import torch

from hpsearch.layout import Layout, Mesh
from hpsearch.lower.actions import Action, UnitParams
from hpsearch.lower.dropout import Clock
from hpsearch.lower.executor import Bound
from hpsearch.lower.outer import Unit
from hpsearch.lower.parameters import ParamSlot
from hpsearch.lower.pieces import Piece
from hpsearch.lower.statement import Statement


@dataclass(frozen=True)
class InputSlot:
    """One tensor of the batch as a rank passes it."""

    name: str
    shape: tuple[int, ...]
    """Global shape of a micro-batch."""
    dtype: torch.dtype
    layout: Layout
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class BufferSlot:
    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Passed:
    """A tensor that one stage hands to another."""

    name: str
    shape: tuple[int, ...]
    """Of a rank's piece."""
    dtype: torch.dtype


@dataclass(frozen=True)
class StageEnds:
    """What a stage of a pipeline takes and gives, and the two halves of its backward."""

    index: int
    leaves: tuple[str, ...]
    """Tensors of the batch that it reads: its first inputs; `takes` are the others."""
    takes: tuple[Passed, ...]
    gives: tuple[str, ...]
    takes_back: tuple[Passed, ...]
    gives_back: tuple[str, ...]
    input_params: tuple[UnitParams, ...]
    """As `unit_params`, of backward's input half."""
    weight_params: tuple[UnitParams, ...]
    input_actions: tuple[Action, ...]
    weight_actions: tuple[Action, ...]


@dataclass(frozen=True)
class ParallelProgram:
    """A training step that every rank runs alike.

    `code` is Python source; what it says is what runs. `actions` is the order in which its functions run for one
    micro-batch. A rank makes it runnable with `bind`.
    """

    name: str
    mesh: Mesh
    recipe: str
    params: tuple[ParamSlot, ...]
    inputs: tuple[InputSlot, ...]
    buffer_slots: tuple[BufferSlot, ...]
    loss_reduction: str
    """How micro-batches make up the batch, see ModelGraph."""
    micro_batches: int
    """Micro-batches in a step, as planned; counts in `collectives_of` are for that many."""
    recompute: dict[str, str]
    offload: dict[str, tuple[int, ...]]
    """Block class → places, in the list that a call keeps for backward, of the tensors that wait in host memory."""
    prefixes: tuple[str, ...]
    """FQN prefix of each instance of a block."""
    canonical: dict[str, str]
    """FQN, alias or not → FQN of the parameter."""
    pieces: dict[str, Piece]
    units: tuple[Unit, ...]
    unit_params: tuple[UnitParams, ...]
    forward_actions: tuple[Action, ...]
    backward_actions: tuple[Action, ...]
    last_reads: tuple[frozenset[str], ...]
    """For each unit the names of the outer graph that no later unit reads."""
    input_names: tuple[str, ...]
    loss_name: str
    loss_statements: tuple[Statement, ...]
    tangent_name: str
    tangent_dtype: torch.dtype
    code: str
    ends: StageEnds | None = None
    """Of a stage of a pipeline; a whole model has none."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """Of one micro-batch, forward and then backward."""
        return self.forward_actions + self.backward_actions

    @property
    def buffers(self) -> tuple[str, ...]:
        """FQNs of the buffers it reads."""
        return tuple(slot.fqn for slot in self.buffer_slots)

    @cached_property
    def compiled(self) -> CodeType:
        """The code object; its lines are known to tracebacks."""
        filename = f"<hpsearch program {self.name} {hashlib.sha256(self.code.encode()).hexdigest()[:8]}>"
        linecache.cache[filename] = (len(self.code), None, self.code.splitlines(keepends=True), filename)
        return compile(self.code, filename, "exec")

    def bind(
        self,
        groups: Mapping[str, Any],
        coordinate: Mapping[str, int],
        device: torch.device | str,
        clock: Clock | None = None,
        inductor: bool = False,
    ) -> Bound:
        """The program on one rank: `groups` maps each axis to its process group's name, `coordinate` to its place;
        `clock` says which step random numbers are for; with `inductor` its functions are compiled when they first run.
        """
        return Bound(self, groups, coordinate, torch.device(device), clock, inductor)

    def fqn(self, unit: Unit, local: str) -> str:
        """The parameter (or buffer) that `local` is in a unit's graph."""
        name = local if unit.instance < 0 else f"{self.prefixes[unit.instance]}.{local}"
        return self.canonical.get(name, name)

    def slot(self, fqn: str) -> ParamSlot:
        return self._slots[fqn]

    @cached_property
    def _slots(self) -> dict[str, ParamSlot]:
        return {slot.fqn: slot for slot in self.params}

    def runs_again(self, unit: Unit) -> bool:
        """Whether the forward of a block runs again in this unit, a backward."""
        graph = self.pieces[unit.piece].graph
        return unit.phase == "backward" and unit.instance >= 0 and self.recompute.get(graph) == "full"

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.mesh}, {self.recipe}: actions of one micro-batch"]
        return "\n".join([*lines, *(f"  {action}" for action in self.actions)])
