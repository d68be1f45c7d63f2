"""Loss curves of 200 steps on real text by recipe, beside fp32: `python -m tests.benchmarks.bench_precision`.

Fails where a recipe's mean loss over any 20 steps is further from that of fp32 than its tolerance.
"""

from __future__ import annotations

import time

from tests.end_to_end.curves import curve, furthest

STEPS, WINDOW = 200, 20
TOLERANCES = {"bf16": 0.01, "bf16_grads": 0.01, "fp8": 0.02}


def main() -> None:
    expected = curve("fp32", STEPS)
    print(
        "| recipe | first loss | loss of the last 20 steps | furthest from fp32 over 20 steps | tolerance | seconds |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    print(f"| fp32 | {expected[0]:.4f} | {sum(expected[-WINDOW:]) / WINDOW:.4f} | | | |")
    for recipe, tolerance in TOLERANCES.items():
        start = time.process_time()
        losses = curve(recipe, STEPS)
        far = furthest(losses, expected, WINDOW)
        last, took = sum(losses[-WINDOW:]) / WINDOW, time.process_time() - start
        print(f"| {recipe} | {losses[0]:.4f} | {last:.4f} | {far:.2%} | {tolerance:.0%} | {took:.0f} |", flush=True)
        assert far <= tolerance


if __name__ == "__main__":
    main()
