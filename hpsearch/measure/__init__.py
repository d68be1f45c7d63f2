"""Measures a machine and writes its description."""

from hpsearch.measure.local import load_cluster, local_cluster

__all__ = ["load_cluster", "local_cluster"]
