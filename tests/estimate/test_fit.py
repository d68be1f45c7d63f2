"""The fit finds numbers that made the data, and leaves alone what the data say nothing about."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import SPREAD, Efficiency
from hpsearch.errors import PlanError
from hpsearch.estimate import ModelShape, ParallelLayout, Priced, price
from hpsearch.estimate.fit import FREE, fit
from hpsearch.estimate.shape import transformer

LLAMA = ModelShape("8B", 4096, 32, 8, 128, 128256, transformer(32, 0, 0), ffn=14336)
EXPERTS = replace(LLAMA, pattern=transformer(32, 0, 64), experts=64, top_k=4, moe_ffn=1024)
TRUTH = Efficiency(linear=1.02, linear_low=1.4, routed=1.2, core=1.3, moved=1.35, links=1.3)


@cache
def layouts() -> tuple[Priced, ...]:
    """Forty layouts on 64 devices: short and long, dense and with experts, 16 and 8 bit, tp and pp up to 8."""
    cluster, draw, found = Cluster.load("h100-sxm-ib400", devices=64), random.Random(0), []
    for i in range(40):
        tp, pp, micro = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4]), draw.choice([1, 2, 4])
        shape = EXPERTS if i % 3 == 0 else LLAMA
        layout = ParallelLayout(
            devices=64, seq_len=draw.choice([2048, 4096, 16384]), micro_batch=micro,
            global_batch=micro * (64 // (tp * pp)) * 8, tp=tp, pp=pp, sp=tp > 1,
            ep=8 if shape is EXPERTS and 64 // pp >= 8 else 1, precision=draw.choice(["bf16", "fp8"]),
        )  # fmt: skip
        found.append(price(shape, layout, cluster))
    return tuple(found)


def steps(priced: tuple[Priced, ...], efficiency: Efficiency) -> list[float]:
    return [one.step(efficiency)[0] for one in priced]


def test_numbers_that_made_the_steps_are_found() -> None:
    found = fit(layouts(), steps(layouts(), TRUTH))
    assert found.kept == ()
    for number in found.numbers:
        assert number.value == pytest.approx(getattr(TRUTH, number.name), rel=3 * number.error + 0.02), number.name
        assert abs(number.value - getattr(TRUTH, number.name)) < abs(number.prior - getattr(TRUTH, number.name))
    assert max(abs(x) for x in found.residuals) < 0.03


def test_the_fit_does_not_depend_on_the_order_of_rows() -> None:
    measured = steps(layouts(), TRUTH)
    turned = fit(layouts()[::-1], measured[::-1])
    assert turned.efficiency.linear == pytest.approx(fit(layouts(), measured).efficiency.linear, rel=1e-6)
    assert fit(layouts(), measured) == fit(layouts(), measured)


def test_a_few_wrong_rows_do_not_decide() -> None:
    measured = steps(layouts(), TRUTH)
    found = fit(layouts(), [seconds * (3 if i % 10 == 0 else 1) for i, seconds in enumerate(measured)])
    assert found.efficiency.linear == pytest.approx(TRUTH.linear, rel=0.06)


def test_what_no_row_exercises_keeps_its_prior() -> None:
    dense = tuple(one for one in layouts() if one.shape is LLAMA and not one.layout.low_precision)
    found = fit(dense, steps(dense, TRUTH))
    assert {"routed", "linear_low"} <= set(found.kept)
    assert found.efficiency.routed == Efficiency().routed
    assert "linear" not in found.kept


def test_a_weight_of_nothing_is_a_row_left_out() -> None:
    measured = steps(layouts(), TRUTH)
    wrong = [seconds * (2 if i >= 30 else 1) for i, seconds in enumerate(measured)]
    found = fit(layouts(), wrong, weights=[1.0] * 30 + [0.0] * 10)
    assert found.efficiency.linear == pytest.approx(fit(layouts()[:30], measured[:30]).efficiency.linear, rel=1e-6)


def test_more_rows_make_numbers_surer() -> None:
    few, many = (fit(layouts()[:n], steps(layouts()[:n], TRUTH)) for n in (12, 40))
    surer = {number.name: number.error for number in many.numbers}
    for number in few.numbers:
        assert surer[number.name] < number.error <= SPREAD[number.name]


@pytest.mark.parametrize(
    ("rows", "free", "words"),
    [
        (3, FREE, "at least as many as the 6 free numbers, but found 3 steps"),
        (40, ("speed",), "but found speed"),
    ],
)
def test_a_fit_that_cannot_be_is_refused(rows: int, free: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        fit(layouts()[:rows], steps(layouts()[:rows], TRUTH), free=free)


def test_a_step_of_no_time_is_refused() -> None:
    with pytest.raises(PlanError, match="above 0 s"):
        fit(layouts(), [0.0] * 40)
