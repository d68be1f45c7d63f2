"""Collectives of ranks that share cores: CPU seconds where others compute meanwhile, the wall where nobody can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpsearch.measure import kernels
from hpsearch.measure.kernels import Bench
from hpsearch.measure.points import QUICK


class Told(Bench):
    """A bench whose rounds take what it is told, on this rank and, by `others`, on the slowest of all."""

    rounds: tuple[tuple[float, float], ...] = ((9e-4, 2e-4), (5e-4, 3e-4))
    others: float = 1.0

    def __post_init__(self) -> None:
        """Nobody to make pairs with."""

    def _short_rounds(self, call: Any, budget_s: float | None, key: str) -> list[tuple[float, float]]:
        return list(self.rounds)

    def slowest(self, values: list[float]) -> list[float]:
        return [self.others * value for value in values]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Four ranks on two cores."""
    monkeypatch.setattr(kernels, "usable_cores", lambda: 2.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return Told(torch.device("cpu"), QUICK, control=None, ranks_here=4)  # type: ignore[arg-type]


def test_a_call_takes_its_cpu_seconds_of_every_rank_on_the_core_and_no_more_than_the_wall(told: Told) -> None:
    seconds, wall = told.rounds_beside_s(lambda: None, "")
    assert seconds == pytest.approx([4e-4, 5e-4])  # 2 ranks a core x 0.2 ms; 2 x 0.3 ms is more than the wall's 0.5 ms
    assert wall == [9e-4, 5e-4]
    told.others = 2.0
    assert told.rounds_beside_s(lambda: None, "")[0] == pytest.approx([8e-4, 10e-4])


def test_a_core_stands_idle_in_a_chain_only_while_all_its_ranks_wait(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, "_timed", lambda self, call, count: (9e-4, 2e-4))
    assert told.chain_s(lambda: None, 16, size=2) == pytest.approx([4e-4] * QUICK.rounds)
    assert told.chain_s(lambda: None, 16, size=4) == pytest.approx([9e-4] * QUICK.rounds)
    monkeypatch.setattr(kernels, "usable_cores", lambda: 4.0)
    assert told.chain_s(lambda: None, 16, size=2) == pytest.approx([9e-4] * QUICK.rounds)


def test_ranks_with_a_core_each_and_accelerators_wait_for_themselves(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told.is_beside_others
    monkeypatch.setattr(kernels, "usable_cores", lambda: 4.0)
    assert not told.is_beside_others
    monkeypatch.setattr(kernels, "usable_cores", lambda: 2.0)
    told.device = torch.device("meta")
    assert not told.is_beside_others
    assert told.in_flight == 1
