"""Format, lint and types, as `pyproject.toml` configures them: the search half and the command line are strict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
CHECKS = {"format": ["ruff", "format", "--check", "."], "lint": ["ruff", "check", "."], "types": ["mypy"]}


@pytest.mark.parametrize("check", CHECKS)
def test_style(check: str) -> None:
    command = [sys.executable, "-m", *CHECKS[check]]
    found = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stdout + found.stderr
