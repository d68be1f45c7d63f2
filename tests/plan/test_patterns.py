from __future__ import annotations

import dataclasses

from hpsearch.plan import matches, param_patterns, pattern_of
from tests.plan.sample import model


def test_a_pattern_stars_what_differs() -> None:
    assert pattern_of(["a.0.w", "a.1.w"]) == "a.*.w"
    assert pattern_of(["a.0.w"]) == "a.0.w"
    assert pattern_of(["a.0.e.3.w", "a.1.e.3.w"]) == "a.*.e.3.w"
    assert pattern_of([f"a.{i}.w" for i in (0, 1, 2, 5, 7, 8)], "{}") == "a.{0-2,5,7-8}.w"
    assert pattern_of(["a.left.w", "a.right.w"], "{}") == "a.{left,right}.w"


def test_patterns_match_their_names_and_no_others() -> None:
    fqns = [f"a.{i}.w" for i in (0, 1, 2, 5, 7, 8)]
    pattern = pattern_of(fqns, "{}")
    assert [f for f in (f"a.{i}.w" for i in range(12)) if matches(pattern, f)] == fqns
    assert matches("a.*.w", "a.11.w")
    assert not matches("a.*.w", "a.1.b.w")
    assert not matches("a.*.w", "a.1.v")
    assert matches("a.{left,3}.w", "a.left.w")
    assert not matches("a.{left,3}.w", "a.right.w")


def test_alternating_classes_do_not_share_a_name() -> None:
    graph = model(layers=4)
    other = dataclasses.replace(graph.blocks["Layer"], name="Layer#2")
    instances = tuple((("Layer", "Layer#2")[i % 2], prefix) for i, (_, prefix) in enumerate(graph.instances))
    mixed = dataclasses.replace(graph, blocks={**graph.blocks, "Layer#2": other}, instances=instances)
    assert param_patterns(graph)["Layer", "proj.weight"] == "layers.*.proj.weight"
    assert param_patterns(mixed) == {
        ("outer", "embed.weight"): "embed.weight",
        ("Layer", "proj.weight"): "layers.{0,2}.proj.weight",
        ("Layer#2", "proj.weight"): "layers.{1,3}.proj.weight",
    }
