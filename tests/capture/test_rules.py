"""`rules_for`: where rules come from, what is refused, what torch must still offer."""

from __future__ import annotations

import time

import pytest
import torch
from torch import fx

from hpsearch.capture import capture
from hpsearch.capture.dtensor_registry import COUNTS, registries, registry_rules, source_of
from hpsearch.capture.op_facts import OpFacts, TensorFacts
from hpsearch.capture.rule_table import MORE, OWN, letters
from hpsearch.capture.rules import find_rules, rule_source, rules_for
from hpsearch.errors import InternalError, UnsupportedOpError
from tests.capture.rule_cases import f, i, llama, op

aten = torch.ops.aten


def test_registries_of_this_torch() -> None:
    """A new torch moves rules between registries: read again which ops changed, then change the counts."""
    assert torch.__version__.split("+")[0].startswith("2.13."), "rules were read for torch 2.13"
    assert {name: len(found) for name, found in registries().items()} == COUNTS


def test_no_process_group_is_needed_or_made() -> None:
    assert registry_rules(op(aten.sum.dim_IntList, f(6, 12), [0]))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", sorted(OWN) + sorted(MORE))
def test_our_table_names_real_operators(name: str) -> None:
    namespace, packet, overload = name.split(".")
    assert getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema is not None


@pytest.mark.parametrize("name", sorted(MORE))
def test_more_rules_are_not_dtensors(name: str) -> None:
    """When DTensor offers them itself, the entry can go."""
    _, packet, overload = name.split(".")
    more = {"mean.dim": [[0]], "slice_scatter.default": [f(6, 12)]}.get(f"{packet}.{overload}", [])
    facts = op(getattr(getattr(aten, packet), overload), f(6, 12), *more)
    assert not set(MORE[name]) & set(registry_rules(facts))


def test_letters() -> None:
    assert letters(["bsd", "fd"], ["bsf"]) == [
        (("S0", "R"), ("S0",)),
        (("S1", "R"), ("S1",)),
        (("S2", "S1"), ("P",)),
        (("R", "S0"), ("S2",)),
    ]
    assert letters(["b."], ["b"]) == [(("S0",), ("S0",))]


def test_replicated_first_no_doubles_no_size_one_cuts() -> None:
    rules = find_rules(op(aten.add.Tensor, f(6, 1, 12), f(12)))
    assert rules[0] == (("R", "R"), ("R",))
    assert len(set(rules)) == len(rules)
    assert (("S1", "R"), ("S1",)) not in rules
    assert (("S2", "S0"), ("S2",)) in rules


def test_odd_dims_hide_nothing() -> None:
    """Rules do not depend on an axis size; divisibility is for the caller to check."""
    rules = find_rules(op(aten.sum.dim_IntList, f(7, 5), [0]))
    assert {(("S0",), ("P",)), (("S1",), ("S0",))} <= set(rules)


def test_addends_are_added_before_they_are_rounded() -> None:
    def cast(source: torch.dtype, target: torch.dtype) -> bool:
        facts = op(aten._to_copy.default, TensorFacts((6,), source), dtype=target)
        return (("P",), ("P",)) in find_rules(facts)

    assert cast(torch.bfloat16, torch.float32)
    assert not cast(torch.float32, torch.bfloat16)
    assert not cast(torch.float32, torch.int64)
    assert cast(torch.int64, torch.float32)


def test_no_sum_of_booleans() -> None:
    rules = find_rules(op(aten.view.default, TensorFacts((6, 4), torch.bool), [24]))
    assert rules == ((("R",), ("R",)), (("S0",), ("S0",)))


@torch.library.custom_op("rules_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_unknown_op_on_floats_is_refused() -> None:
    with pytest.raises(UnsupportedOpError, match=r"rules_test.double.default.*\[6, 12\].*rule_table"):
        find_rules(op(torch.ops.rules_test.double.default, f(6, 12)))


def test_unknown_op_on_integers_is_replicated_and_says_so() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(6, 12, dtype=torch.int64, device="meta")
    node = graph.call_function(torch.ops.rules_test.double.default, (x,))
    node.meta["val"] = x.meta["val"]
    assert rules_for(node) == ((("R",), ("R",)),)
    assert rule_source(node) == "none"


def test_only_operators_have_rules() -> None:
    with pytest.raises(InternalError, match="placeholder"):
        rules_for(fx.Graph().placeholder("x"))


def test_equal_numbers_of_other_types_are_other_arguments() -> None:
    assert op(aten.add.Tensor, f(6), 1).key != op(aten.add.Tensor, f(6), True).key
    assert op(aten.add.Tensor, i(6), 1).key == op(aten.add.Tensor, i(6), 1).key


def test_llama_is_quick_and_from_known_sources() -> None:
    case = llama()
    captured = capture(case.model, case.batch)
    nodes = [
        n for graph in captured.fx.values() for n in graph.nodes
        if n.op == "call_function" and hasattr(n.target, "_schema") and "block" not in str(n.target)
    ]  # fmt: skip
    facts = [OpFacts.of(n) for n in nodes]
    start = time.process_time()
    for each in facts:
        find_rules(each)  # not cached: every node anew
    assert time.process_time() - start < 1.5
    assert {rule_source(n) for n in nodes} == {"own", "single-axis", "mesh-wide"}
    assert source_of(aten.mm.default) == "single-axis"
