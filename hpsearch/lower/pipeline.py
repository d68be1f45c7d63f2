"""`PipelineProgram`: a program for each stage, the schedule that runs them, and who holds which parameter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hpsearch.layout import Mesh
from hpsearch.lower.parameters import ParamSlot
from hpsearch.lower.program import InputSlot, ParallelProgram
from hpsearch.schedule import Schedule


@dataclass(frozen=True)
class PipelineProgram:
    """Stages stand on ranks of the pipeline axis, several on one where the schedule says so; each rank of that axis is
    a whole mesh."""

    stages: tuple[ParallelProgram, ...]
    schedule: Schedule
    params: tuple[ParamSlot, ...]
    """Of the whole model."""
    inputs: tuple[InputSlot, ...]
    """The tensors of the batch, all of them; a stage reads some."""

    @property
    def name(self) -> str:
        return self.stages[0].name

    @property
    def mesh(self) -> Mesh:
        """Of one stage."""
        return self.stages[0].mesh

    @property
    def loss_reduction(self) -> str:
        return self.stages[0].loss_reduction

    @property
    def micro_batches(self) -> int:
        return self.stages[0].micro_batches

    @cached_property
    def code(self) -> str:
        return "\n\n".join(f"# stage {i}\n{stage.code}" for i, stage in enumerate(self.stages))

    @cached_property
    def loss_stage(self) -> int:
        return next(i for i, stage in enumerate(self.stages) if stage.loss_name)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank of the pipeline axis holds."""
        return tuple(stage for stage, holder in enumerate(self.schedule.placement) if holder == rank)

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Parameter → the ranks of the pipeline axis that hold it; one that nothing reads is held by the first."""
        found: dict[str, set[int]] = {slot.fqn: set() for slot in self.params}
        for stage, rank in zip(self.stages, self.schedule.placement, strict=True):
            for slot in stage.params:
                found[slot.fqn].add(rank)
        return {fqn: tuple(sorted(ranks or {0})) for fqn, ranks in found.items()}

    def slot(self, fqn: str) -> ParamSlot:
        return self._slots[fqn]

    @cached_property
    def _slots(self) -> dict[str, ParamSlot]:
        return {slot.fqn: slot for slot in self.params}

    def params_of(self, rank: int) -> tuple[ParamSlot, ...]:
        return tuple(slot for slot in self.params if rank in self.holders[slot.fqn])

    @property
    def buffers(self) -> tuple[str, ...]:
        """FQNs of the buffers that any stage reads."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.buffers))

    def __str__(self) -> str:
        lines = [f"{self.name} in {len(self.stages)} stages on {len(self.schedule.ranks)} x ({self.mesh})"]
        return "\n".join([*lines, str(self.schedule), *map(str, self.stages)])
