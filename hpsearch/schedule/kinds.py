"""The kinds of schedule: which numbers of ranks, stages a rank and micro-batches each takes; where its stages stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from hpsearch.errors import LegalityError
from hpsearch.schedule import orders
from hpsearch.schedule.schedule import Rows, Schedule


@dataclass(frozen=True)
class Kind:
    """`order(stages, virtual, micro_batches)`; what is legal is part of it."""

    name: str
    order: Callable[[int, int, int], Rows]
    least_virtual: int = 1
    most_virtual: int | None = 1
    least_micro_batches: int = 0
    """In units of stages (ranks); one micro-batch at least."""
    whole_rounds: bool = False
    """Whether micro-batches must be a multiple of the ranks."""
    split: bool = False
    """Whether some backwards are split into input and weight parts."""
    vee: bool = False

    def takes(self, stages: int, virtual: int, micro_batches: int) -> bool:
        """Whether there is such a schedule."""
        is_placed = self.least_virtual <= virtual and (self.most_virtual is None or virtual <= self.most_virtual)
        is_whole = not (self.whole_rounds and micro_batches % stages)
        return stages >= 1 and is_placed and is_whole and micro_batches >= max(self.least_micro_batches * stages, 1)

    @property
    def rule(self) -> str:
        """What is legal, in one line."""
        exact, least = self.least_virtual == self.most_virtual, self.least_virtual
        stages = f"{'' if exact else 'at least '}{least} stage{'s'[: least > 1]} on each rank"
        if self.whole_rounds:
            return f"{stages}; micro-batches a multiple of the ranks"
        many = {0: "any number of micro-batches", 1: "at least as many micro-batches as ranks"}
        counted = many.get(self.least_micro_batches, f"at least {self.least_micro_batches} micro-batches a rank")
        return f"{stages}{', placed in a V' if self.vee else ''}; {counted}"


def _paired(kind: str) -> Callable[[int, int, int], Rows]:
    return lambda p, v, m: orders.paired(p, v, m, *orders.turns(kind, p, v, m))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("gpipe", _paired("gpipe")),
        Kind("1f1b", _paired("1f1b"), least_micro_batches=1),
        Kind("interleaved", _paired("interleaved"), 2, None, 1, whole_rounds=True),
        Kind("zb-h1", _paired("zb-h1"), least_micro_batches=1, split=True),
        Kind("interleaved-zb", _paired("interleaved-zb"), 2, None, 1, whole_rounds=True, split=True),
        Kind("zbv", lambda p, v, m: orders.zbv(p, m), 2, 2, split=True, vee=True),
        Kind("dualpipev", lambda p, v, m: orders.dualpipev(p, m), 2, 2, 2, split=True, vee=True),
    )
}


def placement(kind: str, stages: int, virtual: int) -> tuple[int, ...]:
    """The rank of each of stages · virtual pieces of the model: a loop, or a V."""
    return orders.vee(stages) if KINDS[kind].vee else orders.loop(stages, virtual)


def refusal(kind: str, stages: int, virtual: int, micro_batches: int) -> LegalityError | None:
    """Why there is no such schedule; None if there is. Arguments as in `make_schedule`."""
    rule = KINDS.get(kind)
    if rule is None:
        return LegalityError(f"schedule {kind!r}", f"expected one of {', '.join(KINDS)}", "")
    if rule.takes(stages, virtual, micro_batches):
        return None
    if stages < 1:
        return _refused(kind, "stages", stages, "at least 1 rank", "1, 2, 3, …")
    if virtual < rule.least_virtual or (rule.most_virtual is not None and virtual > rule.most_virtual):
        exact = rule.least_virtual == rule.most_virtual
        wanted = f"{'' if exact else 'at least '}{rule.least_virtual} stage{'s'[: rule.least_virtual > 1]} on each rank"
        return _refused(kind, "virtual", virtual, wanted, f"{rule.least_virtual}" + ("" if exact else ", 3, 4, …"))
    least = max(rule.least_micro_batches * stages, 1)
    if rule.whole_rounds and micro_batches % stages:
        near = sorted({max(micro_batches // stages, 1) * stages, (micro_batches // stages + 1) * stages})
        legal = f"{stages}, {2 * stages}, {3 * stages}, …; nearest {' or '.join(map(str, near))}"
        return _refused(kind, "micro_batches", micro_batches, f"a multiple of the {stages} ranks", legal)
    wanted = f"at least {least} for {stages} rank{'s'[: stages > 1]}"
    legal = f"{least} and more" if not rule.whole_rounds else f"{least}, {least + stages}, …"
    return _refused(kind, "micro_batches", micro_batches, wanted, f"{legal}; gpipe takes any number")


def _refused(kind: str, field: str, value: int, expected: str, legal: str) -> LegalityError:
    return LegalityError(
        f"schedule {kind}, {field} = {value}", f"expected {expected}, but found {value}", f"Legal: {legal}."
    )


@lru_cache(maxsize=64)
def make_schedule(kind: str, stages: int, virtual: int, micro_batches: int) -> Schedule:
    """The schedule of `stages` ranks that hold `virtual` pieces of the model each; pieces are numbered in model order.

    Raises LegalityError, naming field, value and what is legal, where the kind has no such schedule.
    """
    return Schedule.of(make_rows(kind, stages, virtual, micro_batches))


@lru_cache(maxsize=16)
def make_rows(kind: str, stages: int, virtual: int, micro_batches: int) -> Rows:
    """`make_schedule`, as rows."""
    refused = refusal(kind, stages, virtual, micro_batches)
    if refused is not None:
        raise refused
    return KINDS[kind].order(stages, virtual, micro_batches)
