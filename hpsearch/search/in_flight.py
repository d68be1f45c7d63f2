"""How many micro-batches a pipeline rank keeps at once, by stage: read off the schedule, not off its name."""

from __future__ import annotations

from hpsearch.schedule import Schedule

Kept = tuple[tuple[int, int, int], ...]
"""(stage, micro-batches between forward and the end of backward, those of them whose input part is done)."""


def most_kept(schedule: Schedule, rank: int) -> tuple[Kept, ...]:
    """Every moment of a rank that no other moment exceeds in all its counts."""
    stages = [stage for stage, holder in enumerate(schedule.placement) if holder == rank]
    alive, pending = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    seen: dict[tuple[int, ...], None] = {}
    for step in schedule.ranks[rank]:
        for action in step.parts:
            if action.kind == "F":
                alive[action.stage] += 1
            elif action.kind == "I":
                pending[action.stage] += 1
            seen[tuple(n for stage in stages for n in (alive[stage], pending[stage]))] = None
            if action.kind in "BW":
                alive[action.stage] -= 1
            if action.kind == "W":
                pending[action.stage] -= 1
    moments = [m for m in seen if not any(o != m and all(a >= b for a, b in zip(o, m, strict=True)) for o in seen)]
    return tuple(tuple((stage, m[2 * i], m[2 * i + 1]) for i, stage in enumerate(stages)) for m in moments)
