"""In which order one rank does its actions, for every kind of schedule.

Orders are those of the papers as torch.distributed.pipelining 2.13 runs them, so that a plan's text is what a reader
of either expects:
  gpipe         all forwards, all backwards (Huang et al. 2019)
  1f1b          as few forwards ahead as keep all ranks busy (Narayanan et al. 2019, "PipeDream-flush")
  interleaved   1f1b over several stages a rank, in groups of micro-batches (Narayanan et al. 2021)
  zb-h1         1f1b with a split backward: rank r does its weight parts r micro-batches later, which fills the end with
                what waits for nobody, and keeps no more alive than rank 0 of 1f1b (Qi et al. 2024, arXiv:2401.10241)
  interleaved-zb  the same over several stages a rank
  zbv           two stages a rank in a V, so that the last stage stands on rank 0 (Qi et al. 2024, section 6)
  dualpipev     DeepSeek's DualPipe folded to a V: a forward runs with another micro-batch's backward
                (arXiv:2412.19437; github.com/deepseek-ai/DualPipe)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hpsearch.schedule.schedule import Action, Overlapped, Step


def loop(ranks: int, virtual: int) -> tuple[int, ...]:
    """The rank of each stage: around and around."""
    return tuple(stage % ranks for stage in range(ranks * virtual))


def vee(ranks: int) -> tuple[int, ...]:
    """The rank of each of 2·ranks stages: down and up again."""
    return (*range(ranks), *reversed(range(ranks)))


def gpipe(rank: int, micro_batches: int) -> Iterator[Step]:
    for kind in "FB":
        yield from (Action(rank, kind, m) for m in range(micro_batches))


def paired(rank: int, ranks: int, virtual: int, micro_batches: int, warm: int, late: int | None = None) -> list[Step]:
    """`warm` forwards, then a forward and a backward in turn, then the remaining backwards. With `late` the backward is
    split, and weight parts come `late` backwards behind their input parts.

    Over several stages a rank, micro-batches go in groups of `ranks` through each of them; the last group may be
    smaller.
    """
    total = micro_batches * virtual
    slots = list(_slots(ranks, virtual, micro_batches))
    backward = [(virtual - 1 - chunk, m) for chunk, m in slots]
    found: list[Step] = []

    def add(kind: str, slot: tuple[int, int]) -> None:
        found.append(Action(slot[0] * ranks + rank, kind, slot[1]))

    for slot in slots[:warm]:
        add("F", slot)
    for i in range(total):
        if warm + i < total:
            add("F", slots[warm + i])
        add("B" if late is None else "I", backward[i])
        if late is not None and i >= late:
            add("W", backward[i - late])
    if late is not None:
        for slot in backward[max(total - late, 0) :]:
            add("W", slot)
    return found


def _slots(ranks: int, virtual: int, micro_batches: int) -> Iterator[tuple[int, int]]:
    """Which of a rank's stages, and micro-batch, in the order of the forwards."""
    group = micro_batches if virtual == 1 else ranks
    for first in range(0, micro_batches, group):
        for chunk in range(virtual):
            yield from ((chunk, m) for m in range(first, min(first + group, micro_batches)))


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[Step]:
    return paired(rank, ranks, 1, micro_batches, min(ranks - 1 - rank, micro_batches))


def interleaved(rank: int, ranks: int, virtual: int, micro_batches: int) -> list[Step]:
    ahead = interleaved_ahead(rank, ranks, virtual)
    return paired(rank, ranks, virtual, micro_batches, min(ahead, virtual * micro_batches))


def interleaved_ahead(rank: int, ranks: int, virtual: int) -> int:
    """Forwards ahead: all stages but the last for one group, and two a rank behind this one."""
    return (virtual - 1) * ranks + 2 * (ranks - 1 - rank)


def zero_bubble(rank: int, ranks: int, virtual: int, micro_batches: int) -> list[Step]:
    ahead = (virtual - 1) * ranks + (ranks - 1 - rank)
    return paired(rank, ranks, virtual, micro_batches, min(ahead, virtual * micro_batches), late=rank)


class _Count:
    """Actions of two stages, each kind of each stage counting its micro-batches up."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.stages = stages
        self.next = {(chunk, kind): 0 for chunk in (0, 1) for kind in "FBW"}
        self.found: list[Step] = []
        self.owed: deque[Action] = deque()

    def take(self, chunk: int, kind: str) -> Action:
        """The next action of this stage; input parts and whole backwards count together."""
        key = (chunk, "B" if kind == "I" else kind)
        self.next[key] += 1
        return Action(self.stages[chunk], kind, self.next[key] - 1)

    def add(self, *actions: tuple[int, str]) -> None:
        for chunk, kind in actions:
            action = self.take(chunk, kind)
            self.found.append(action)
            if kind == "I":
                self.owed.append(action)

    def add_pair(self, forward: int, backward: int) -> None:
        self.found.append(Overlapped(self.take(forward, "F"), self.take(backward, "B")))

    def add_weight(self) -> None:
        """The weight part that has waited longest, if any does."""
        if self.owed:
            action = self.owed.popleft()
            self.found.append(Action(action.stage, "W", action.microbatch))


def zbv(rank: int, ranks: int, micro_batches: int) -> list[Step]:
    """Zero bubble if F, I and W take equally long. With fewer than 2·ranks - 1 micro-batches the order has holes."""
    full = max(2 * ranks - 1, micro_batches)
    work = _Count((rank, 2 * ranks - 1 - rank))
    work.add(*[(0, "F")] * (2 * (ranks - rank) - 1))
    work.add(*[(1, "F"), (0, "F")] * rank)
    work.add(*[(1, "F"), (1, "I"), (1, "W")] * (ranks - rank))
    while work.next[1, "F"] < work.next[0, "F"] or work.next[0, "F"] < full:
        if work.next[0, "F"] < full:
            work.add((0, "F"))
        work.add((0, "I"), (0, "W"), (1, "F"), (1, "I"), (1, "W"))
    work.add(*[(0, "I"), (1, "I")] * rank)
    work.add(*[(0, "I"), (0, "W")] * (ranks - rank))
    for chunk in (1, 0):
        work.add(*[(chunk, "W")] * (full - work.next[chunk, "W"]))
    return [step for step in work.found if all(action.microbatch < micro_batches for action in step.parts)]


def dualpipev(rank: int, ranks: int, micro_batches: int) -> list[Step]:
    """The eight steps of DeepSeek's `dualpipev.py`; needs 2·ranks micro-batches."""
    work = _Count((rank, 2 * ranks - 1 - rank))
    behind = ranks - rank - 1
    work.add(*[(0, "F")] * (2 * behind))
    work.add(*[(0, "F"), (1, "F")] * (rank + 1))
    for _ in range(behind):
        work.add((1, "I"))
        work.add_weight()
        work.add((1, "F"))
    for i in range(micro_batches - 2 * ranks + rank + 1):
        if i == 0 and behind == 0:
            work.add((0, "F"), (1, "B"))
        else:
            work.add_pair(0, 1)
        work.add_pair(1, 0)
    for _ in range(behind):
        work.add((1, "B"))
        work.add_pair(1, 0)
    _fold(work, rank, behind)
    return work.found


def _fold(work: _Count, rank: int, behind: int) -> None:
    """The end of DualPipeV: from the middle of the last backwards on, weight parts are put off to fill the holes."""
    half, parity = (rank + 1) // 2, rank % 2
    for i in range(rank + 1):
        work.add((1, "I" if i > half or (i == half and parity) else "B"))
        work.add((0, "I" if i >= half else "B"))
    for _ in range(behind):
        work.add_weight()
        work.add((0, "I"))
    for _ in range(rank + 1):
        work.add_weight()
