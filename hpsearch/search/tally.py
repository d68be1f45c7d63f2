"""What a search has found and excluded so far, over all the spaces that it looks at."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpsearch.cost import CostTable
from hpsearch.plan import Refusal
from hpsearch.search.assemble import Found


@dataclass
class Tally:
    """Lives for one search."""

    best: Found | None = None
    refused: list[Refusal] = field(default_factory=list)
    lost: list[tuple[float, str, str]] = field(default_factory=list)
    """As in a certificate."""
    considered: int = 0
    solved: int = 0
    pruned: int = 0
    unseen: int = 0
    """Candidates that the time limit left unpriced."""
    tightest: list[CostTable] = field(default_factory=list)
    """Of each space of one mesh, the candidates whose parts need least memory, for the message when nothing fits."""

    @property
    def best_s(self) -> float:
        return self.best.objective_s if self.best else float("inf")

    def keep(self, found: Found) -> None:
        """The best, or one of those that lost."""
        loser: Found | None = found
        if found.objective_s < self.best_s:
            self.best, loser = found, self.best
        if loser is not None:
            self.lost.append((loser.objective_s, loser.label, ""))

    def refuse(self, candidate: str, reason: str) -> None:
        self.refused.append(Refusal(candidate=candidate, reason=reason))
