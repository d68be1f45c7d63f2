"""The table says the truth: it is complete, its sources are public, and what it calls tested has a test."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.cases.table import CASES, FILES

IDS = {
    "SHP": (1, 3, 5, 6, 8, 10, 11, 13, 15, 16, 18, 20, 21, 23, 25, 26, 28, 29),
    "CFG": (1, 3, 5, 6, 8, 10, 11, 13),
    "MEM": (1, 3, 5, 6, 8, 10, 11, 13, 15, 16, 18),
    "NUM": (1, 3, 5, 6, 8, 10, 11, 13, 15, 16, 18),
    "TOP": (1, 3, 5, 6, 8, 10, 11, 13),
    "PIP": (1, 3, 5, 6, 8, 10, 11, 13),
    "MOE": (1, 3, 5, 6, 8),
    "CKP": (1, 3, 5, 6),
    "ROB": (1, 3, 5, 6, 8, 10, 11, 13),
    "UX": (1, 3, 5, 6),
}
"""Every case there is, by kind."""


def functions(file: str) -> list[str]:
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def test_every_case_is_in_the_table_once() -> None:
    wanted = [f"{kind}-{number:02}" for kind, numbers in IDS.items() for number in numbers]
    assert len(wanted) == 85
    assert Counter(case.id for case in CASES) == Counter(wanted)


def test_every_tested_case_has_its_test() -> None:
    for case in CASES:
        if case.is_tested:
            file, prefix = case.test.split("::")
            assert any(name.startswith(prefix) for name in functions(Path(file).name)), f"{case.id}: no {case.test}"


def test_every_test_of_a_case_is_in_the_table() -> None:
    tested = {case.test.partition("::")[2] for case in CASES if case.is_tested}
    for kind, file in FILES.items():
        for name in functions(file):
            if name.startswith(f"test_{kind.lower()}_"):
                assert any(name.startswith(prefix) for prefix in tested), f"{file}::{name}"


def test_every_case_says_what_and_where_from() -> None:
    for case in CASES:
        assert case.situation, case.id
        assert case.outcome, case.id
        owner, repository, *rest = case.source.split("/")
        assert owner, case.source
        assert repository, case.source
        assert len(rest) in (0, 2), case.source
        assert not case.later or case.later.partition(":")[0] in ("issue 3", "issue 4", "issue 5"), case.id
        assert case.later or not case.here, case.id
