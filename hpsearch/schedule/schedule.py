"""A schedule is text: `0F0 0B0 0F1 0B1`, one line a rank. An action is stage, kind, micro-batch.

Kinds are those of torch.distributed.pipelining: F forward, B whole backward, I its input part, W its weight part.
`(0F4;7B2)OVERLAP_F_B` is a forward and a backward of two micro-batches that a rank runs as one. Plans of one stage run
forward and backward of each micro-batch in turn; pipelines add stages, not another notation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hpsearch.errors import PlanError

Ints = NDArray[np.int64]
KIND_ORDER = {kind: i for i, kind in enumerate("FIWB")}
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")


@dataclass(frozen=True, order=True)
class Action:
    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self,)

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as `text`."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise PlanError(f"action {text!r}", "expected stage, kind (F, B, I, W) and micro-batch", "Write 2F0.")
        return Action(int(found[1]), found[2], int(found[3]))


@dataclass(frozen=True)
class Overlapped:
    """A forward and a whole backward that start together, once both have their inputs, and end together."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)


Step = Action | Overlapped
"""What a rank does at one time."""


def _step(text: str) -> Step:
    pair = _PAIR.fullmatch(text)
    return Action.parse(text) if pair is None else Overlapped(Action.parse(pair[1]), Action.parse(pair[2]))


@dataclass(frozen=True, eq=False)
class Rows:
    """A schedule as an array, which long ones are computed with: an action is a row, in the order of `actions`."""

    table: Ints
    """[actions, 5]: rank, step (counted through all ranks), stage, kind, micro-batch. Two actions of a step overlap."""
    ranks: int

    @staticmethod
    def of(rank: Ints, step: Ints, stage: Ints, kind: Ints, micro_batch: Ints, ranks: int) -> Rows:
        """Given as columns."""
        return Rows(np.stack([rank, step, stage, kind, micro_batch], axis=1), ranks)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank that holds each stage. Raises PlanError when a stage stands on two ranks, or on none."""
        count = max(self.ranks, 1)
        held = [divmod(one, count) for one in np.unique(self.table[:, 2] * count + self.table[:, 0]).tolist()]
        for (stage, rank), (other_stage, other) in pairwise(held):
            if stage == other_stage:
                problem = f"expected one rank to hold stage {stage}, but ranks {rank} and {other} do"
                raise PlanError("schedule", problem, f"Move its actions to rank {rank}.")
        for expected, (stage, _) in enumerate(held):
            if stage != expected:
                problem = f"expected stages 0 to {held[-1][0]}, but no rank does anything for stage {expected}"
                raise PlanError("schedule", problem, "Give each stage its actions.")
        return tuple(rank for _, rank in held)

    @cached_property
    def micro_batches(self) -> int:
        return int(self.table[:, 4].max(initial=-1)) + 1

    def of_rank(self, rank: int) -> Ints:
        """The part of `table` that is one rank's."""
        first, last = np.searchsorted(self.table[:, 0], [rank, rank + 1])
        return self.table[first:last]

    @cached_property
    def steps(self) -> list[int]:
        """How many each rank does."""
        rank, step = self.table[:, 0], self.table[:, 1]
        first = np.diff(step, prepend=-1) > 0
        return [int(count) for count in np.bincount(rank[first], minlength=self.ranks)]


@dataclass(frozen=True)
class Schedule:
    """Actions of every rank of the pipeline axis, in order. The rank that has a stage's actions holds the stage."""

    ranks: tuple[tuple[Step, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(str(step) for step in steps) for steps in self.ranks)

    @cached_property
    def _hash(self) -> int:
        return hash(self.ranks)

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def parse(text: str) -> Schedule:
        """The schedule that prints as `text`."""
        return Schedule(tuple(tuple(_step(word) for word in line.split()) for line in text.splitlines()))

    @property
    def csv(self) -> str:
        """One row a rank, as torch's `_PipelineScheduleRuntime._load_csv` reads them (format `compute_only`)."""
        return "".join(",".join(str(step) for step in steps) + "\n" for steps in self.ranks)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Rank and action, rank by rank; both parts of an overlapped pair."""
        for rank, steps in enumerate(self.ranks):
            for step in steps:
                for action in step.parts:
                    yield rank, action

    @cached_property
    def rows(self) -> Rows:
        """Every action as a row."""
        steps = [step for steps in self.ranks for step in steps]
        rank = np.repeat(np.arange(len(self.ranks)), [len(steps) for steps in self.ranks])
        sizes = [2 if isinstance(step, Overlapped) else 1 for step in steps]
        done = [one for step in steps for one in step.parts]
        columns = [one.stage for one in done], [KIND_ORDER[one.kind] for one in done], [one.microbatch for one in done]
        at = np.repeat(np.arange(len(steps)), sizes)
        return Rows(np.array([rank[at], at, *columns], dtype=np.int64).T.reshape(-1, 5), len(self.ranks))

    @staticmethod
    def of(rows: Rows) -> Schedule:
        """The schedule of these rows."""
        kinds, at = tuple(KIND_ORDER), -1
        ranks: list[list[Step]] = [[] for _ in range(rows.ranks)]
        for rank, step, stage, kind, micro_batch in rows.table.tolist():
            action, mine = Action(stage, kinds[kind], micro_batch), ranks[rank]
            if step == at:
                forward = mine.pop()
                assert isinstance(forward, Action)
                mine.append(Overlapped(forward, action))
            else:
                mine.append(action)
            at = step
        return Schedule(tuple(map(tuple, ranks)))

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank that holds each stage. Raises PlanError when a stage stands on two ranks, or on none."""
        return self.rows.placement

    @property
    def micro_batches(self) -> int:
        return self.rows.micro_batches


def one_stage(micro_batches: int) -> Schedule:
    """Forward and backward of each micro-batch in turn: at most one micro-batch's activations are alive."""
    return Schedule((tuple(Action(0, kind, m) for m in range(micro_batches) for kind in "FB"),))
