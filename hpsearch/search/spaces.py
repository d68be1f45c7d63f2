"""What does not depend on a candidate's prices, made once: the search space of each kind of mesh, and stages."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpsearch.graph import ModelGraph
from hpsearch.layout import Mesh
from hpsearch.plan.stages import Stage, split
from hpsearch.strategy import Followed, SearchSpace, along_axis, enumerate_space, propagate_all, propagate_sequence
from hpsearch.strategy.sequence import Along


@dataclass
class Spaces:
    """Lives for one search."""

    model: ModelGraph
    _found: dict[tuple[int, int, Along | None], SearchSpace] = field(default_factory=dict)
    _stages: dict[tuple[int, ...], tuple[Stage, ...]] = field(default_factory=dict)
    _followed: dict[Along | None, Followed] = field(default_factory=dict)

    def on(self, mesh: Mesh) -> SearchSpace:
        """The space of a mesh; meshes with the same tp, ep and cp share it."""
        tp, ep, along = mesh.size("tp"), mesh.size("ep"), along_axis(mesh)
        if (tp, ep, along) not in self._found:
            self._found[tp, ep, along] = enumerate_space(self.model, tp, self.followed(along), ep, mesh.size("cp"))
        return self._found[tp, ep, along]

    def stages(self, cut: tuple[int, ...]) -> tuple[Stage, ...]:
        """LegalityError: the model cannot be cut so."""
        if cut not in self._stages:
            self._stages[cut] = split(self.model, cut)
        return self._stages[cut]

    def followed(self, along: Along | None) -> Followed:
        if along not in self._followed:
            if along is None:
                self._followed[along] = propagate_all(self.model, self.model.rows)
            else:
                sequence = propagate_sequence(self.model, self.model.rows, along)
                self._followed[along] = self.followed(None) | {"sequence": sequence}
        return self._followed[along]
