"""A schedule is text: `0F0 0B0 0F1 0B1`, one line a rank. An action is stage, kind, micro-batch.

Kinds are those of torch.distributed.pipelining: F forward, B whole backward, I its input part, W its weight part.
Plans of one stage run forward and backward of each micro-batch in turn; pipelines add stages, not another notation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpsearch.errors import PlanError

_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as `text`."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise PlanError(f"action {text!r}", "expected stage, kind (F, B, I, W) and micro-batch", "Write 2F0.")
        return Action(int(found[1]), found[2], int(found[3]))


@dataclass(frozen=True)
class Schedule:
    """Actions of every rank of the pipeline axis, in order."""

    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(str(action) for action in actions) for actions in self.ranks)

    @staticmethod
    def parse(text: str) -> Schedule:
        """The schedule that prints as `text`."""
        return Schedule(tuple(tuple(Action.parse(word) for word in line.split()) for line in text.splitlines()))


def one_stage(micro_batches: int) -> Schedule:
    """Forward and backward of each micro-batch in turn: at most one micro-batch's activations are alive."""
    return Schedule((tuple(Action(0, kind, m) for m in range(micro_batches) for kind in "FB"),))
