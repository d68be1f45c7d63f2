"""Line numbers for a TOML text: tomllib gives values without their place, and an error must name its line."""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_HEADER = re.compile(r"^\s*(\[\[?)([^\[\]]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*([A-Za-z0-9_\-."']+)\s*=""")


def line_of_paths(text: str) -> dict[Path, int]:
    """Where each table and each key of a valid TOML text stands, 1-based; entries of `[[x]]` are numbered from 0.

    Keys of an inline table stand on the line of the key that holds it, see `line_of`.
    """
    found: dict[Path, int] = {(): 1}
    counts: dict[Path, int] = {}
    table: Path = ()
    depth = 0
    for line, content in enumerate(text.splitlines(), 1):
        bare = _without_strings(content)
        header = _HEADER.match(content) if depth == 0 else None
        if header:
            table = _table_path(header, counts)
            found[table] = line
            if isinstance(table[-1], int):
                found.setdefault(table[:-1], line)
            continue
        key = _KEY.match(content) if depth == 0 else None
        if key:
            found.setdefault((*table, *_parts(key.group(1))), line)
        depth += bare.count("[") + bare.count("{") - bare.count("]") - bare.count("}")
    return found


def line_of(lines: dict[Path, int], path: Path) -> int:
    """The line of `path`, or of the closest table or key above it."""
    while path not in lines:
        path = path[:-1]
    return lines[path]


def path_text(path: Path) -> str:
    """`tiers[1].bandwidth.value` for ("tiers", 1, "bandwidth", "value")."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")


def _table_path(header: re.Match[str], counts: dict[Path, int]) -> Path:
    """The path of a header; arrays of tables met so far are entered at their last element."""
    names = _parts(header.group(2).strip())
    path: Path = ()
    for name in names[:-1]:
        path = (*path, name)
        if path in counts:
            path = (*path, counts[path])
    path = (*path, names[-1])
    if header.group(1) == "[[":
        counts[path] = counts.get(path, -1) + 1
        path = (*path, counts[path])
    return path


def _parts(key: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in key.split("."))


def _without_strings(content: str) -> str:
    """The line without quoted text and comments, so that brackets in them do not count."""
    return re.sub(r"\"[^\"]*\"|'[^']*'", "", content).split("#", 1)[0]
