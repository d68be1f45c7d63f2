"""The [efficiency] table of a cluster file: read strictly, written back, in the place of the generation's numbers."""

from __future__ import annotations

import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import SPREAD, OwnNumber, doubts_of, efficiency_of
from hpsearch.cluster.find import FILE_NAME, cost_models
from hpsearch.cluster.read import parse, read
from hpsearch.cluster.write import write
from hpsearch.errors import ClusterError
from hpsearch.estimate import estimate
from hpsearch.estimate.many import estimate_all
from hpsearch.estimate.pins import layout_of
from tests.estimate.test_fit import LLAMA

TEXT = (cost_models() / "h100-sxm-ib400" / FILE_NAME).read_text()
TABLE = """
[efficiency]
linear = { value = 1.25, unit = "times the table", kind = "fitted", source = "https://example.org/runs", error = 0.02 }
kernel_s = { value = 80, unit = "us", kind = "fitted", source = "https://example.org/runs" }
"""


def loaded(text: str, devices: int = 64) -> Cluster:
    found = read(text, "c.toml")
    return Cluster(found.name, devices, found.device, found.tiers, "", found.facts, found.efficiency)


def test_the_table_is_read_in_si() -> None:
    found = read(TEXT + TABLE, "c.toml")
    assert found.efficiency == (OwnNumber("kernel_s", pytest.approx(80e-6), 0.0), OwnNumber("linear", 1.25, 0.02))
    told = {fact.path: (fact.value, fact.unit) for fact in found.facts}
    assert told["efficiency.linear"] == ("1.25", "times the table")
    assert told["efficiency.kernel_s"] == ("80", "us")


def test_it_is_written_back_unchanged() -> None:
    entry = parse(TEXT + TABLE, "c.toml")
    assert entry.efficiency["linear"].error == 0.02
    assert parse(write(entry), "again") == entry


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("linear =", "lineal =", "line {first}, efficiency.lineal: expected one of linear, linear_low"),
        ("1.25", "-1.25", "line {first}, efficiency.linear: expected a positive number"),
        ("1.25", "125.0", "line {first}, efficiency.linear: expected 0.1 times the table to 10 times the table"),
        ("times the table", "ms", "a unit of factor"),
        ('"us"', '"times the table"', "expected a unit of time"),
        ("80,", "80000000,", "line {second}, efficiency.kernel_s"),
        ("0.02", "-0.02", "efficiency.linear.error: expected a standard error of 0 or more"),
        ("error", "eror", "Did you mean 'error'"),
        ('source = "https://example.org/runs", error', 'source = "nowhere", error', "key of .sources."),
    ],
)
def test_what_cannot_be_believed_is_refused_with_its_line(before: str, after: str, told: str) -> None:
    text = TEXT + TABLE.replace(before, after, 1)
    first = text.splitlines().index("[efficiency]") + 2
    with pytest.raises(ClusterError, match=told.format(first=first, second=first + 1)):
        read(text, "c.toml")


def test_own_numbers_count_more_than_the_generations() -> None:
    plain, own = loaded(TEXT), loaded(TEXT + TABLE)
    assert efficiency_of(own.device.name, own.efficiency).linear == 1.25
    assert efficiency_of(own.device.name, own.efficiency).core == efficiency_of(plain.device.name).core
    layout = layout_of({"tp": "8"}, devices=64, global_batch=512, seq_len=4096).layout
    before, after = estimate(LLAMA, layout, plain), estimate(LLAMA, layout, own)
    ratio = 1.25 / efficiency_of(plain.device.name).linear
    assert dict(after.parts)["matmul"] == pytest.approx(dict(before.parts)["matmul"] * ratio)
    assert before.step_s != after.step_s
    assert estimate_all(LLAMA, [layout], own).step_s[0] == pytest.approx(after.step_s)


def test_digests_change_with_the_numbers_alone() -> None:
    plain, own, other = (loaded(text) for text in (TEXT, TEXT + TABLE, TEXT + TABLE.replace("1.25", "1.26")))
    assert len({plain.digest, own.digest, other.digest}) == 3


def test_a_number_of_its_own_is_no_longer_in_doubt() -> None:
    own = (OwnNumber("linear", 1.2, 0.02), OwnNumber("core", 1.0, 0.1))
    doubts = doubts_of("Ascend 910C", own)
    assert (doubts["linear"], doubts["core"], doubts["moved"]) == (0.02, 0.1, SPREAD["moved"])
    assert "clock" not in doubts, "linears were measured at the clock of this device"
    assert doubts_of("H100-SXM5-80GB", own) == doubts_of("H100-SXM5-80GB"), "calibration never widens a band"
