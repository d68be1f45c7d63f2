"""A plan with stages, edited by hand and read without its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from hpsearch.errors import PlanError
from hpsearch.plan import Plan
from hpsearch.plan.explain import explain
from tests.plan.sample import param, plan_file

ACTIONS = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
LAST = {"blocks": ["layers.2", "layers.3"], "parameters": ["norm.weight"], "takes": ["call_1.0"], "takes_back": []}


def staged(change: Callable[[Any], None] = lambda tree: None) -> Plan:
    """Four layers on two stages of tp=2, after `change` of the tree."""
    file = plan_file()
    table = param("embed.weight", "outer", "embed.weight", (32, 16), 1, "R")
    norm = param("norm.weight", "outer", "norm.weight", (16, 16), 1, "R")
    tree = json.loads(Plan(file).content)
    tree["mesh"] = tree["mesh"][:1]
    tree |= {"placements": {}, "collectives": []}
    tree["predicted"]["communication_s"] = 0.0
    entries = [table, norm, param("layers.*.proj.weight", "Layer", "proj.weight", (16, 16), 4, "tp:S0")]
    tree["parameters"] = [json.loads(entry.model_dump_json()) for entry in entries]
    for entry in tree["parameters"]:
        entry |= {"stored": entry["used"], "gradient": entry["used"], "residency": "stored"}
    tree["inputs"][0]["layout"] = "R"
    tree["model"]["parameters"] = 512 + 256 + 4 * 256
    first = {"blocks": ["layers.0", "layers.1"], "parameters": ["embed.weight"], "takes_back": ["back_2.0"]}
    tree["pipeline"] = {
        "ranks": 2, "tier": "node", "kind": "1f1b", "actions": list(ACTIONS),
        "stages": [first, json.loads(json.dumps(LAST))],
    }  # fmt: skip
    change(tree)
    return Plan.from_bytes(json.dumps(tree).encode(), "plan.json")


def stage(number: int, **fields: Any) -> Callable[[Any], None]:
    return lambda tree: tree["pipeline"]["stages"][number].update(fields)


def said(plan: Plan) -> str:
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        console.print(explain(plan))
    return " ".join(capture.get().split())


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "twice": (stage(1, blocks=["layers.1", "layers.3"]), r"stages\[0\]\.blocks: layers\.1 stands 2 times"),
    "missing": (stage(1, blocks=["layers.3"]), r"expected 4 blocks \(4 Layer by .*, but found 3"),
    "unknown": (stage(1, blocks=["layers.2", "heads.3"]), r"stages\[1\]\.blocks: no parameter is inside of heads\.3"),
    "empty": (stage(1, blocks=[]), r"stages\[1\]\.blocks: expected at least one block, but found none"),
    "parameter lost": (stage(1, parameters=[]), r"expected norm\.weight on one of them, but found it on none"),
    "parameter twice": (stage(0, parameters=["embed.weight"] * 2), r"embed\.weight stands 2 times"),
    "parameter unknown": (stage(0, parameters=["layers.0.proj.weight"]), "no parameter outside of the blocks is call"),
    "takes emptied": (stage(1, takes=[]), r"stages\[1\]\.takes: expected a value of its neighbour, but found none"),
    "takes back emptied": (stage(0, takes_back=[]), r"stages\[0\]\.takes_back: expected a value of its neighbour"),
    "takes of nobody": (stage(0, takes=["x"]), r"stages\[0\]\.takes: expected none at this end, but found x"),
    "takes twice": (stage(1, takes=["x", "x"]), r"stages\[1\]\.takes: a value stands twice in x, x"),
    "kind": (lambda tree: tree["pipeline"].update(kind="gpipe"), "kind: expected 1f1b, .* are, but found gpipe"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_file_itself_contradicts_is_refused(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        staged(change)


def test_what_only_the_model_knows_is_told() -> None:
    plain = said(staged())
    assert "2 stages, schedule 1f1b; the first rank does 0F0" in plain
    assert "`compile` checks it." in plain
    assert "follows" not in plain
    swapped = said(staged(stage(1, blocks=["layers.3", "layers.2"])))
    assert "layers.3 follows layers.1: `compile` refuses that unless the model calls them so." in swapped


def test_actions_by_hand_are_told() -> None:
    def change(tree: Any) -> None:
        tree["pipeline"]["actions"][0] = "0F0 0F1 0I0 0B1 0W0"

    assert "schedule written by hand, not that of 1f1b; the first rank does 0F0 0F1 0I0" in said(staged(change))
