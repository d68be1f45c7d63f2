"""Each objective equals enumeration: every layout of every stated value by plain loops, memory limits active."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from hpsearch.aim import Aim, Tariff, front, ranked, reach
from hpsearch.aim.narrow import mesh_of
from hpsearch.cluster import Cluster
from hpsearch.errors import InfeasibleError, LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout
from hpsearch.estimate.shape import transformer
from hpsearch.space import Space
from tests.space.naive import Outcome, Pins, every_outcome

BASE = ParallelLayout(devices=1, seq_len=4096, micro_batch=1, global_batch=16, overlap_grad_reduce=True, dedup=True)
DEEP = ModelShape("deep", 2048, 16, 4, 128, 32000, transformer(4, 0, 0), ffn=8192)
EXPERTS = ModelShape(
    "experts", 2048, 16, 4, 128, 32000, transformer(3, 1, 8), ffn=8192, experts=8, top_k=2, moe_ffn=4096
)
PINS: Pins = {"cp": (1,), "micro_batch": (1, 2), "recompute": ("full",), "vpp": (1,), "zero": (0, 1, 3),
              "schedule": ("1f1b",)}  # fmt: skip
COUNTS = (1, 2, 4, 6, 8)


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    room_bytes: int
    pins: tuple[tuple[str, tuple[Any, ...]], ...] = tuple(PINS.items())

    def cluster(self, devices: int) -> Cluster:
        found = Cluster.load("h100-sxm-roce400", devices=devices)
        return replace(found, device=replace(found.device, memory_bytes=self.room_bytes))

    def space(self, devices: int = 4, batch: int = 16, seq_len: int = 4096) -> Space:
        base = replace(BASE, global_batch=batch, seq_len=seq_len)
        return Space(self.shape, self.cluster(devices), base, dict(self.pins))

    def clusters(self) -> dict[int, Cluster]:
        return {count: self.cluster(count) for count in COUNTS}


FEW = (
    ("schedule", ("1f1b",)), ("cp", (1,)), ("micro_batch", (1, 2)), ("recompute", ("full",)), ("vpp", (1,)),
    ("zero", (1, 3)), ("etp", (1,)),
)  # fmt: skip
CASES = {
    "dense": Case(DEEP, 42 * 10**8),
    "experts": Case(EXPERTS, 6 * 10**9, FEW),
}


@cache
def fitting(case: Case, devices: int = 4, batch: int = 16, seq_len: int = 4096) -> list[Outcome]:
    space = case.space(devices, batch, seq_len)
    every = every_outcome(case.shape, space.cluster, space.base, space.pins)
    return [one for one in every if one.peak_bytes <= case.room_bytes]


@pytest.mark.parametrize("name", CASES)
def test_memory_is_a_limit(name: str) -> None:
    case = CASES[name]
    every = every_outcome(case.shape, case.cluster(4), case.space().base, case.space().pins)
    assert len(fitting(case)) < 0.8 * len(every)


def least_s(outcomes: list[Outcome]) -> float:
    return min((one.step_s for one in outcomes), default=float("inf"))


@pytest.mark.parametrize("name", CASES)
def test_fewest_devices_for_a_deadline(name: str) -> None:
    case = CASES[name]
    steps = {count: least_s(fitting(case, count)) for count in COUNTS}
    for limit_s in sorted(step * factor for step in steps.values() if step < 1e9 for factor in (0.999, 1.001))[::4]:
        aim = Aim("devices", case.space(), COUNTS, case.clusters(), most_step_s=limit_s)
        enough = [count for count in COUNTS if steps[count] <= limit_s]
        if not enough:
            with pytest.raises(InfeasibleError, match="takes"):
                reach(aim)
            continue
        found = reach(aim)
        assert found.value == min(enough)
        assert found.found.best.step_s == pytest.approx(steps[found.value], rel=1e-9)
        assert found.bound == found.value
        assert all(one.is_excluded for one in found.verdicts if one.value < found.value)


@pytest.mark.parametrize("name", CASES)
def test_tokens_a_device_and_money(name: str) -> None:
    case = CASES[name]
    steps = {count: least_s(fitting(case, count)) for count in COUNTS}
    for limit_s in (1e9, sorted(steps.values())[1]):
        least = min(count * step for count, step in steps.items() if step <= limit_s * (1 + 1e-9))
        for kind, tariff in (
            ("rate", None),
            ("cost", Tariff(2.0 / 3600, "USD", "here")),
            ("energy", Tariff(700.0, "J", "")),
        ):
            scale = tariff.a_second if tariff else 1.0
            found = reach(Aim(kind, case.space(), COUNTS, case.clusters(), limit_s * (1 + 1e-9), tariff=tariff))
            assert found.score == pytest.approx(scale * least, rel=1e-9)
            assert found.bound <= found.score


@pytest.mark.parametrize("name", CASES)
def test_most_tokens_a_second_that_are_asked_for(name: str) -> None:
    case = CASES[name]
    rate = 16 * 4096 / (least_s(fitting(case, 6)) * 1.001)
    found = reach(Aim("devices", case.space(), COUNTS, case.clusters(), least_tokens_per_s=rate))
    assert found.value == min(count for count in COUNTS if 16 * 4096 / least_s(fitting(case, count)) >= rate)


BATCHES = (1, 2, 3, 4, 6, 8, 12, 15, 16)


@pytest.mark.parametrize("name", CASES)
def test_largest_batch_below_a_step(name: str) -> None:
    case = CASES[name]
    steps = {batch: least_s(fitting(case, 4, batch)) for batch in BATCHES}
    for limit_s in sorted(steps.values())[2::4]:
        found = reach(Aim("batch", case.space(), BATCHES, most_step_s=limit_s * (1 + 1e-9)))
        assert found.value == max(batch for batch in BATCHES if steps[batch] <= limit_s * (1 + 1e-9))
        assert found.bound == -found.value
        assert all(one.is_excluded for one in found.verdicts if one.value > found.value)


def test_multiples_between_the_values_stated() -> None:
    """4 and 16 are stated; every fourth row between them is looked at."""
    case = CASES["dense"]
    steps = {batch: least_s(fitting(case, 4, batch)) for batch in (4, 8, 12, 16)}
    limit_s = max(steps[8], steps[12]) * 1.001
    found = reach(Aim("batch", case.space(), (4, 16), most_step_s=limit_s), between=4)
    assert found.value == max(batch for batch in steps if steps[batch] <= limit_s)
    assert [one.value for one in found.verdicts] == [4, 8, 12, 16]


@pytest.mark.parametrize("name", CASES)
def test_largest_batch_of_one_pass(name: str) -> None:
    case = CASES[name]
    fits = [b for b in BATCHES if any(one.layout.micro_batches == 1 for one in fitting(case, 4, b))]
    aim = Aim("batch", case.space(), BATCHES)
    assert fits
    found = reach(aim)
    assert found.value == max(fits)
    assert found.found.best.layout.micro_batches == 1


LENGTHS = (1024, 3072, 4096, 8192, 16384, 65536)


@pytest.mark.parametrize("name", CASES)
def test_longest_sequence(name: str) -> None:
    case = CASES[name]
    steps = {length: least_s(fitting(case, 4, 4, length)) for length in LENGTHS}
    assert float("inf") in steps.values()
    for limit_s in (sorted(steps.values())[2], float("inf")):
        found = reach(Aim("sequence", case.space(batch=4), LENGTHS, most_step_s=limit_s * (1 + 1e-9)))
        assert found.value == max(n for n, step in steps.items() if step <= limit_s and step < float("inf"))
        assert all(one.is_excluded for one in found.verdicts if one.value > found.value)


@pytest.mark.parametrize("name", CASES)
def test_the_front_of_time_against_memory(name: str) -> None:
    case = CASES[name]
    pairs = sorted({(one.step_s, one.peak_bytes) for one in fitting(case)})
    wanted, least = [], float("inf")
    for step_s, peak in pairs:
        if peak < least:
            wanted.append((step_s, peak))
            least = peak
    found = front(case.space())
    assert [(one.choice.step_s, one.peak_bytes) for one in found.points] == [
        (pytest.approx(step_s, rel=1e-9), pytest.approx(peak, rel=1e-9)) for step_s, peak in wanted
    ]
    assert found.nothing_within_bytes is not None
    assert found.nothing_within_bytes < least
    assert all(one.bound_s <= one.choice.step_s for one in found.points)


@pytest.mark.parametrize("name", CASES)
def test_the_best_of_different_meshes(name: str) -> None:
    case = CASES[name]
    best_of: dict[Any, float] = {}
    for one in fitting(case):
        mesh = mesh_of(one.layout)
        best_of[mesh] = min(best_of.get(mesh, float("inf")), one.step_s)
    found = ranked(case.space(), 5)
    assert [one.choice.step_s for one in found] == pytest.approx(sorted(best_of.values())[:5], rel=1e-9)
    assert len({mesh_of(one.choice.layout) for one in found}) == len(found)


def test_what_is_missing_is_said() -> None:
    case = CASES["dense"]
    with pytest.raises(LegalityError, match="expected a deadline"):
        Aim("devices", case.space(), COUNTS, case.clusters())
    with pytest.raises(LegalityError, match="expected what a device costs"):
        Aim("cost", case.space(), COUNTS, case.clusters())
    with pytest.raises(LegalityError, match="expected one of time, robust, rate"):
        Aim("beauty", case.space())
