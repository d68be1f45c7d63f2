"""hpsearch: finds the fastest way to train a PyTorch model on a cluster, proves it, and runs it.

    parallel = hpsearch.compile(model, cluster)
    loss = parallel.step(batch)

The door is lazy: planning never imports torch, and `import hpsearch` imports nothing. The rooms are packages with a
function of their own name: `from hpsearch.search import search`, `from hpsearch.capture import capture`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpsearch.capture import CapturedGraph as CapturedGraph
    from hpsearch.cluster import Cluster as Cluster
    from hpsearch.compiler import compile as compile
    from hpsearch.graph import ModelGraph as ModelGraph
    from hpsearch.layout import Layout as Layout
    from hpsearch.layout import Mesh as Mesh
    from hpsearch.lower import ParallelProgram as ParallelProgram
    from hpsearch.plan import Plan as Plan
    from hpsearch.run import ParallelModule as ParallelModule

__version__ = "0.1.0"

_ERRORS = (
    "BatchError", "CaptureError", "CheckpointError", "ClusterError", "HpsearchError", "InfeasibleError",
    "InternalError", "LaunchError", "LegalityError", "LoweringError", "PlanError", "UnsupportedOpError",
)  # fmt: skip
_DOORS = {
    **dict.fromkeys(_ERRORS, "errors"),
    "Cluster": "cluster",
    "Layout": "layout",
    "Mesh": "layout",
    "ModelGraph": "graph",
    "Plan": "plan",
    "CapturedGraph": "capture",
    "ParallelProgram": "lower",
    "ParallelModule": "run",
    "compile": "compiler",
}
"""Public name → module that has it."""

__all__ = [*_DOORS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module 'hpsearch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hpsearch.{_DOORS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
