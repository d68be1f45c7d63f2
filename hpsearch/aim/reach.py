"""`reach`: the value and layout that serve an aim best, and what is proven about all other values stated.

Nothing here takes a step for longer on fewer devices, or shorter with fewer rows: neither is proven, since degrees must
divide. So every stated value has a bound of its own; values are looked at in the order of the best they may be, until
none that is left can be better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpsearch.aim.aim import Aim
from hpsearch.aim.forward import floors_s
from hpsearch.errors import HpsearchError, InfeasibleError, LegalityError
from hpsearch.space import Found, Space, best
from hpsearch.space.prices import Prices

NEVER = float("inf")


@dataclass(frozen=True)
class Verdict:
    """What is known about one value."""

    value: int
    bound_s: float
    """No step takes less with it; inf: no layout is legal or fits."""
    step_s: float
    """The best found; inf: none, or not looked for."""
    limit_s: float
    is_searched: bool
    why: str = ""
    """Where there is no layout: what the search said."""

    @property
    def keeps(self) -> bool:
        return self.step_s <= self.limit_s and self.step_s < NEVER

    @property
    def is_excluded(self) -> bool:
        """Proven: no layout keeps the limit."""
        return self.bound_s > self.limit_s or self.bound_s == NEVER


@dataclass(frozen=True)
class Reached:
    """The answer to an aim."""

    aim: Aim
    value: int
    space: Space
    found: Found
    score: float
    bound: float
    """No layout with any of the values stated has a lower score."""
    verdicts: tuple[Verdict, ...]
    """Of every value stated, in order."""

    @property
    def gap(self) -> float:
        return (self.score - self.bound) / abs(self.score) if self.score else 0.0


def reach(aim: Aim, *, gap: float = 0.0, between: int = 0) -> Reached:
    """The best value, with its best layout. `gap`: of each search. `between`: of a largest batch or longest sequence,
    multiples of this between it and the next value stated are looked at too.

    Raises InfeasibleError where no value keeps the limit, or what the search says where there is one value only.
    """
    known, answers = dict[int, Verdict](), dict[int, Found]()
    winner, lowest = _serves_best(aim, aim.values, gap, known, answers)
    if winner is not None and between:
        above = min((value for value in aim.values if value > winner), default=winner)
        finer = tuple(range((winner // between + 1) * between, above, between))
        aim = replace(aim, over=(*aim.values, *finer))
        winner, lowest = _serves_best(aim, finer, gap, known, answers)
    if winner is None:
        raise _none(aim, known)
    least = min((aim.score(v, one.bound_s) for v, one in known.items() if not one.is_excluded), default=lowest)
    told = tuple(known[value] for value in aim.values)
    return Reached(aim, winner, aim.at(winner), answers[winner], lowest, min(least, lowest), told)


def _serves_best(
    aim: Aim, values: tuple[int, ...], gap: float, known: dict[int, Verdict], answers: dict[int, Found]
) -> tuple[int | None, float]:
    """(value, score) of the best of these and those known; verdicts and answers are noted."""
    served = [(aim.score(v, one.step_s), v) for v, one in known.items() if one.keeps]
    lowest, winner = min(served, default=(NEVER, None))
    floors = {value: Prices(aim.at(value)).floor_s for value in values}
    for value in sorted(floors, key=lambda one: (aim.score(one, floors[one]), one)):
        limit_s, bound_s = aim.limit_s(value), floors[value]
        if bound_s <= limit_s and aim.score(value, bound_s) < lowest:
            bound_s = max(bound_s, floor_s(aim.at(value)))
        if bound_s > limit_s or aim.score(value, bound_s) >= lowest or bound_s == NEVER:
            why = "no legal layout" if bound_s == NEVER else ""
            known[value] = Verdict(value, bound_s, NEVER, limit_s, is_searched=False, why=why)
            continue
        known[value] = _looked(aim, value, aim.worth_s(value, lowest), gap, answers)
        if known[value].keeps and aim.score(value, known[value].step_s) < lowest:
            winner, lowest = value, aim.score(value, known[value].step_s)
    return winner, lowest


def _looked(aim: Aim, value: int, most_s: float, gap: float, answers: dict[int, Found]) -> Verdict:
    """A search, ended once all that is left takes longer than `most_s`."""
    limit_s = aim.limit_s(value)
    try:
        found = best(aim.at(value), gap=gap, watch=lambda _, bound_s: bound_s <= most_s)
    except (InfeasibleError, LegalityError) as error:
        if len(aim.values) == 1:
            raise
        return Verdict(value, NEVER, NEVER, limit_s, is_searched=True, why=str(error))
    answers[value] = found
    return Verdict(value, found.certificate.bound_s, found.best.step_s, limit_s, is_searched=True)


def floor_s(space: Space) -> float:
    """Seconds that no layout of a space is below: all its micro-batches spread evenly over all devices, the quickest
    inside of all. inf: none is legal."""
    prices = Prices(space)
    return floors_s(prices)[1] + (prices.rates.step_s if space.base.trained_parts == "step" else 0.0)


def _none(aim: Aim, known: dict[int, Verdict]) -> HpsearchError:
    """No value keeps the limit: the one that comes nearest, and by how much."""
    what, values = aim.dimension or "devices", ", ".join(map(str, aim.values))
    nearest = min(known.values(), key=lambda one: (min(one.step_s, one.bound_s) / one.limit_s, one.value))
    if nearest.bound_s == NEVER:
        return InfeasibleError(
            f"objective {aim.kind}", f"expected a layout with {what} of {values}, but none fits",
            f"With {nearest.value}: {nearest.why}",
        )  # fmt: skip
    least = nearest.step_s if nearest.step_s < NEVER else nearest.bound_s
    return InfeasibleError(
        f"objective {aim.kind}", f"expected a step of at most {nearest.limit_s:.4g} s with {what} of {values}, but the "
        f"nearest, {nearest.value}, takes {'' if nearest.step_s < NEVER else 'at least '}{least:.4g} s",
        f"State more {what.replace('_', ' ')}, or a longer step.",
    )  # fmt: skip
