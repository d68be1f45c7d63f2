"""Mixtures of experts under every plan without a pipeline, on ranks that are threads: the largest errors.

`python -m tests.benchmarks.bench_experts [--capacity 1.25] [--only mixtral]`: the text, the executor and every local op
are those of real ranks, collectives meet under a lock (tests/lower/simulate.py). About 5 CPU minutes; on gloo ranks the
same plans, and pipelines, are `pytest -m exhaustive` of tests/end_to_end/test_experts.py and test_capacity.py.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from hpsearch.capture import CapturedGraph, capture
from hpsearch.lower import lower
from hpsearch.lower.program import ParallelProgram
from hpsearch.search import search
from tests.end_to_end.capped import dropping
from tests.end_to_end.experts import EXPERTS
from tests.end_to_end.models import ROWS, Case, build
from tests.end_to_end.parity import DTYPES, double_throughout
from tests.end_to_end.slow import slow_devices
from tests.end_to_end.test_capacity import PLANS
from tests.lower.reference import Errors, compare


@cache
def case(family: str, recipe: str) -> Case:
    """With the number of targets, so that its loss adds up over micro-batches."""
    found = build(family, DTYPES[recipe])
    found.batch["num_items_in_batch"] = (found.batch["labels"][:, 1:] != -100).sum()
    return found


def rows_of(batch: Any, first: int, rows: int) -> dict[str, Any]:
    return {k: v[first : first + rows] if k in ("input_ids", "labels") else v for k, v in batch.items()}


@cache
def captured(family: str, recipe: str, rows: int) -> CapturedGraph:
    return capture(case(family, recipe).model, rows_of(case(family, recipe).batch, 0, rows), recipe=recipe, rows=rows)


def errors_of(family: str, recipe: str, name: str, factor: str | None) -> Errors:
    """Of one plan, the largest over all ranks."""
    devices, fix = PLANS[name]
    count = int(str(fix.get("micro_batches", 1)))
    rows = ROWS // count
    pins = {"micro_batches": count, **fix, **({"capacity": factor} if factor else {})}
    with double_throughout(family, recipe):
        traced, batch = captured(family, recipe, rows), case(family, recipe).batch
        program = lower(traced, search(traced.graph, slow_devices(devices), global_batch=ROWS, fix=pins))
        assert isinstance(program, ParallelProgram)
        batches = [rows_of(batch, i * rows, rows) for i in range(count)]
        with dropping(factor) if factor else nullcontext():
            return compare(case(family, recipe).model, batches, traced, program, told=factor is not None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--capacity", help="a factor; without one no token is dropped")
    parser.add_argument("--only", default="", help="families whose name has this")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for family in (f"{name}{way}" for name in EXPERTS for way in ("", "_skewed")):
        for recipe in DTYPES if asked.only in family else ():
            for name, (_, fix) in PLANS.items():
                if "pp" not in fix:
                    found = errors_of(family, recipe, name, asked.capacity)
                    print(f"{family:18} {name:22} {recipe} loss {found.loss:.1e} gradient {found.gradient:.1e}")


if __name__ == "__main__":
    main()
