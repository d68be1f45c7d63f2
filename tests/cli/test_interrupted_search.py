"""Ctrl-C in a search: the best so far with its gap, or one line that there is none."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import typer

from hpsearch.cli.search import _searched
from hpsearch.space import Found, Space, answers
from tests.space.test_determinism import spaces

SEARCH = sys.modules["hpsearch.cli.search"]


@pytest.fixture
def space() -> Space:
    found = spaces()["experts"]
    return replace(found, pins={**found.pins, "tp": (1, 2), "cp": (1,), "pp": (1, 2), "schedule": ("1f1b",)})


def test_the_best_so_far_with_its_gap(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*of: Any, **how: Any) -> Iterator[Found]:
        for i, found in enumerate(answers(*of, **how)):
            yield found
            if not i:
                signal.raise_signal(signal.SIGINT)

    *_, whole = answers(space, gap=0.0)
    monkeypatch.setattr(SEARCH, "answers", pressed)
    before = signal.getsignal(signal.SIGINT)
    found, is_stopped = _searched(space, 0.0, float("inf"))
    assert is_stopped
    assert found.certificate.bound_s <= whole.best.step_s * (1 + 1e-9) <= found.best.step_s * (1 + 2e-9)
    assert 0 < found.certificate.gap < 1
    assert signal.getsignal(signal.SIGINT) == before


def test_before_the_first_answer(
    space: Space, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*of: Any, **how: Any) -> Iterator[Found]:
        signal.raise_signal(signal.SIGINT)
        yield from answers(*of, **how)

    monkeypatch.setattr(SEARCH, "answers", pressed)
    with pytest.raises(typer.Exit) as ended:
        _searched(space, 0.0, float("inf"))
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "hpsearch: interrupted before there was an answer; nothing is written.\n"
