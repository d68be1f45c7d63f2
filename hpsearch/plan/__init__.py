"""The plan file: what a search decided, readable, checked, and all that lowering needs. No torch.

Names are looked up when they are asked for: `hpsearch.plan.units` alone needs no solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpsearch.plan.fingerprint import model_fingerprint as model_fingerprint
    from hpsearch.plan.patterns import matches as matches
    from hpsearch.plan.patterns import param_patterns as param_patterns
    from hpsearch.plan.patterns import pattern_of as pattern_of
    from hpsearch.plan.plan import Plan as Plan
    from hpsearch.plan.plan import cluster_entry as cluster_entry
    from hpsearch.plan.schema import SCHEMA as SCHEMA
    from hpsearch.plan.schema import AxisEntry as AxisEntry
    from hpsearch.plan.schema import CapacityEntry as CapacityEntry
    from hpsearch.plan.schema import CertificateEntry as CertificateEntry
    from hpsearch.plan.schema import ClusterEntry as ClusterEntry
    from hpsearch.plan.schema import CollectiveEntry as CollectiveEntry
    from hpsearch.plan.schema import InputEntry as InputEntry
    from hpsearch.plan.schema import JobEntry as JobEntry
    from hpsearch.plan.schema import ModelEntry as ModelEntry
    from hpsearch.plan.schema import OffloadEntry as OffloadEntry
    from hpsearch.plan.schema import ParamEntry as ParamEntry
    from hpsearch.plan.schema import PipelineEntry as PipelineEntry
    from hpsearch.plan.schema import PlanFile as PlanFile
    from hpsearch.plan.schema import PredictedEntry as PredictedEntry
    from hpsearch.plan.schema import Refusal as Refusal

_ENTRIES = (
    "SCHEMA", "AxisEntry", "CapacityEntry", "CertificateEntry", "ClusterEntry", "CollectiveEntry", "InputEntry",
    "JobEntry", "ModelEntry", "OffloadEntry", "ParamEntry", "PipelineEntry", "PlanFile", "PredictedEntry", "Refusal",
)  # fmt: skip
_DOORS = {
    "model_fingerprint": "fingerprint",
    **dict.fromkeys(("matches", "param_patterns", "pattern_of"), "patterns"),
    **dict.fromkeys(("Plan", "cluster_entry"), "plan"),
    **dict.fromkeys(_ENTRIES, "schema"),
}
"""Public name → module that has it."""

__all__ = [*_DOORS]


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module 'hpsearch.plan' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hpsearch.plan.{_DOORS[name]}"), name)
    globals()[name] = value
    return value
