"""The search space of each kind of mesh, made once."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpsearch.graph import ModelGraph
from hpsearch.layout import Mesh
from hpsearch.strategy import Followed, SearchSpace, enumerate_space, propagate_all


@dataclass
class Spaces:
    """Lives for one search."""

    model: ModelGraph
    _found: dict[int, SearchSpace] = field(default_factory=dict)
    _followed: Followed = field(default_factory=dict)

    def on(self, mesh: Mesh) -> SearchSpace:
        """The space of a mesh; meshes with the same tp share it."""
        tp = mesh.size("tp")
        if tp not in self._found:
            self._followed = self._followed or propagate_all(self.model, self.model.rows)
            self._found[tp] = enumerate_space(self.model, tp, self._followed)
        return self._found[tp]
