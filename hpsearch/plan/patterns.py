"""Parameter patterns: one name for the same parameter of every instance of a block class.

A component in which the instances differ is `*`, or the set of its numbers, `{0-4,6-10}`, where another block class
would share the starred name (Gemma's sliding and full layers alternate).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hpsearch.graph import ModelGraph


def param_patterns(graph: ModelGraph) -> dict[tuple[str, str], str]:
    """Pattern of each parameter, by (graph name, local name): `outer` or the block class, and the name inside it."""
    names: dict[tuple[str, str], tuple[str, ...]] = {("outer", local): (local,) for local in graph.outer.params}
    for block in graph.blocks.values():
        names |= {(block.name, local): graph.fqns(block.name, local) for local in block.params}
    starred = {key: pattern_of(fqns) for key, fqns in names.items()}
    shared = Counter(starred.values())
    return {key: pattern_of(names[key], "{}") if shared[text] > 1 else text for key, text in starred.items()}


def further_names(graph: ModelGraph, piece: str, local: str) -> tuple[str, ...]:
    """The other names of the tensors that a parameter of `piece` stands for: those it is tied to."""
    fqns = (local,) if piece == graph.outer.name else graph.fqns(piece, local)
    return tuple(dict.fromkeys(name for fqn in fqns if fqn in graph.params for name in graph.params[fqn].aliases))


def pattern_of(fqns: Sequence[str], style: str = "*") -> str:
    """`model.layers.*.mlp.up_proj.weight` for the names of all layers; with style `{}`, `model.layers.{0-3}.mlp…`.

    All names have equally many components (they are one module class at sibling places).
    """
    columns = [list(dict.fromkeys(parts)) for parts in zip(*(fqn.split(".") for fqn in fqns), strict=True)]
    return ".".join(parts[0] if len(parts) == 1 else "*" if style == "*" else _ranges(parts) for parts in columns)


def matches(pattern: str, fqn: str) -> bool:
    """Whether `fqn` is one of the names that `pattern` stands for; a star or a set is exactly one component."""
    wanted, found = pattern.split("."), fqn.split(".")
    return len(wanted) == len(found) and all(_component(w, f) for w, f in zip(wanted, found, strict=True))


def _component(wanted: str, found: str) -> bool:
    if not wanted.startswith("{"):
        return wanted in ("*", found)
    for item in wanted[1:-1].split(","):
        first, dash, last = item.partition("-")
        if item == found or (dash and found.isdigit() and int(first) <= int(found) <= int(last)):
            return True
    return False


def _ranges(parts: Iterable[str]) -> str:
    """`{0-4,6}` for 0 1 2 3 4 6; what is no number stands by itself."""
    numbers = sorted(int(part) for part in parts if part.isdigit())
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs] + [part for part in parts if not part.isdigit()]
    return "{" + ",".join(words) + "}"
