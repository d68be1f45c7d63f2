"""Twelve steps on real text: 8 bits train as 32 do. 200 steps: `tests/benchmarks/bench_precision.py`."""

from __future__ import annotations

from tests.end_to_end.curves import curve, furthest


def test_eight_bits_follow_the_curve_of_fp32() -> None:
    losses, expected = (curve(recipe, 12, width=32, layers=2, micro_batches=1) for recipe in ("fp8", "fp32"))
    far = furthest(losses, expected, 4)
    print(f"furthest over 4 steps: {far:.2%}")
    assert expected[-1] < 0.9 * expected[0]
    assert losses != expected
    assert far < 0.02
