"""A layout as pins: what plans do not have is refused by name, with advice that helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpsearch.errors import LegalityError
from hpsearch.estimate import ParallelLayout
from hpsearch.search.from_layout import pins_of_layout

SEVEN = ParallelLayout(devices=7, seq_len=8, micro_batch=1, global_batch=14)


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
