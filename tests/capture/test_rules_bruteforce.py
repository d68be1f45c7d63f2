"""A7: every rule in use is true, and every true rule that is not offered has a reason.

Brute force: all placements of all inputs and outputs, on 2 and 3 ranks, with the very op that lowering runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from hpsearch.capture.expert_rules import EXPERT_RULES
from hpsearch.capture.op_facts import OpFacts
from hpsearch.capture.rule_table import OWN
from hpsearch.capture.rules import find_rules
from hpsearch.graph import Rule
from tests.capture.rule_cases import FAMILIES, captured_ops, hand_made
from tests.capture.rule_truth import RANKS, is_testable, true_rules

WITHOUT_CHANCE: dict[str, Callable[[OpFacts], OpFacts]] = {
    "aten.native_dropout.default": lambda f: replace(f, args=(f.args[0], 0.0, True)),
    "aten.bernoulli.p": lambda f: replace(f, args=(f.args[0], 1.0)),
}
"""Random ops, made certain: on cut tensors their masks are other numbers, equal in distribution only."""

_WINDOWS = "a cut between windows that do not overlap; true only for a stride equal to the window"
_GROUPS = "right when the axis divides the groups, which no dim of a tensor shows"
REASONS = {
    ("aten.convolution.default", "S2"): _WINDOWS,
    ("aten.convolution.default", "S3"): _WINDOWS,
    ("aten.convolution_backward.default", "S2"): _WINDOWS,
    ("aten.convolution_backward.default", "S3"): _WINDOWS,
    ("aten.avg_pool2d.default", "S2"): _WINDOWS,
    ("aten.avg_pool2d.default", "S3"): _WINDOWS,
    ("aten.avg_pool2d_backward.default", "S2"): _WINDOWS,
    ("aten.avg_pool2d_backward.default", "S3"): _WINDOWS,
    ("aten.avg_pool3d_backward.default", "S2"): _WINDOWS,
    ("aten.avg_pool3d_backward.default", "S3"): _WINDOWS,
    ("aten.avg_pool3d_backward.default", "S4"): _WINDOWS,
    ("aten.upsample_nearest2d.vec", "S2"): "true for whole scale factors only",
    ("aten.upsample_nearest2d.vec", "S3"): "true for whole scale factors only",
    ("aten.convolution.default", "S1"): _GROUPS,
    ("aten.convolution_backward.default", "S1"): _GROUPS,
}
"""(operator, cut of its first input) → why a true rule is left out."""


def why_missing(name: str, rule: Rule, offered: tuple[Rule, ...]) -> str | None:
    """Why it does no harm that a true rule is not offered; None if there is no reason."""
    inputs, outputs = rule
    if not any(text[0] == "S" for text in inputs + outputs):
        return "only addends: the sum is as large before the op as behind it; offered where sums meet or are widened"
    if any(inputs == other[0] and _is_free(outputs, other[1]) for other in offered):
        return "R to S or P is a local slice or mask: free"
    if any(_is_weaker(rule, other) for other in offered):
        return "an operand that is not read may be an addend too; parameters and saved results never are"
    return REASONS.get((name, inputs[0]))


def _is_free(outputs: tuple[str, ...], offered: tuple[str, ...]) -> bool:
    return all(a == b or b == "R" for a, b in zip(outputs, offered, strict=True))


def _is_weaker(rule: Rule, offered: Rule) -> bool:
    """`rule` is the offered one with P in place of R among the inputs."""
    pairs = zip(rule[0], offered[0], strict=True)
    return rule[1] == offered[1] and all(a == b or (a, b) == ("P", "R") for a, b in pairs)


def check(facts: OpFacts) -> Iterator[str]:
    """Complaints about the rules of one op: wrong ones, and missing ones without a reason."""
    facts = WITHOUT_CHANCE.get(facts.name, lambda same: same)(facts)
    offered = find_rules(facts)
    if not facts.inputs:
        assert offered == (((), ("R",) * len(facts.outputs)),)
        return
    truth = {ranks: true_rules(facts, ranks) for ranks in RANKS}
    where = f"{facts.name} {[t.shape for t in facts.inputs]} {facts.args[1:]}"
    for rule in offered:
        wrong = [ranks for ranks in RANKS if is_testable(rule, facts, ranks) and rule not in truth[ranks]]
        if wrong:
            yield f"wrong on {wrong} ranks: {rule} of {where}"
    for rule in sorted(set.union(*truth.values()) - set(offered)):
        always = all(rule in truth[ranks] for ranks in RANKS if is_testable(rule, facts, ranks))
        if always and why_missing(facts.name, rule, offered) is None:
            yield f"missing: {rule} of {where}"


_checked: dict[object, list[str]] = {}
"""Complaints by key of the op: families share many."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_rules_of_a_family(family: str) -> None:
    ops = captured_ops(family)
    assert len(ops) > 20
    for key, facts in ops.items():
        if key not in _checked:
            _checked[key] = list(check(facts))
    assert [complaint for key in ops for complaint in _checked[key]] == []


_BY_HAND = list(hand_made())


@pytest.mark.slow
@pytest.mark.parametrize("facts", _BY_HAND, ids=lambda f: f.name)
def test_rules_of_an_op(facts: OpFacts) -> None:
    assert list(check(facts)) == []


def test_every_own_rule_is_tried() -> None:
    """No entry of our table goes untested; factories have one rule that cannot be wrong."""
    tried = {facts.name for facts in _BY_HAND}
    in_models = {"aten.embedding.default", "aten.unsqueeze.default"}
    factories = {name for name, (_, why) in OWN.items() if why == "made alike on every rank"}
    unread = {"aten.new_empty.default", "aten.new_empty_strided.default"}  # nothing to compare
    experts = set(EXPERT_RULES)  # see test_experts.py
    assert set(OWN) - tried - in_models - factories - unread - experts == set()


def _facts(name: str) -> OpFacts:
    return next(facts for facts in _BY_HAND if facts.name == name)


def test_brute_force_can_tell() -> None:
    """False rules are found false: a mean is no sum, rows and columns are not the same cut."""
    mean = true_rules(_facts("aten.mean.dim"), 2)
    assert (("S0",), ("S0",)) in mean
    assert (("S2",), ("P",)) not in mean
    product = true_rules(_facts("hpsearch.einsum.default"), 3)
    assert (("S2", "S1"), ("P",)) in product
    assert (("S2", "R"), ("P",)) not in product
    assert (("P", "P"), ("P",)) not in product
