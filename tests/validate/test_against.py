"""Searches against published layouts: none is better than what the search finds, and a search that loses is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpsearch.space import Space, best
from hpsearch.validate.__main__ import main
from hpsearch.validate.against import Against, Left, against, outside, switches
from hpsearch.validate.gains import cause, fastest_rows, gains_report
from hpsearch.validate.predict import read_rows

ROWS = Path(__file__).parent / "published.jsonl"
CHOSEN = (
    "llm-foundry-h10080-fp8-071", "llm-foundry-h10080-fp8-072", "llm-foundry-h10080-027", "tp4_pp1_memory_speed-h100",
    "mlperf-training-v4.1-nvidia-h200", "tp1_pp4_memory_speed-gb200", "demo7b-a800-ours", "bridge-25.11-251",
    "bridge-26.08-002",
)  # fmt: skip
"""On few devices: fully sharded with and without recompute, tensor parallel, adapters, interleaved, offloaded; one
without a shape."""


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return [row for row in read_rows(ROWS)[0] if any(name in row["id"] for name in CHOSEN)]


@pytest.fixture(scope="module")
def found(rows: list[Any]) -> list[Against | Left]:
    return list(against(rows))


def done(found: list[Against | Left]) -> list[Against]:
    return [one for one in found if isinstance(one, Against)]


def test_no_published_layout_is_better_than_the_best_of_its_search(found: list[Against | Left]) -> None:
    assert len(done(found)) >= 7
    for one in done(found):
        assert not one.is_slower, f"{one.case.row['id']}: {one.found.best.step_s} s for {one.own_s}"
        assert one.found.certificate.gap == 0


def test_a_search_of_the_own_layout_alone_finds_its_price(found: list[Against | Left]) -> None:
    """Both ways to a price agree where the space leaves nothing to choose: no recompute, chunks as they are given."""
    alone = [one for one in done(found) if one.own.recompute == "none" and not one.outside]
    assert {one.own.fsdp for one in alone} == {True, False}
    for one in alone:
        names = ("tp", "sp", "cp", "cp_kind", "ep", "etp", "micro_batch", "pp", "vpp", "dp", "zero", "shard_ranks")
        pins: dict[str, tuple[Any, ...]] = {name: (getattr(one.own, name),) for name in names}
        pins |= {"schedule": (one.own.schedule_kind,)}
        space = Space(one.case.shape, one.case.cluster, switches(one.own), pins | {"recompute": ("full",)})
        assert best(space).best.step_s == pytest.approx(one.own_s, rel=1e-12)


def test_equal_searches_are_done_once(found: list[Against | Left], rows: list[Any]) -> None:
    one = done(found)[0]
    row = next(row for row in rows if row["id"] == one.case.row["id"])
    twice = done(list(against([row, row | {"id": "again"}])))
    assert twice[0].found is twice[1].found
    assert twice[0].cpu_s > 0
    assert twice[1].cpu_s == 0


def test_a_row_that_is_left_out_says_why(found: list[Against | Left]) -> None:
    whys = [one.why for one in found if isinstance(one, Left)]
    assert any("DeepSeek-V4 Flash" in why for why in whys)


def test_a_layout_outside_of_the_space_names_the_rule(found: list[Against | Left]) -> None:
    one = next(one for one in done(found) if "tp1_pp4" in one.case.row["id"])
    space = Space(one.case.shape, one.case.cluster, switches(one.own))
    assert outside(space, one.own) == ""
    assert outside(space, replace(one.own, global_batch=18)) == "vpp = 8"
    assert outside(space, replace(one.own, micro_batch=1, recompute="selective")) == "recompute of no part"
    shared = replace(one.own, recompute="full", recompute_share=0.4)
    assert outside(space, shared) == "recompute of a share of 0.4 of every layer"


def test_a_search_that_loses_stands_in_the_first_lines(found: list[Against | Left]) -> None:
    one = done(found)[0]
    assert "of the space: 0 rows (must be 0)" in gains_report(found)
    lost = replace(one, own_s=0.9 * one.found.best.step_s, outside="")
    told = gains_report([lost, *found])
    assert "of the space: 1 rows (must be 0)" in told
    assert "best slower than it: 1" in gains_report([replace(lost, outside="vpp = 9"), *found])


def test_gains_are_put_down_to_what_explains_half_of_them(found: list[Against | Left]) -> None:
    by_name = {str(one.case.row["id"]): one for one in done(found)}
    recomputed = by_name["llm-foundry-h10080-027"]
    assert cause(recomputed, recomputed) == "full recompute of every layer"
    slow = replace(recomputed, own_s=2 * recomputed.own_s)
    assert fastest_rows([slow, recomputed]) in ([recomputed], [slow])
    assert cause(slow, recomputed) == "a slower row of a sweep"


def test_limit_takes_rows_evenly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in ROWS.read_text().splitlines() if "mcore-ci-gpt3_7b_tp4_pp1" in line]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    assert main([str(path), "--search", "--limit", "1"]) == 0
    assert "1 of 1 rows with a full layout compared" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(path), "--limit", "1"])
