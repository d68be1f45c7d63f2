"""How a tensor lies on a mesh: axes, placements, and the collectives between two layouts. No torch."""

from hpsearch.layout.mesh import DATA_AXES, EXCHANGES, HEAD_TAIL, ROLES, Mesh, MeshAxis
from hpsearch.layout.placement import PARTIAL, REPLICATE, Layout, Placement, shard
from hpsearch.layout.redistribute import Collective, Step, path, redistribute, steps_between

__all__ = [
    "DATA_AXES",
    "EXCHANGES",
    "HEAD_TAIL",
    "PARTIAL",
    "REPLICATE",
    "ROLES",
    "Collective",
    "Layout",
    "Mesh",
    "MeshAxis",
    "Placement",
    "Step",
    "path",
    "redistribute",
    "shard",
    "steps_between",
]
