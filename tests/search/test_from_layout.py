"""A layout as pins: what plans do not have is refused by name, with advice that helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpsearch.errors import LegalityError
from hpsearch.estimate import ParallelLayout
from hpsearch.search.from_layout import pins_of_layout

SEVEN = ParallelLayout(devices=7, seq_len=8, micro_batch=1, global_batch=14)


def test_experts_of_a_layout_are_spread_over_what_tp_leaves() -> None:
    sixteen = replace(SEVEN, devices=16, tp=4, ep=8, global_batch=16, zero=1)
    assert {name: pins_of_layout(sixteen, 16, 16).fix.get(name, "1") for name in ("ep", "dp_shard")} == {
        "ep": "2", "dp_shard": "2",
    }  # fmt: skip
    assert pins_of_layout(replace(sixteen, ep=4, etp=4), 16, 16).fix["ep"] == "4"
    with pytest.raises(LegalityError, match="ep = 2 and etp = 1: expected ep x etp over tp = 4 to divide 4 data"):
        pins_of_layout(replace(sixteen, ep=2), 16, 16)
    wide = replace(sixteen, devices=8, tp=1, cp=4, ep=8, global_batch=16)
    folded = pins_of_layout(wide, 8, 16).fix
    assert (folded["ep"], folded["ep_over"], folded["cp"]) == ("2", "cp", "4")
    whole = pins_of_layout(replace(wide, ep=4), 8, 16).fix
    assert "ep" not in whole
    assert whole["ep_over"] == "cp"
    part = replace(wide, devices=12, cp=6, ep=4, global_batch=12)
    with pytest.raises(
        LegalityError,
        match=r"ep = 4 beside cp = 6: .* on the 2 data ranks, .* on 4,.* --fix cp=1, or an ep of at most 2",
    ):
        pins_of_layout(part, 12, 12)


def test_cut_sequences_of_a_layout_keep_their_kind() -> None:
    eight = replace(SEVEN, devices=8, tp=2, cp=2, cp_kind="gather", global_batch=16)
    pins = pins_of_layout(eight, 8, 16)
    assert {name: pins.fix[name] for name in ("tp", "cp", "cp_kind", "dp_shard")} == {
        "tp": "2", "cp": "2", "cp_kind": "gathered", "dp_shard": "2",
    }  # fmt: skip
    assert "states over dp_shard alone, whole on the ranks of cp" in pins.left


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, r"= 14: expected the 8 .*sequence\. Search again with --global-batch 14, or for other --devices\."),
        ({"pp": 7, "stage_groups": ("old",) * 7}, "layout, stage_groups = old, .*old: expected devices that are all"),
    ],
)
def test_what_plans_do_not_have_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LegalityError, match=message):
        pins_of_layout(replace(SEVEN, **changed), 7, 8)
