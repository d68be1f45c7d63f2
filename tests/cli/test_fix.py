from __future__ import annotations

import pytest
import typer

from hpsearch.cli.fix import parse_fixes
from hpsearch.search.fix import parse_fix


def test_pins_repeat_and_stand_between_commas() -> None:
    given = ["tp=4, dp_shard=2", "recompute=full", "model.layers.{0,2}.mlp.up_proj.weight=tp:S0,lm_head.weight=R"]
    assert parse_fixes(given) == {
        "tp": "4",
        "dp_shard": "2",
        "recompute": "full",
        "model.layers.{0,2}.mlp.up_proj.weight": "tp:S0",
        "lm_head.weight": "R",
    }
    assert parse_fixes([]) == {}
    assert parse_fixes(["tp=2", "tp=2"]) == {"tp": "2"}


# fmt: off
WRONG = [
    ("tp", "expected name=value, but got 'tp'. Keys are dp_replicate, dp_shard, ep, cp, tp, cp_kind, ep_kind, ep_over, "
           "capacity, pp, vpp, schedule, cut, micro_batches, recompute, offload, or"),
    ("=4", "expected name=value, but got '=4'"),
    ("tp=", "expected name=value, but got 'tp='"),
    ("tp=2,tp=4", "tp is pinned twice, to 2 and to 4."),
    ("tp=two", "fix tp=two: expected a whole number of at least 1. Write --fix tp=2."),
    ("tp=0", "fix tp=0: expected a whole number of at least 1. Write --fix tp=2."),
    ("tp=-1", "fix tp=-1: expected a whole number of at least 1. Write --fix tp=2."),
    ("xp=2", "fix xp: expected one of dp_replicate, dp_shard, ep, cp, tp, cp_kind, ep_kind, ep_over, "
             "capacity, pp, vpp, schedule, cut, micro_batches, recompute, offload, or a parameter's name"),
    ("recompute=some", "fix recompute=some: expected none or full. Write --fix recompute=full."),
    ("ep=2,ep_kind=foo", "fix ep_kind=foo: expected apart or together. Leave it out for the quicker one."),
    ("offload=disk", "fix offload=disk: expected one of none, activations, optimizer, activations+optimizer."),
    ("lm_head.weight=X", "layout 'X': expected axis:placement, but got 'X'. Write for example tp:S0."),
    ("lm_head.weight=tp:X", "placement 'X': expected R, P or S<dim>. Write for example S0."),
]
# fmt: on


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_a_wrong_pin_is_wrong_usage_and_says_what_is_right(given: str, message: str) -> None:
    with pytest.raises(typer.BadParameter) as error:
        parse_fixes([given])
    assert str(error.value.message).startswith(message)


def test_the_order_of_what_is_offloaded_does_not_matter() -> None:
    one, other = (parse_fix({"offload": text}).offload for text in ("activations+optimizer", "optimizer+activations"))
    assert one == other == "activations+optimizer"
