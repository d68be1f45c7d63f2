"""Every legal way to split every op. No torch, no prices."""

from hpsearch.strategy.data_axes import DataPlacements, propagate_all
from hpsearch.strategy.search_space import Edge, Node, Reader, SearchSpace, check_degree, enumerate_space, legal_tp

__all__ = [
    "DataPlacements",
    "Edge",
    "Node",
    "Reader",
    "SearchSpace",
    "check_degree",
    "enumerate_space",
    "legal_tp",
    "propagate_all",
]
