"""Pinned parameter layouts as forbidden states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpsearch.cost import CostTable
from hpsearch.errors import LegalityError
from hpsearch.plan import matches, param_patterns
from hpsearch.search.fix import Fix
from hpsearch.strategy.search_space import NodeKey


def pinned(table: CostTable, fix: Fix) -> CostTable:
    """The table with every storage forbidden that a pin does not name. Raises LegalityError for a pin on nothing."""
    if not fix.stored:
        return table
    patterns = _patterns(table)
    unary = list(table.problem.unary)
    for pin, layout in fix.stored.items():
        touched = _touched(pin, table)
        shared = [pattern for pattern in patterns.values() if pattern != pin and matches(pattern, pin)]
        if not touched and shared:
            problem = f"expected a name for all instances of its block, which share one decision, but got {pin}"
            raise LegalityError(f"fix {pin}={layout}", problem, f"Pin {shared[0]}.")
        if not touched:
            near = ", ".join(sorted(patterns.values())[:6])
            raise LegalityError(f"fix {pin}={layout}", "expected the name of a parameter", f"Parameters: {near}, …")
        for key in touched:
            node = table.keys.index(key)
            allowed = np.array([dict(storage.stored) == dict(layout) for storage in table.storages[key]])
            unary[node] = np.where(allowed, unary[node], np.inf)
    return replace(table, problem=replace(table.problem, unary=tuple(unary)))


def offered(table: CostTable, fix: Fix) -> str:
    """For each pinned layout that no parameter it names can have on this mesh, which ones there are."""
    said = []
    for pin, layout in fix.stored.items():
        for key in _touched(pin, table):
            layouts = list(dict.fromkeys(storage.stored for storage in table.storages[key]))
            if dict(layout) not in [dict(stored) for stored in layouts]:
                said.append(f"{_patterns(table)[key]} can rest as {', '.join(map(str, layouts))}")
    return "; ".join(said)


def _patterns(table: CostTable) -> dict[NodeKey, str]:
    graphs = table.space.graphs
    return {(g, graphs[g].params[local]): p for (g, local), p in param_patterns(table.space.model).items()}


def _touched(pin: str, table: CostTable) -> list[NodeKey]:
    """The parameters that a pin names: by name (each of a tied one's), by pattern, or as all those below a module."""
    params = table.space.model.params
    return [
        key
        for key, pattern in _patterns(table).items()
        for name in (pattern, *(params[pattern].aliases if pattern in params else ()))
        if name == pin or matches(pin, name) or name.startswith(pin + ".")
    ]
