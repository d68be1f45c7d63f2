"""The shape of the house, read off the source: imports go down, the search half has no torch, files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
PACKAGE = REPO / "hpsearch"
ORDER = [
    ("errors",),
    ("files",),
    ("cluster",),
    ("layout",),
    ("schedule",),
    ("graph",),
    ("strategy",),
    ("solve",),
    ("cost",),
    ("estimate",),
    ("space",),
    ("aim",),
    ("plan",),
    ("search",),
    ("capture",),
    ("validate",),
    ("lower",),
    ("run",),
    ("measure",),
    ("export",),
    ("report",),
    ("compiler",),
    ("quickstart",),
    ("cli",),
    ("__init__", "__main__"),
]
"""Rooms from the ground up; each may import itself and what stands before it."""
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
SEARCH_HALF = [room for room, level in LEVEL.items() if level <= LEVEL["search"]]
MOST_LINES, MOST_FUNCTION_LINES = 400, 60
SOURCES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that the file imports, wherever the statement stands, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module, node.lineno
            if node.module == "hpsearch":
                yield from ((f"hpsearch.{alias.name}", node.lineno) for alias in node.names)


def ids(path: Path) -> str:
    return str(path.relative_to(REPO))


def test_every_room_has_its_place() -> None:
    found = {room_of(path) for path in SOURCES}
    assert found <= set(LEVEL), f"rooms without a place in the order: {sorted(found - set(LEVEL))}"


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_imports_go_down(path: Path) -> None:
    room = room_of(path)
    upward = []
    for module, line in imports_of(path):
        parts = module.split(".")
        if parts[0] == "hpsearch" and len(parts) > 1 and parts[1] in LEVEL:
            target = parts[1]
            if target != room and LEVEL[target] >= LEVEL[room] and not room == "errors" == target:
                upward.append(f"line {line}: {room} imports {module}")
    assert not upward


@pytest.mark.parametrize("path", [p for p in SOURCES if room_of(p) in SEARCH_HALF], ids=ids)
def test_the_search_half_names_no_torch(path: Path) -> None:
    found = [f"line {line}: {module}" for module, line in imports_of(path) if module.split(".")[0] in TORCH]
    assert not found


TORCH = ("torch", "transformers", "torchvision")


def test_importing_the_search_half_leaves_torch_out() -> None:
    modules = [
        ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if room_of(path) in (*SEARCH_HALF, "__init__")
    ]
    code = (
        f"import sys\nfor name in {modules!r}:\n    __import__(name)\nprint([m for m in {TORCH!r} if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=REPO)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, hpsearch.cli\nprint('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=REPO)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "False"


def test_one_file_knows_the_solver() -> None:
    users = {ids(path) for path in SOURCES for module, _ in imports_of(path) if module.split(".")[0] == "ortools"}
    assert len(users) == 1, users


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES
    long = [
        f"{node.name} at line {node.lineno}: {length} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_FUNCTION_LINES
    ]
    assert not long


def test_nothing_is_swallowed_or_left_undone() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                catches_all = node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception")
                silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                if catches_all or silent:
                    found.append(f"{ids(path)}:{node.lineno}: an exception is caught and forgotten")
            if isinstance(node, ast.Name) and node.id == "NotImplementedError":
                found.append(f"{ids(path)}:{node.lineno}: not implemented")
    assert not found


def test_the_project_stands_alone() -> None:
    """No file names a folder outside the repository, and none a task that was left for later."""
    outside = re.compile(r"(?<![\w.:/])/(home|root|mnt)/|\.\./\w|\b(TODO|FIXME|XXX)\b")
    here = Path(__file__)
    files = [p for folder in ("hpsearch", "tests", "examples", "cost_models") for p in (REPO / folder).rglob("*")]
    files += [REPO / name for name in ("README.md", "pyproject.toml", ".ci/run")]
    found = [
        f"{ids(path)}:{number}: {line.strip()[:100]}"
        for path in files
        if path.suffix in {".py", ".md", ".toml", ".json", ".txt", ""} and path.is_file() and path != here
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if outside.search(line)
    ]
    assert not found
