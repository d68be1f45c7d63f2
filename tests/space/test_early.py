"""A search that ends early says nothing that is not so: wherever it is stopped, by step and not by the clock."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hpsearch.errors import LegalityError
from hpsearch.estimate import memory
from hpsearch.space import Found, Space, answers
from tests.space.test_exhaustive import limited

CASES = (("experts", 1.0), ("deep, few micro-batches", 0.3), ("dense, then experts", 0.1))
SEARCH = sys.modules["hpsearch.space.best"]


def stopped(space: Space, steps: int) -> tuple[list[Found], int]:
    """All answers of a search that is asked to end after so many steps, and how often it asked."""
    asked = 0

    def watch(best_s: float, bound_s: float) -> bool:
        nonlocal asked
        asked += 1
        assert bound_s <= best_s
        return asked <= steps

    return list(answers(space, watch=watch)), asked


@pytest.mark.parametrize(("name", "share"), CASES)
def test_wherever_it_is_stopped_the_bound_holds(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches, so that there are many places to stop at: before, in and behind the enumeration."""
    monkeypatch.setattr(SEARCH, "SEEDS", 4)
    monkeypatch.setattr(SEARCH, "FIRST", 2)
    monkeypatch.setattr(SEARCH, "TRIES", 1)
    monkeypatch.setattr(SEARCH, "BATCH", 8)
    space, fitting = limited(name, share)
    least, known = min(one.step_s for one in fitting), {one.layout: one.step_s for one in fitting}
    _, whole = stopped(space, 10**9)
    ends = set()
    for steps in sorted({*range(6), *(i * whole // 8 for i in range(8)), whole - 1}):
        found, _ = stopped(space, steps)
        last = found[-1]
        ends.add(last.certificate.gap)
        assert last.certificate.bound_s <= least * (1 + 1e-9)
        assert last.certificate.gap == pytest.approx(1 - last.certificate.bound_s / last.best.step_s, abs=1e-12)
        assert last.best.step_s == pytest.approx(known[last.best.layout], rel=1e-12)
        assert memory(space.shape, last.best.layout).peak_bytes <= space.cluster.device.memory_bytes
        better = [one.best.step_s for one in found[:-1]]
        assert better == sorted(set(better), reverse=True)
        assert last.best.step_s <= min(better, default=last.best.step_s)
        proof = last.certificate
        assert proof.considered == proof.pruned + proof.solved + proof.left
        assert min(proof.pruned, proof.solved, proof.left) >= 0
    assert len(ends) > 1


def test_no_time_at_all_gives_the_first_answer() -> None:
    space, fitting = limited("experts", 1.0)
    *_, found = answers(space, time_limit_s=0.0)
    assert 0 < found.certificate.bound_s <= min(one.step_s for one in fitting)
    assert found.certificate.gap > 0


def test_one_step_further_never_proves_less() -> None:
    space, _ = limited("experts", 1.0)
    bounds = [stopped(replace(space), steps)[0][-1].certificate.bound_s for steps in range(0, 40, 4)]
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_solution_ends_within_one_simulation(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is counted in simulations: when it is over, in the middle of a cut being polished too, there are none."""
    space, fitting = limited("dense, then experts", 0.1)
    cutting = sys.modules["hpsearch.space.cutting"]
    real, now = cutting.simulated, [0.0]

    def simulated(*given: Any) -> tuple[float, float]:
        now[0] += 1.0
        return real(*given)

    monkeypatch.setattr(cutting, "simulated", simulated)
    monkeypatch.setattr(SEARCH, "time", SimpleNamespace(monotonic=lambda: now[0]))
    spent = [now[0] for _ in answers(space)]
    limit_s, now[0] = float(int(share * spent[-1])), 0.0
    *_, found = answers(space, time_limit_s=limit_s)
    assert now[0] <= max(limit_s, spent[0])
    assert found.certificate.bound_s <= min(one.step_s for one in fitting) * (1 + 1e-9)


def test_a_limit_without_any_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    space, _ = limited("experts", 1.0)
    monkeypatch.setattr(SEARCH, "TRIES", 0)
    with pytest.raises(LegalityError, match="time limit: expected time for a first answer, but of the most promising"):
        list(answers(space, time_limit_s=0.0))
