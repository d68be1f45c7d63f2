"""The report on a sample of published runs, each with its public source: what is predicted, and how well.

`published.jsonl`: rows of the schema that `python -m hpsearch.validate` reads, without fields that are not given.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpsearch.estimate import rank_memory
from hpsearch.validate.__main__ import main
from hpsearch.validate.predict import cases, predict, read_rows
from hpsearch.validate.report import report
from hpsearch.validate.rows import Case, Row, case, scored, year
from hpsearch.validate.score import (
    Predicted,
    fit_scores,
    memory_by,
    ranks,
    regret,
    scores,
    spearman,
    summary,
    sweeps,
)
from hpsearch.validate.shapes import shapes_of_rows
from tests.estimate.stated import shape_of_row

ROWS = Path(__file__).parent / "published.jsonl"


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return read_rows(ROWS)[0]


@pytest.fixture(scope="module")
def found(rows: list[Any]) -> list[Predicted]:
    return list(predict(rows)[0])


def test_captured_models_are_those_that_rows_state(rows: list[Any]) -> None:
    """Parameters within 0.3 % (biases, and positions that a class lacks), and every size of attention and experts."""
    told = [(row, shape) for row, shape in zip(rows, shapes_of_rows(rows), strict=True) if not isinstance(shape, str)]
    assert len(told) >= len(rows) - 2
    for row, read in told:
        stated = shape_of_row(row["model"], int(row["seq_len"]))
        assert read.total_params == pytest.approx(stated.total_params, rel=0.03 if not stated.vocab else 0.003)
        assert read.active_params == pytest.approx(stated.active_params, rel=0.03 if not stated.vocab else 0.003)
        assert (read.layers, read.vocab, read.tied or not read.vocab) == (
            stated.layers, stated.vocab, stated.tied or not stated.vocab,
        )  # fmt: skip
        attention = read.of("attention")
        assert (attention.heads, attention.v_width, attention.q_width) == (
            stated.heads, stated.v_width, stated.q_width,
        )  # fmt: skip
        assert attention.mla == stated.mla
        if stated.mla is None:
            assert attention.kv_heads == stated.kv_heads


def test_every_row_has_a_public_source(rows: list[Any]) -> None:
    assert all(row["source"].get("url") or row["source"].get("repo") for row in rows)


def test_a_row_is_predicted_or_refused_with_a_reason(rows: list[Any]) -> None:
    found, refused = predict(rows)
    assert len(found) + len(refused) == len(rows)
    assert all(reason.strip() for reason in refused.values())


def test_step_times_are_near(rows: list[Any], found: list[Predicted]) -> None:
    step = scores(found, rows)["step_time"]
    assert step["predicted"] >= 0.95 * step["rows"]
    assert step["median"] <= 0.12
    assert abs(step["bias"]) <= 0.08


def test_a_sweep_is_ranked(found: list[Predicted]) -> None:
    group = max(sweeps(found).values(), key=len)
    assert len(group) >= 20
    assert spearman([o.estimate.step_s for o in group], [o.case.measured_s or 0.0 for o in group]) >= 0.9
    assert regret(group) <= 0.05


def test_memory_tells_what_ran_from_what_did_not(found: list[Predicted]) -> None:
    memory = fit_scores(found)
    assert memory["completed"] >= 30
    assert memory["out_of_memory"] >= 20
    assert memory["balanced_accuracy"] >= 0.92
    assert memory["false_fits"] <= 0.05
    assert memory["completed_refused"] <= 0.08
    peaks = [o.memory_error for o in found if o.memory_error is not None]
    assert summary(peaks)["median"] <= 0.08
    assert min(peaks) >= -0.05


def test_peaks_are_compared_with_the_measure_that_was_taken(found: list[Predicted]) -> None:
    one = next(o for o in found if o.memory_error is not None and o.case.layout.pp > 1)
    memory, measured = one.estimate.memory, one.case.measured_peak_bytes
    assert measured

    def error(notes: str) -> float:
        case = replace(one.case, row={**one.row, "notes": notes})
        return Predicted(case, one.estimate).memory_error or 0.0

    assert error("torch max allocated") == memory.tensor_bytes / measured - 1
    assert error("peak reserved") == memory.reserved_bytes / measured - 1
    assert error("as nvidia-smi shows it") == memory.peak_bytes / measured - 1
    first = rank_memory(one.case.shape, one.case.layout, 0)
    assert error("rank-0 peak") == first.tensor_bytes / measured - 1
    assert memory.tensor_bytes < memory.reserved_bytes < memory.peak_bytes


def test_memory_by_family_counts_every_run(found: list[Predicted]) -> None:
    groups = memory_by(lambda one: str(one.row["family"]), found)
    assert sum(g["completed"] + g["out_of_memory"] for g in groups.values()) == len(found)
    assert sum(g["refused"] for g in groups.values()) == sum(o.finished and not o.fits for o in found)
    assert sum(g["false_fits"] for g in groups.values()) == sum(not o.finished and o.fits for o in found)
    assert sum(g["peaks"] for g in groups.values()) == sum(o.memory_error is not None for o in found)


def test_json_is_the_agreed_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROWS), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {"step_time", "memory", "sweeps", "families", "band"}
    assert set(figures["step_time"]) == {"rows", "predicted", "median", "p90", "bias"}
    assert set(figures["sweeps"]) == {"spearman_median", "regret_median", "regret_worst"}


def test_the_report_names_the_worst_and_the_defaults(rows: list[Any], found: list[Predicted]) -> None:
    text = report(found, {"x": "layout: tp is not given"}, rows)
    for words in ("family", "devices", "worst step times", "1 rows: layout: tp is not given", "inter_node_GBps"):
        assert words in text


def test_a_file_that_is_missing_or_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 1
    (tmp_path / "empty.jsonl").write_text("\n")
    assert main([str(tmp_path / "empty.jsonl")]) == 1
    assert "the file is empty" in capsys.readouterr().err
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    assert main([str(tmp_path / "binary.jsonl")]) == 1
    assert "expected a text file" in capsys.readouterr().err


WRONG: list[tuple[Any, str]] = [
    ({"id": "x"}, "family: expected this field, but the row has none"),
    ([1], "expected a JSON object, but found list"),
    (None, "expected a JSON object, but found NoneType"),
    ({"parallel": {"tp": 2.5}}, "parallel.tp: "),
    ({"parallel": {"tp": True}}, "parallel.tp: "),
    ({"parallel": {"vpp": 0}}, "parallel.vpp: "),
    ({"parallel": {"overlap": "all"}}, "parallel.overlap: "),
    ({"hardware": {"hbm_GBps": -1}}, "hardware.hbm_GBps: "),
    ({"model": {"heads": 0}}, "model.heads: "),
    ({"model": {"layers": "many"}}, "model.layers: "),
    ({"result": {"step_time_s": float("nan")}}, "result.step_time_s: "),
    ({"derived": {"parallel.dp": {"value": "two"}}}, "dp: "),
    ({"source": None}, "source: "),
]


def test_a_broken_row_is_refused_and_the_report_goes_on(
    rows: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = next(row for row in rows if scored(row) and row["kind"] == "dense")
    lines = ['{"id":', json.dumps(good)]
    for change, _ in WRONG[3:]:
        lines.append(json.dumps(good | {k: v and good[k] | v for k, v in change.items()}))
    lines += [json.dumps(change) for change, _ in WRONG[:3]]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    read, refused = read_rows(file)
    assert len(read) == 1
    assert list(refused)[:2] == ["line 1", "line 3"]
    told = [refused[f"line {number}"] for number in range(3, len(lines) + 1)]
    assert all(words in why for why, (_, words) in zip(told, WRONG[3:] + WRONG[:3], strict=True))
    assert main([str(file)]) == 0
    assert "hardware.hbm_GBps" in capsys.readouterr().out


def test_rows_of_one_id_keep_their_own_models(rows: list[Any], tmp_path: Path) -> None:
    dense = [row for row in rows if scored(row) and row["kind"] == "dense"]
    first = dense[0]
    second = next(row for row in dense if row["model"]["layers"] != first["model"]["layers"])
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row | {"id": "same"}) for row in (first, second)))
    read, _ = read_rows(file)
    found = [one.shape.layers for _, one in cases(read) if isinstance(one, Case)]
    assert found == [first["model"]["layers"], second["model"]["layers"]]
    assert [row["id"] for row in read] == ["same", "same (line 2)"]


def test_summary() -> None:
    assert summary([-0.1, 0.1, 0.3]) == pytest.approx({"rows": 3, "median": 0.1, "p90": 0.26, "bias": 0.1})
    assert summary([]) == {"rows": 0}


def test_ranks_and_spearman() -> None:
    assert ranks(np.array([10.0, 30.0, 20.0, 20.0])).tolist() == [0.0, 3.0, 1.5, 1.5]
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


def cased(row: Row) -> Case | str:
    return case(row, shape_of_row(row["model"], int(row["seq_len"])))


def changed(row: Any, part: str, **fields: Any) -> Any:
    return row | {part: row[part] | fields}


def test_what_a_row_does_not_say_is_filled_and_listed(rows: list[Any]) -> None:
    row = next(r for r in rows if scored(r) and r["family"] == "nvidia-megatron-bridge" and "sp" not in r["parallel"])
    filled = cased(row)
    assert isinstance(filled, Case)
    assert "sp = True" in filled.filled
    refused = cased(row | {"parallel": {k: v for k, v in row["parallel"].items() if k != "tp"}})
    assert refused == "layout: tp is not given"


def test_tensor_parallelism_overlaps_in_dense_models_alone(rows: list[Any]) -> None:
    """Unless the row says otherwise: recipes of expert models leave it off."""
    dense = next(r for r in rows if scored(r) and r["family"] == "nvidia-megatron-bridge" and r["kind"] == "dense")
    experts = next(r for r in rows if scored(r) and r["family"] == "nvidia-megatron-bridge" and r["kind"] == "moe")
    for row, overlaps in ((dense, True), (experts, False)):
        found = cased(changed(row, "parallel", overlap=None))
        stated = cased(changed(row, "parallel", overlap={"tp_comm": not overlaps}))
        assert isinstance(found, Case)
        assert isinstance(stated, Case)
        assert (found.layout.overlap_tp, stated.layout.overlap_tp) == (overlaps, not overlaps)


def test_recompute_words(rows: list[Any]) -> None:
    row = next(r for r in rows if r["family"] == "korthikanti-2022" and scored(r))
    for stated, kind in (("none", "none"), ("full (every layer)", "full"), ("selective: core_attn, mlp", "selective")):
        found = cased(changed(row, "parallel", recompute=stated))
        assert isinstance(found, Case)
        assert found.layout.recompute == kind


def test_years(rows: list[Any]) -> None:
    row = rows[0]
    assert year(changed(row, "source", published="26.04.01")) == 2026
    assert year(changed(row, "source", published="2021-01")) == 2021


@pytest.mark.parametrize(
    ("kernel", "flash", "fused_softmax"),
    [("FlashAttention-3", True, True), ("sdpa", True, True), ("cuDNN fused attention", True, True),
     ("unfused", False, True), ("fused", False, True), ("eager", False, False)],
)  # fmt: skip
def test_attention_kernels_by_name(rows: list[Any], kernel: str, flash: bool, fused_softmax: bool) -> None:
    row = next(r for r in rows if scored(r) and r["family"] == "nvidia-megatron-bridge")
    (_, found), *_ = cases([changed(row, "parallel", extra={"attention": kernel})])
    assert isinstance(found, Case)
    assert found.layout.flash is flash
    assert found.layout.fused_softmax is (fused_softmax or flash)


@pytest.mark.parametrize(
    ("stated", "name"), [("BF16", "bf16"), ("float8 (rowwise)", "fp8"), ("MXFP8", "mxfp8"), ("mxfp4", "nvfp4")]
)
def test_precisions_by_name(rows: list[Any], stated: str, name: str) -> None:
    row = next(r for r in rows if scored(r) and r["family"] == "nvidia-megatron-bridge")
    (_, found), *_ = cases([changed(row, "precision", compute=stated)])
    assert isinstance(found, Case)
    assert found.layout.precision == name


def test_a_precision_without_a_price_is_refused(rows: list[Any]) -> None:
    row = next(r for r in rows if scored(r))
    assert [found for _, found in cases([changed(row, "precision", compute="tf32")])] == [
        "precision tf32 is not priced"
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"peak_dense_tflops": {"bf16": None}}, "states no 16-bit peak"), ({"hbm_GBps": None}, "states no hbm_GBps"),
     ({"devices": None}, "states no devices")],
)  # fmt: skip
def test_a_device_without_its_numbers_is_refused(rows: list[Any], change: dict[str, Any], words: str) -> None:
    row = next(r for r in rows if scored(r))
    ((_, found),) = cases([changed(row, "hardware", **change)])
    assert words in str(found)


def test_a_device_may_state_fp16_alone(rows: list[Any]) -> None:
    row = next(r for r in rows if scored(r))
    ((_, found),) = cases([changed(row, "hardware", device="V100-SXM2-32GB", peak_dense_tflops={"fp16": 125})])
    assert isinstance(found, Case)
    assert found.cluster.device.peak_flops_per_s("bfloat16") == 125e12
