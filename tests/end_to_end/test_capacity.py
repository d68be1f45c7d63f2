"""Experts with a capacity give what the plain model gives that drops the same tokens, under every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hpsearch.capture import CapturedGraph, capture
from hpsearch.errors import LegalityError, PlanError
from hpsearch.graph import slots_of, with_capacity
from hpsearch.lower import lower
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.end_to_end import experts
from tests.end_to_end.capped import dropping, reference
from tests.end_to_end.experts import EXPERTS
from tests.end_to_end.models import LENGTH, ROWS, Case, build
from tests.end_to_end.parity import DTYPES, double_throughout
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.slow import slow_devices
from tests.end_to_end.test_expert_hops import words
from tests.end_to_end.test_experts import PLANS as DROPLESS
from tests.end_to_end.test_parity import LIMITS, graph, references, table
from tests.lower.reference import compare

__all__ = ["references", "table"]
"""Fixtures of the parity matrix."""

FAMILY = "qwen3_moe_skewed"
"""Three of eight experts a token; one expert that every token meets and one that none does."""


@cache
def case() -> Case:
    """With the number of targets, so that its loss is the same over any rows."""
    found = build(FAMILY, DTYPES["fp64"])
    return replace(found, batch={**found.batch, "num_items_in_batch": (found.batch["labels"][:, 1:] != -100).sum()})


@cache
def captured() -> CapturedGraph:
    with double_throughout(FAMILY, "fp64"):
        return capture(case().model, case().batch, recipe="fp64", rows=ROWS)


def found_plan(factor: object, devices: int = 4, **pins: object) -> Plan:
    fix = {"micro_batches": 1, "recompute": "none", **({} if factor is None else {"capacity": factor}), **pins}
    return search(captured().graph, slow_devices(devices), global_batch=ROWS, fix=fix)


@pytest.mark.parametrize(("factor", "pins"), [("1.25", {"ep": 2, "tp": 2}), ("0.5", {"ep": 4}), ("8", {"ep": 4})])
def test_capacity_drops_what_the_plain_model_drops(factor: str, pins: dict[str, object]) -> None:
    """And what is sent is what the plan says. Of 8 times an even share nothing is dropped. Ranks are threads."""
    program = lower(captured(), found_plan(factor, **pins))
    dropped: list[int] = []
    with double_throughout(FAMILY, "fp64"), dropping(factor, dropped):
        errors = compare(case().model, [case().batch], captured(), program)
    assert (sum(dropped) > 0) == (factor != "8")
    assert errors.loss <= 1e-10
    assert errors.gradient <= 1e-10
    assert "route(" not in program.code, "no size depends on the data"


def test_the_plan_says_its_slots_and_their_price() -> None:
    """1.25 times the even share of 8 tokens with 3 of 8 experts each: 3.75, so 4 slots where 3 rows were even."""
    made, even = found_plan("1.25", ep=4), found_plan(None, ep=4, ep_kind="apart")
    (block,) = captured().graph.blocks
    assert made.file.job.capacity is not None
    assert made.file.job.capacity.slots == {block: 4}
    assert "Capacity 1.25: an expert takes the first 4 tokens of a row that chose it" in " ".join(words(made).split())

    def rows_of(plan: Plan) -> int:
        moves = [c for c in plan.file.collectives if c.kind == "all_to_all"]
        return sum(c.nbytes for c in moves if c.nbytes == max(m.nbytes for m in moves))

    assert rows_of(made) * 3 == rows_of(even) * 4
    assert made.file.predicted.step_s > even.file.predicted.step_s
    assert made.file.predicted.peak_bytes > even.file.predicted.peak_bytes
    padded = with_capacity(captured().graph, 1.25)
    products = {op.name: op.flops for op in padded.blocks[block].ops if op.kind == "matmul" and "grouped" in op.target}
    assert products == {
        op.name: (0, op.flops[1] * 4 // 3) for op in captured().graph.blocks[block].ops if op.name in products
    }
    assert Plan.from_bytes(made.content, model=captured().graph) == made
    job = made.file.job.model_copy(update={"capacity": made.file.job.capacity.model_copy(update={"factor": 2.0})})
    with pytest.raises(PlanError, match=r"job.capacity.slots: expected .* 6} for a factor of 2, but found .* 4}"):
        Plan.from_bytes(Plan(made.file.model_copy(update={"job": job})).content, model=captured().graph)


def test_slots_are_counted_exactly() -> None:
    """As fractions: 1.1 times 10 pairs an expert would be 11.000000000000002 slots."""
    assert slots_of(with_capacity(captured().graph, 1 / 3)) == dict.fromkeys(captured().graph.blocks, 1)
    assert slots_of(with_capacity(captured().graph, 100.0)) == dict.fromkeys(captured().graph.blocks, LENGTH)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"capacity": "0"}, "fix capacity=0: expected a number above 0"),
        ({"capacity": "-1"}, "fix capacity=-1: expected a number above 0"),
        ({"capacity": "nan"}, "fix capacity=nan: expected a number above 0"),
        ({"capacity": "inf"}, "fix capacity=inf: expected a number above 0"),
        ({"capacity": "much"}, "fix capacity=much: expected a number above 0"),
        ({"capacity": "1.25", "cp": 2}, "fix capacity=1.25: expected whole sequences, .* but found cp=2"),
        ({"capacity": "1.25", "ep": 2, "ep_kind": "together"}, "each copy of a token on its own, .* ep_kind=together"),
    ],
)
def test_capacity_that_cannot_be_is_refused(pins: dict[str, object], message: str) -> None:
    with pytest.raises(LegalityError, match=message):
        search(captured().graph, slow_devices(4), global_batch=ROWS, fix=pins)


PLANS: dict[str, tuple[int, dict[str, object]]] = {"one device, 2 parts": (1, {"micro_batches": 2}), **DROPLESS}


def matrix() -> Iterator[Any]:
    for kind in (f"{family}{way}" for family in EXPERTS for way in ("", "_skewed")):
        for name in PLANS:
            for recipe in LIMITS:
                yield kind, name, recipe


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("factor", ["1.25", "0.5"])
@pytest.mark.parametrize(("family", "name", "recipe"), list(matrix()))
def test_capacity_parity(
    family: str,
    name: str,
    recipe: str,
    factor: str,
    ranks: RankPool,
    references: dict[tuple[str, str], Path],
    table: list[tuple[str, str, str, dict[str, float]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    key = f"{family} {factor}", recipe
    if key not in references:
        references[key] = tmp_path_factory.mktemp("reference") / "trace.pt"
        assert reference(family, recipe, factor, references[key])
    devices, fix = PLANS[name]
    pins = {**fix, "capacity": factor}
    made = search(graph(family, recipe), slow_devices(devices), global_batch=ROWS, fix=pins)
    results = ranks.run(
        f"{experts.__name__}:{experts.compare.__name__}", ranks=devices, family=family, recipe=recipe,
        plan=made.content, path=str(references[key]),
    )  # fmt: skip
    worst = {what: max(result[what] for result in results) for what in LIMITS[recipe]}
    table.append((f"{family} {factor}", name, recipe, worst))
    for what, limit in LIMITS[recipe].items():
        assert worst[what] <= limit, f"{what} of {family} under {made}"


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.dist
def test_compiled_regions_are_whole(ranks: RankPool) -> None:
    """Nothing is left out of what Inductor compiles, exchanges among it, since no size depends on the data."""
    made = search(
        graph("mixtral", "fp32"), slow_devices(2), global_batch=ROWS, fix={"ep": 2, "capacity": "1.25"}
    )  # fmt: skip
    work = f"{experts.__name__}:{experts.compiled.__name__}"
    told: dict[str, Any] = {"ranks": 2, "timeout_s": 400, "family": "mixtral", "plan": made.content}
    losses, gradients, seconds = ranks.run(work, **told, inductor=True)[0]
    plain_losses, plain, _ = ranks.run(work, **told, inductor=False)[0]
    assert any("MixtralDecoderLayer" in name for name in seconds)
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for name, value in plain.items():
        assert (gradients[name] - value).abs().max() <= 1e-4 * value.abs().max(), name
