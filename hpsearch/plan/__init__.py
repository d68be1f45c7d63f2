"""The plan file: what a search decided, readable, checked, and all that lowering needs. No torch."""

from hpsearch.plan.fingerprint import model_fingerprint
from hpsearch.plan.patterns import matches, param_patterns, pattern_of
from hpsearch.plan.plan import Plan, cluster_entry
from hpsearch.plan.schema import (
    SCHEMA,
    AxisEntry,
    CertificateEntry,
    ClusterEntry,
    CollectiveEntry,
    InputEntry,
    JobEntry,
    ModelEntry,
    ParamEntry,
    PipelineEntry,
    PlanFile,
    PredictedEntry,
    Refusal,
)

__all__ = [
    "SCHEMA",
    "AxisEntry",
    "CertificateEntry",
    "ClusterEntry",
    "CollectiveEntry",
    "InputEntry",
    "JobEntry",
    "ModelEntry",
    "ParamEntry",
    "PipelineEntry",
    "Plan",
    "PlanFile",
    "PredictedEntry",
    "Refusal",
    "cluster_entry",
    "matches",
    "model_fingerprint",
    "param_patterns",
    "pattern_of",
]
