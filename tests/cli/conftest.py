from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hpsearch.cli import main


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


Command = Callable[..., Ended]


@pytest.fixture
def hpsearch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The console script, in this process."""

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["hpsearch", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return Ended(int(end.value.code or 0), said.out, said.err)

    return run
