"""Pinned parameter layouts as forbidden states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpsearch.cost import CostTable
from hpsearch.errors import LegalityError
from hpsearch.plan import matches, param_patterns
from hpsearch.search.fix import Fix


def pinned(table: CostTable, fix: Fix) -> CostTable:
    """The table with every storage forbidden that a pin does not name. Raises LegalityError for a pin on nothing."""
    if not fix.stored:
        return table
    model = table.space.model
    patterns = {(g, _value(table, g, local)): p for (g, local), p in param_patterns(model).items()}
    unary = list(table.problem.unary)
    for pin, layout in fix.stored.items():
        touched = [
            key for key, pattern in patterns.items() if pattern == pin or matches(pin, pattern) or _prefix(pin, pattern)
        ]
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


def _prefix(pin: str, pattern: str) -> bool:
    """A module's name pins all parameters below it."""
    return pattern.startswith(pin + ".")


def _value(table: CostTable, graph: str, local: str) -> str:
    return table.space.graphs[graph].params[local]
